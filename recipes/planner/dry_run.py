"""One step of a recipe's own loop, trainer and cycle on tensors that take no memory.

So the stages are the cycle's, the order is the loop's, and what the trainer keeps is what its model keeps; only the
rollout is reckoned (`recipes.planner.engine`). One rank of the real number, its collectives moving nothing; two micro
batches of the largest sequences, since more of them do not take more memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from memsaver import Usage
from memsaver.common.rounding import round_up
from recipes.planner.attention import planned_attention
from recipes.planner.engine import EngineSizes, PlannedRollout
from recipes.planner.layers import repeated_layers
from recipes.planner.log import replay, with_layers
from recipes.planner.tracing import PAGE, PlannedDevice, PlannedSaver
from recipes.recipe import Recipe
from recipes.run import LOOPS, cycle_arguments, trainer_config
from recipes.setup.models import describe_random_model, toy_tokenizer
from recipes.setup.preparation import Setup
from recipes.tasks import Problem, Score, Task
from recipes.watch.monitor import Monitor
from recipes.watch.peaks import Peaks
from trainer_bridge import Cycle
from trainer_bridge.sync.weight_sync import SyncReceipt
from trainer_bridge.trainer import Trainer

Stages = dict[str, dict[str, Any]]
"""As `Peaks` has them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedSetup(Setup):
    prompt_tokens: int

    def prompt_ids(self, problem: Problem) -> list[int]:
        return [0] * self.prompt_tokens


class PlannedTrainer(Trainer):
    """A sync reads shards and writes elsewhere: nothing to reckon."""

    planned: PlannedDevice

    def empty_cache(self) -> None:
        super().empty_cache()
        self.planned.empty_cache()

    def sync_weights(self, version: int, **_: Any) -> SyncReceipt:
        return _nothing_moved(version)

    def share_weights(self, version: int, **_: Any) -> SyncReceipt:
        return _nothing_moved(version)


def _nothing_moved(version: int) -> SyncReceipt:
    none: dict[str, Any] = {"nbytes": 0, "link_bytes": 0, "seconds": 0.0, "copy_seconds": 0.0, "verify_seconds": 0.0}
    return SyncReceipt(version=version, digests=(), stages={}, **none)


class _NoFolder:
    """Keeps nothing of what a monitor notes."""

    def add_span(self, *_: Any) -> None: ...

    def add_row(self, *_: Any) -> None: ...

    def add_events(self, *_: Any) -> None: ...


class _NoView:
    def stage(self, *_: Any) -> None: ...

    def row(self, *_: Any) -> None: ...

    def memory(self, *_: Any) -> None: ...


@dataclasses.dataclass
class Readings:
    """In the place of a monitor's `Peaks`: notes where they would be read. See `PlannedDevice.read`."""

    device: PlannedDevice
    saver: PlannedSaver
    rollout: PlannedRollout
    stages: list[tuple[str, frozenset[str], Usage]] = dataclasses.field(default_factory=list)

    def watch(self, owner: str, take_usage: Any) -> None: ...

    def take(self) -> Stages:
        return {}

    def passed(self, stage: str) -> None:
        self.device.read()
        self.stages.append((stage, frozenset(self.saver.paused), self.rollout.take_usage()))

    def peaks(self, sizes: Mapping[str, int], torch_use: Sequence[tuple[int, int]], first: int) -> Stages:
        """Of a step that another has gone before. first: readings before and in the first step."""
        now = [_usage(sizes, paused, use) for (_, paused, _), use in zip(self.stages, torch_use, strict=True)]
        peaks, trainer, rollout = Peaks(), iter(now), iter(usage for _, _, usage in self.stages)
        peaks.watch("trainer", lambda: next(trainer))
        peaks.watch("rollout", lambda: next(rollout))
        steps: list[Stages] = []
        for part in (self.stages[:1], self.stages[1:first], self.stages[first:]):
            for stage, _, _ in part:
                peaks.passed(stage)
            steps.append(peaks.take())
        return {**steps[2], **{stage: entry for stage, entry in steps[1].items() if stage not in steps[2]}}


def _usage(sizes: Mapping[str, int], paused: frozenset[str], use: tuple[int, int]) -> Usage:
    return Usage(
        tags={tag: 0 if tag in paused else nbytes for tag, nbytes in sizes.items()},
        torch_bytes=use[0],
        torch_peak_bytes=use[1],
        device_used_bytes=None,
        host_bytes=0,
    )


@dataclasses.dataclass(frozen=True)
class DryRun:
    """stages: of a step after the first. tags: bytes of the trainer's while they have memory."""

    stages: Stages
    tags: dict[str, int]


def dry_run(
    recipe: Recipe,
    fields: dict[str, Any],
    engine: EngineSizes,
    *,
    prompt_tokens: int,
    workspace_bytes: int,
    all_layers: bool = False,
    staged: bool = True,
) -> DryRun:
    """fields: of the model's config. all_layers: trace every layer; otherwise some, and repeat a
    period of them. staged: see `PlannedRollout`."""
    first, period, copies = (0, 1, 0) if all_layers else repeated_layers(fields)
    traced = fields["num_hidden_layers"] - copies * period
    few = _with_layers(fields, traced)
    rollout = PlannedRollout(engine, staged)
    readings, before = _trace(recipe, few, rollout, prompt_tokens, workspace_bytes)
    sizes = readings.saver.sizes()
    if copies:
        larger = _built(recipe, _with_layers(fields, traced + period), prompt_tokens)
        sizes = {tag: nbytes + copies * (larger[tag] - nbytes) for tag, nbytes in sizes.items()}
    sizes = {tag: round_up(nbytes, PAGE) for tag, nbytes in sizes.items()}
    torch_use = replay(with_layers(readings.device.log.entries, first, period, copies))
    return DryRun(readings.peaks(sizes, torch_use, before), sizes)


def _with_layers(fields: dict[str, Any], layers: int) -> dict[str, Any]:
    """The first so many; lists that say something of each layer are cut, too."""
    all_layers = fields["num_hidden_layers"]
    cut = {
        name: value[:layers] if isinstance(value, list) and len(value) == all_layers else value
        for name, value in fields.items()
    }
    return cut | {"num_hidden_layers": layers}


def _trace(
    recipe: Recipe, fields: dict[str, Any], rollout: PlannedRollout, prompt_tokens: int, workspace_bytes: int
) -> tuple[Readings, int]:
    """A step, and the way to the next one's rollout; and how many readings there were before that."""
    with _trainer(recipe, fields, prompt_tokens, workspace_bytes) as (setup, trainer, saver):
        monitor = Monitor(_NoFolder(), _NoView())  # type: ignore[arg-type]
        readings = Readings(trainer.planned, saver, rollout)
        monitor.peaks = readings  # type: ignore[assignment]
        cycle = Cycle(trainer, rollout, on_stage=monitor.passed, **cycle_arguments(recipe))  # type: ignore[arg-type]
        loop = LOOPS[recipe.algorithm](
            setup=setup,
            trainer=trainer,
            rollout=rollout,  # type: ignore[arg-type]
            cycle=cycle,
            monitor=monitor,
        )
        for model in trainer.models():
            trainer.planned.mark_layers(model)
        readings.passed("build")
        with mock.patch.object(dist, "get_world_size", _alone(dist.get_world_size)):
            loop.train_step(1)
            first = len(readings.stages)
            loop.to_rollout(2)
    return readings, first


def _built(recipe: Recipe, fields: dict[str, Any], prompt_tokens: int) -> dict[str, int]:
    """Bytes of the tags alone."""
    with _trainer(recipe, fields, prompt_tokens, 0) as (_, _, saver):
        return saver.sizes()


@contextlib.contextmanager
def _trainer(
    recipe: Recipe, fields: dict[str, Any], prompt_tokens: int, workspace_bytes: int
) -> Iterator[tuple[PlannedSetup, PlannedTrainer, PlannedSaver]]:
    device = PlannedDevice(workspace_bytes)
    saver = PlannedSaver(device)
    with tempfile.TemporaryDirectory() as folder, _without_memory(recipe.cluster.size), device.following():
        tokenizer = toy_tokenizer([])
        describe_random_model(fields, tokenizer, Path(folder))
        setup = _setup(recipe, tokenizer, Path(folder), prompt_tokens)
        config = dataclasses.replace(trainer_config(setup), device="cpu", threads=None, random_init=True)
        trainer = PlannedTrainer(config, saver)  # type: ignore[arg-type]
        trainer.planned, trainer.world = device, 1  # this rank's share of the sequences is all there is
        yield setup, trainer, saver


@contextlib.contextmanager
def _without_memory(world: int) -> Iterator[None]:
    """Fake tensors on the CPU, and a process group of `world` ranks in which nobody else is."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ValueError("a plan needs a process without a torch.distributed process group; end it, or plan elsewhere")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    try:
        with (
            planned_attention(),
            FakeTensorMode(allow_non_fake_inputs=True),
            mock.patch.object(FakeTensor, "tolist", _zeros),
            mock.patch("trainer_bridge.trainer.ensure_process_group", lambda device: False),
            mock.patch("trainer_bridge.training.model.randomise_weights", lambda *_: None),  # slow, and of no weight
            mock.patch("trainer_bridge.training.model._rebuild_buffers", _take_buffers),
            mock.patch("trainer_bridge.trainer.init_device_mesh", lambda *args, **kwargs: mesh),  # reads real tensors
        ):
            yield
    finally:
        dist.destroy_process_group()


def _take_buffers(model: nn.Module, device: torch.device) -> None:
    """Of any content, also where the trainer could not make it (routers of DeepSeek-V3)."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=device))


def _zeros(tensor: Tensor) -> list[Any]:
    if tensor.dim() == 1:
        return [0.0] * tensor.shape[0]
    return [_zeros(row) for row in tensor]


def _alone(real: Any) -> Any:
    return lambda group=None: 1 if group is None else real(group)


def _setup(recipe: Recipe, tokenizer: Any, folder: Path, prompt_tokens: int) -> PlannedSetup:
    answers = min(
        2 * recipe.trainer.micro_batch_size,
        math.ceil(recipe.loop.prompts_per_step * recipe.loop.samples_per_prompt / recipe.cluster.size),
    )
    group = 2 if recipe.algorithm == "grpo" else 1
    loop = dataclasses.replace(
        recipe.loop, prompts_per_step=max(1, math.ceil(answers / group)), samples_per_prompt=group
    )
    fields: dict[str, Any] = {recipe.algorithm: _one_pass(loop), "eval": dataclasses.replace(recipe.eval, every=0)}
    small = dataclasses.replace(recipe, **fields)
    problems = tuple(Problem(question=str(index), answer="") for index in range(loop.prompts_per_step))
    task = Task(name="planned", train=problems, held_out=problems, beside={}, score=_score)
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


def _one_pass(loop: Any) -> Any:
    fields = {"epochs": 1, "mini_batches": 1, "critic_warmup_steps": 0}
    return dataclasses.replace(loop, **{name: value for name, value in fields.items() if hasattr(loop, name)})


def _score(problem: Problem, text: str, ended: bool) -> Score:
    return Score(reward=0.0, exact=False)
