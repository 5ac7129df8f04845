"""One step of a recipe's own loop, trainer and cycle on tensors that take no memory.

So the stages are the cycle's, the order is the loop's, and what the trainer keeps is what its model
keeps; only the rollout is reckoned (`recipes.planner.tracing`). One rank of the real number, its
collectives moving nothing; two micro batches of the largest sequences, since more of them do not
take more memory.
"""

import contextlib
import dataclasses
import math
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from memsaver import MemorySaver, Usage
from memsaver.ops.layout import round_up
from recipes.arguments import LOOPS, cycle_arguments, trainer_config
from recipes.config.models import PpoSection
from recipes.config.recipe import Recipe
from recipes.logs.monitor import Monitor, Peaks, View
from recipes.logs.run_folder import RunFolder
from recipes.planner.allocator import CachingAllocator, repeated_layers, replay, with_layers
from recipes.planner.tracing import (
    ATTENTION,
    PACKED_ATTENTION,
    PAGE,
    EngineSizes,
    HandedOver,
    PlannedDevice,
    PlannedRollout,
    PlannedSaver,
    planned_usage,
    register_attention,
)
from recipes.setup.models import describe_random_model, toy_tokenizer
from recipes.setup.preparation import Setup
from recipes.tasks import Problem, Score, Task
from rollout import Rollout
from trainer_bridge import Cycle
from trainer_bridge.offload import Wait
from trainer_bridge.sync import SyncReceipt
from trainer_bridge.trainer import Trainer
from trainer_bridge.training import Runtime

Stages = dict[str, dict[str, Any]]
"""As `Peaks` has them."""
_SPARE = 1 << 30  # bytes that what comes back beside the answers leaves free (`Offloader`)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedSetup(Setup):
    prompt_tokens: int

    def prompt_ids(self, problem: Problem) -> list[int]:
        return [0] * self.prompt_tokens


@dataclasses.dataclass(kw_only=True)
class PlannedRuntime(Runtime):
    """One rank of `mesh`, with tensors that have a size and no content.

    It shares its batch with nobody: the planned batch is this rank's share already.
    """

    planned: PlannedDevice
    device: torch.device = PlannedSaver.device
    rank: int = 0
    world: int = 1
    attention: str | None = ATTENTION
    packed_attention: str | None = PACKED_ATTENTION

    def make_buffers(self, model: nn.Module) -> None:
        """Makes buffers of any content."""
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_meta:
                    empty = torch.empty(buffer.shape, dtype=buffer.dtype, device=self.device)
                    setattr(module, name, empty)

    def digest(self, model: nn.Module) -> str:
        """Return nothing: the weights have no content."""
        return ""

    def draw_weights(self, model: nn.Module, *how: Any) -> None:
        """Drawing takes long, and the weights have no content."""

    def host_memory(self, nbytes: int) -> Tensor:
        self.planned.host_bytes += nbytes
        with self.planned.placing(CachingAllocator()):  # none of the device's
            return torch.empty(nbytes, dtype=torch.uint8)

    def empty_cache(self) -> None:
        self.planned.empty_cache()

    def numbers(self, tensor: Tensor) -> list[float]:
        return [0.0] * len(tensor)


class PlannedTrainer(Trainer):
    """A sync reads shards and writes elsewhere: nothing to reckon. What leaves beside the answers
    has left when they are there, and what comes beside scores is there at once. What comes back
    beside the answers is there with them, if there is room (`Readings`).
    """

    leaving: tuple[str, ...] = ()
    returning: tuple[str, ...] = ()
    handed_over: set[HandedOver]

    def offload(self, *tags: str, wait: bool = True, into: str | None = None) -> None:
        if into is not None:
            self.handed_over.add((tags, into))
        if wait:
            super().offload(*tags)
        else:
            self.leaving = tags

    def leave(self) -> None:
        if self.leaving:
            super().offload(*self.leaving)
        self.leaving = ()

    def reload(self, *tags: str, wait: Wait = True) -> None:
        if not wait and self.leaving:
            self.returning = tags
        else:
            super().reload(*tags)
            self.returning = ()

    def sync_weights(self, version: int, **_: Any) -> SyncReceipt:
        names = ("nbytes", "link_bytes", "seconds", "copy_seconds", "verify_seconds")
        none: dict[str, Any] = dict.fromkeys(names, 0)
        return SyncReceipt(version=version, digests=(), stages={}, **none)

    alias_weights = sync_weights


class Reading(NamedTuple):
    """paused, returning: tags of the trainer's. emptied: how often torch's cache was by then."""

    stage: str
    paused: set[str]
    returning: set[str]
    served: Usage
    emptied: int


class Readings(Peaks):
    """Notes where peaks would be read; `peaks` has them once the saver's log has been played."""

    def __init__(
        self, saver: PlannedSaver, trainer: PlannedTrainer, rollout: PlannedRollout
    ) -> None:
        super().__init__()
        self.noted: list[Reading] = []
        self._saver, self._trainer, self._rollout = saver, trainer, rollout

    def passed(self, stage: str) -> None:
        self._saver.planned.read()
        paused, returning = set(self._saver.paused), set(self._trainer.returning)
        used, emptied = self._rollout.take_usage(), self._saver.planned.emptied
        self.noted.append(Reading(stage, paused, returning, used, emptied))

    def peaks(
        self, sizes: Mapping[str, int], torch_use: Sequence[tuple[int, int]], first: int, room: int
    ) -> Stages:
        """Returns a later step's peaks. first: readings up to the first step's end. room: bytes."""
        both, came = [], False
        before: set[str] = set()
        torch_use = self._of_a_later_step(torch_use, first)
        for (_, paused, returning, served, _), use in zip(self.noted, torch_use, strict=True):
            back = paused & returning
            usage = planned_usage(sizes, paused - back, *use)
            if back and not before:  # the answers are there, and the engine sleeps later
                came = _used(usage, served) + _SPARE <= room
            before = back
            usage = usage if came else planned_usage(sizes, paused, *use)
            both.append(_on_one_device(usage, served))
        peaks, trainer, rollout = Peaks(), iter(both), iter(both)
        peaks.watch("trainer", lambda: next(trainer)[0])
        peaks.watch("rollout", lambda: next(rollout)[1])
        steps: list[Stages] = []
        for part in (self.noted[:1], self.noted[1:first], self.noted[first:]):
            for stage, *_ in part:
                peaks.passed(stage)
            steps.append(peaks.take())
        again = steps[2].keys()
        return steps[2] | {stage: steps[1][stage] for stage in steps[1] if stage not in again}

    def _of_a_later_step(
        self, torch_use: Sequence[tuple[int, int]], first: int
    ) -> list[tuple[int, int]]:
        """Until the first step's cache is emptied on its way from the rollout, a later step has
        what the one before left there.
        """
        later, switched = list(torch_use), len(torch_use) - first
        left, _ = torch_use[-1]
        for number in range(switched + 1, first):
            if self.noted[number - 1].emptied > self.noted[switched].emptied:
                break
            now, most = torch_use[number]
            kept = self.noted[number].emptied == self.noted[switched].emptied
            later[number] = max(now, left) if kept else now, max(most, left)
        return later


def _used(*sides: Usage) -> int:
    return sum(sum(usage.tags.values()) + usage.torch_bytes for usage in sides)


def _on_one_device(one: Usage, other: Usage) -> tuple[Usage, Usage]:
    used = _used(one, other)
    first, second = (dataclasses.replace(each, device_used_bytes=used) for each in (one, other))
    return first, second


@dataclasses.dataclass(frozen=True)
class DryRun:
    """stages: of a step after the first. tags: bytes of the trainer's while they have memory. host:
    what it has on the host for good. handed_over: bytes of a step that go to the other side.
    """

    stages: Stages
    tags: dict[str, int]
    host: int
    handed_over: int


def dry_run(
    recipe: Recipe,
    fields: dict[str, Any],
    engine: EngineSizes,
    *,
    prompt_tokens: int,
    workspace_bytes: int,
    room: int,
    all_layers: bool = False,
    staged: bool = True,
) -> DryRun:
    """fields: of the model's config. all_layers: trace every layer; otherwise some, and repeat a
    period of them. room: bytes of a device for both sides. staged: see `PlannedRollout`."""
    first, period, copies = (0, 1, 0) if all_layers else repeated_layers(fields)
    traced = fields["num_hidden_layers"] - copies * period
    few = _with_layers(fields, traced)
    rollout = PlannedRollout(engine, staged)
    saver = PlannedSaver(PlannedDevice(workspace_bytes))
    readings, before = _trace(recipe, few, rollout, prompt_tokens, saver)
    sizes, host = saver.sizes(), saver.planned.host_bytes
    if copies:
        more = _built(recipe, _with_layers(fields, traced + period), prompt_tokens)
        larger, host_larger = more.sizes(), more.planned.host_bytes
        sizes = {tag: nbytes + copies * (larger[tag] - nbytes) for tag, nbytes in sizes.items()}
        host += copies * (host_larger - host)
    sizes = {tag: round_up(nbytes, PAGE) for tag, nbytes in sizes.items()}
    torch_use = replay(with_layers(saver.planned.log.entries, first, period, copies))
    both = Counter(sizes | engine.tags)  # of an optimizer on the host the tag is empty
    pairs = [(map(both.__getitem__, tags), both[into]) for tags, into in rollout.handed_over]
    handed_over = sum(min(sum(given), taken) for given, taken in pairs)
    return DryRun(readings.peaks(sizes, torch_use, before, room), sizes, host, handed_over)


def _with_layers(fields: dict[str, Any], layers: int) -> dict[str, Any]:
    """The first so many; lists that say something of each layer are cut, too."""
    all_layers = fields["num_hidden_layers"]
    cut = {
        name: value[:layers] if isinstance(value, list) and len(value) == all_layers else value
        for name, value in fields.items()
    }
    return cut | {"num_hidden_layers": layers}


def _trace(
    recipe: Recipe,
    fields: dict[str, Any],
    rollout: PlannedRollout,
    prompt_tokens: int,
    saver: PlannedSaver,
) -> tuple[Readings, int]:
    """A step, and the way to the next one's rollout; how many readings there were before that."""
    with _trainer(recipe, fields, prompt_tokens, saver) as (setup, trainer):
        rollout.answered, trainer.handed_over = trainer.leave, rollout.handed_over
        monitor = Monitor(RunFolder(setup.model_dir), View())
        monitor.peaks = readings = Readings(saver, trainer, rollout)
        served = cast(Rollout, rollout)  # but for the methods of a sync
        cycle = Cycle(trainer, served, on_stage=monitor.passed, **cycle_arguments(recipe))
        make_loop = LOOPS[recipe.algorithm]
        loop = make_loop(setup=setup, trainer=trainer, rollout=served, cycle=cycle, monitor=monitor)
        for model in trainer.models():
            saver.planned.mark_layers(model)
        readings.passed("build")
        loop.train_step(1)
        first = len(readings.noted)
        loop.to_rollout(2)
    return readings, first


def _built(recipe: Recipe, fields: dict[str, Any], prompt_tokens: int) -> PlannedSaver:
    """Only made: it has the bytes of the tags, and of the host."""
    saver = PlannedSaver(PlannedDevice(workspace_bytes=0))
    with _trainer(recipe, fields, prompt_tokens, saver):
        return saver


@contextlib.contextmanager
def _trainer(
    recipe: Recipe, fields: dict[str, Any], prompt_tokens: int, saver: PlannedSaver
) -> Iterator[tuple[PlannedSetup, PlannedTrainer]]:
    """The recipe's trainer on `saver`, alive inside the block."""
    with (
        tempfile.TemporaryDirectory() as folder,
        _without_memory(recipe.cluster.size) as mesh,
        saver.planned.following(),
    ):
        tokenizer = toy_tokenizer([])
        describe_random_model(fields, tokenizer, Path(folder))
        setup = _setup(recipe, tokenizer, Path(folder), prompt_tokens)
        config = trainer_config(setup)
        config = dataclasses.replace(config, threads=None, random_init=True, leaving=())
        runtime = PlannedRuntime(mesh=mesh, planned=saver.planned)
        real = cast(MemorySaver, saver)  # as far as a trainer without a layout needs one
        yield setup, PlannedTrainer(config, real, runtime=runtime)


@contextlib.contextmanager
def _without_memory(world: int) -> Iterator[DeviceMesh]:
    """Fake tensors on the CPU, and a mesh of `world` ranks in which nobody else is."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        rule = "a plan needs a process without a torch.distributed process group"
        raise ValueError(f"{rule}; end it, or plan elsewhere")
    register_attention()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        # Real, for it reads the tensor of its ranks.
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield mesh
    finally:
        dist.destroy_process_group()


def _setup(recipe: Recipe, tokenizer: Any, folder: Path, prompt_tokens: int) -> PlannedSetup:
    of_a_step = recipe.loop.prompts_per_step * recipe.loop.samples_per_prompt
    answers = min(2 * recipe.trainer.micro_batch_size, math.ceil(of_a_step / recipe.cluster.size))
    group = 2 if recipe.algorithm == "grpo" else 1
    loop, prompts = recipe.loop, max(1, math.ceil(answers / group))
    if isinstance(loop, PpoSection):  # first, for fewer answers may not do for its mini batches
        loop = dataclasses.replace(loop, epochs=1, mini_batches=1, critic_warmup_steps=0)
    loop = dataclasses.replace(loop, prompts_per_step=prompts, samples_per_prompt=group)
    fields: dict[str, Any] = {recipe.algorithm: loop}
    small = dataclasses.replace(recipe, eval=dataclasses.replace(recipe.eval, every=0), **fields)
    problems = tuple(
        Problem(question=str(index), answer="") for index in range(loop.prompts_per_step)
    )
    wrong = Score(reward=0.0, exact=False)
    task = Task(name="planned", train=problems, held_out=problems, score=lambda *_: wrong)
    return PlannedSetup(
        recipe=small,
        task=task,
        tokenizer=tokenizer,
        model_dir=folder,
        device="cpu",
        kv_tokens=0,
        max_request_tokens=prompt_tokens + recipe.sampling.max_tokens,
        prompt_tokens=prompt_tokens,
    )
