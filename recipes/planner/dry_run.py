"""Dry run: a step of the recipe's own loop, trainer and cycle on tensors without memory.

Stages, order and the trainer's memory are those of the real code (`planned_device.py`); only the
rollout is computed (`planned_sides.py`). The run is one rank of the real number, and its
collectives move nothing. It has two micro batches of the longest sequences, because more take no
more memory.
"""

import contextlib
import dataclasses
import gc
import math
from array import array
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from memsaver import MemorySaver
from memsaver.memory import CachingAllocator
from recipes.arguments import LOOPS, cycle_arguments, trainer_config
from recipes.config.decisions import Decisions
from recipes.config.recipe import Recipe
from recipes.config.sections import LoopSection
from recipes.logs.peaks import Peaks
from recipes.loops.loop import Loop
from recipes.loops.sink import Sink
from recipes.planner.planned_device import (
    ATTENTION,
    PACKED_ATTENTION,
    PlannedDevice,
    register_attention,
)
from recipes.planner.planned_sides import EngineSizes, PlannedRollout, PlannedSaver, used_bytes
from recipes.setup.model_files import toy_tokenizer
from recipes.setup.preparation import Setup
from recipes.tasks import Problem, Score, Task, Tasks
from recipes.tasks.scoring import open_rewards
from rollout import Rollout
from trainer_bridge import Cycle, SequenceBatch, TrainerConfig
from trainer_bridge.models import Adapters, GraphMemory, HostGraphs, Runtime, code_tables
from trainer_bridge.offload import Wait
from trainer_bridge.sync import SyncReceipt
from trainer_bridge.tag_names import REFERENCE
from trainer_bridge.trainer import Trainer

Stages = dict[str, dict[str, Any]]
"""Peaks by stage, as in `recipes.logs.peaks.Peaks`."""
_PASSES = (
    *("compute_log_prob", "compute_ref_log_prob", "compute_values"),
    *("update_critic", "update_actor"),
)
_BUILD = "build"  # key of the trainer's construction
_SPARE = 1 << 30  # bytes that an overlapped reload leaves free (`Offloader`)


@dataclasses.dataclass(kw_only=True)
class PlannedRuntime(Runtime):
    """Runtime of one rank, whose tensors have a size and no content.

    Its world has one rank, because the planned batch is already the share of one rank.

    Attributes:
        planned: The device on which it allocates.
    """

    planned: PlannedDevice
    device: torch.device = PlannedSaver.device
    rank: int = 0
    world: int = 1
    attention: str | None = ATTENTION
    packed_attention: str | None = PACKED_ATTENTION
    compiles: bool = False

    def make_buffers(self, model: nn.Module) -> None:
        """Create the model's buffers with arbitrary content."""
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_meta:
                    empty = torch.empty(buffer.shape, dtype=buffer.dtype, device=self.device)
                    setattr(module, name, empty)

    def digest(self, model: nn.Module, masters: Mapping[nn.Parameter, Tensor]) -> str:
        """Return an empty digest, because the weights have no content."""
        return ""

    def draw_weights(self, model: nn.Module, *how: Any) -> None:
        """Skip drawing, because the weights have no content."""

    def host_memory(self, nbytes: int) -> Tensor:
        self.planned.host_bytes += nbytes
        with self.planned.placing(CachingAllocator()):  # not on the device
            return torch.empty(nbytes, dtype=torch.uint8)

    def empty_cache(self) -> None:
        self.planned.empty_cache()

    def graph_memory(self, saver: MemorySaver, tag: str) -> GraphMemory:
        return PlannedGraphs(saver, tag)

    def numbers(self, tensor: Tensor) -> NDArray[np.float64]:
        return np.zeros(len(tensor))


class PlannedGraphs(HostGraphs):
    """Memory of graphs, which a capture takes and a replay does not change."""

    def capture(self, run: Callable[[], None]) -> Any:
        super().capture(run).replay()
        return SimpleNamespace(replay=lambda: None)


class PlannedTrainer(Trainer):
    """A trainer whose offloads and reloads take no time, and whose sync moves no weights.

    The sync takes the memory in which adapters are merged, and keeps the scratch.

    Tags that leave during generation have left when it ends. Tags that come back during generation
    are back when it ends, if the device has room for them. Tags that come back during scoring are
    back immediately.

    Args:
        config: Configuration of a trainer with random weights.
        runtime: The planned device.

    Attributes:
        saver: The planned saver.
        room: Bytes of the device for both sides.
        rollout: The other side.
    """

    saver: PlannedSaver  # type: ignore[assignment]
    room: int
    rollout: PlannedRollout

    def __init__(self, config: TrainerConfig, runtime: PlannedRuntime) -> None:
        # PlannedSaver has the methods that a trainer without a layout needs.
        saver = cast(MemorySaver, PlannedSaver(runtime.planned))
        super().__init__(config, saver, runtime=runtime)
        self.runtime = runtime
        self.adapters = Adapters(self.model, config.lora) if config.lora else None
        self._scratch: Tensor | None = None
        self._leaving = self._returning = tuple[str, ...]()
        for name in _PASSES:
            setattr(self, name, partial(self._once, name))

    def begin(self, rollout: PlannedRollout, decisions: Decisions) -> None:
        """Return to the state of a new trainer with these decisions beside the given rollout."""
        self.rollout = rollout
        self.runtime.keep_unsharded = decisions.keep_unsharded
        # All planned sequences are equally long, so their number limits the tokens, too.
        limits: dict[str, Any] = {"micro_batch_tokens": None}
        limits["micro_batch_size"] = decisions.micro_batch_size
        self.config = dataclasses.replace(self.config, **limits)
        for model in self.models:
            model.config = dataclasses.replace(model.config, **limits)
        self._leaving = self._returning = ()  # The last run ended while its tags were leaving.
        self._scratch = None
        super().reload()
        if self.reference is not None:
            super().offload(REFERENCE)
        for model in self.models:
            model.forget_graphs()
        self.saver.planned.clear()
        self.saver.forget_discarded()
        self.saver.planned.once(_BUILD, lambda: self)

    def _once(self, name: str, batch: SequenceBatch, **how: Hashable) -> Any:
        """Run a pass, or repeat its memory requests if there was an equal one."""
        scores_itself = batch.old_logprobs is None
        key = name, tuple(map(len, batch.response_ids)), scores_itself, *how.items()
        key = *key, self.runtime.keep_unsharded, self.config.micro_batch_size
        updated: dict[str, Any] = {"update_actor": self.policy, "update_critic": self.critic}
        self.runtime.use_graphs(updated[name].graphs if name in updated else None)
        return self.saver.planned.once(key, partial(getattr(Trainer, name), self, batch, **how))

    def offload(self, *tags: str, wait: bool = True, into: str | None = None) -> None:
        if into is not None:
            sizes = self.saver.sizes()  # without the tag of an optimizer on the host
            self.rollout.receive({tag: sizes.get(tag, 0) for tag in tags}, into)
        if wait:
            super().offload(*tags)
        else:
            self._leaving = tags

    def reload(self, *tags: str, wait: Wait = True) -> None:
        if not wait and self._leaving:
            self._returning = tags
        else:
            super().reload(*tags)

    def end_overlap(self) -> None:
        """Complete the moves that began during generation."""
        if self._leaving:
            super().offload(*self._leaving)
        needed = sum(map(self.saver.sizes().__getitem__, self._returning))
        used = self.saver.usage().device_used_bytes or 0
        if self._returning and used + needed + _SPARE <= self.room:
            super().reload(*self._returning)
        self._leaving = self._returning = ()

    def sync_weights(self, version: int, **_: Any) -> SyncReceipt:
        if self.adapters is not None and self.adapters.served_as is None:
            if self._scratch is None:
                self._scratch = self.adapters.scratch()
            gather = self.adapters.factors
            self.saver.planned.once("merge", lambda: gather().clear())
        return self.alias_weights(version)

    def alias_weights(self, version: int) -> SyncReceipt:
        return SyncReceipt(version=version, digests=(), seconds=0, verify_seconds=0, stages={})


class PeaksSink(Sink):
    """Sink of a dry run, which keeps the peaks of stages."""

    def __init__(self) -> None:
        self.peaks = Peaks()

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        yield
        self.passed(name)

    def passed(self, name: str, *times: float) -> None:
        """Read the memory at the end of a stage; `Cycle` calls this as its `on_stage`."""
        self.peaks.passed(name)


@dataclasses.dataclass(frozen=True)
class DryRun:
    """Bytes of a step that is not the first.

    Attributes:
        stages: Peaks by stage.
        tags: Bytes of the trainer's tags while they have memory.
        host: Bytes that the trainer always holds on the host.
        handed_over: Bytes that go to the other side in a step.
    """

    stages: Stages
    tags: dict[str, int]
    host: int
    handed_over: int


def dry_run(
    decisions: Decisions,
    engine: EngineSizes,
    make_setup: Callable[[Decisions], Setup],
    trainer: PlannedTrainer,
    *,
    room: int,
    staged: bool = True,
) -> DryRun:
    """Run a step of a recipe and return the memory of a later step.

    `make_setup` and `trainer` come from `planned_trainer`, and one trainer serves any number of
    runs. Of the decisions, `exact` is the same in all of them. `room` is the bytes of the device
    for both sides, and `staged` is as in `PlannedRollout`.
    """
    setup, rollout, saver = make_setup(decisions), PlannedRollout(engine, staged), trainer.saver
    recipe = setup.recipe
    saver.used_by_peer = lambda: used_bytes(rollout.usage())
    rollout.answered, rollout.peer, trainer.room = trainer.end_overlap, saver, room
    trainer.begin(rollout, decisions)
    sink = PeaksSink()
    sink.peaks.watch("trainer", saver.take_usage)
    sink.peaks.watch("rollout", rollout.take_usage)
    served = cast(Rollout, rollout)  # It lacks the methods of a sync, which are never called.
    loop = LOOPS[recipe.algorithm](
        setup=setup,
        trainer=trainer,
        rollout=served,
        cycle=Cycle(trainer, served, on_stage=sink.passed, **cycle_arguments(setup)),
        rewards=open_rewards(setup.tasks, recipe.task, workers=0),
        sink=sink,
    )
    stages = _of_a_later_step(loop, sink.peaks, saver)
    handed_over = sum(rollout.handed_over.values())
    return DryRun(stages, saver.sizes(), saver.planned.host_bytes, handed_over)


def _of_a_later_step(loop: Loop, peaks: Peaks, saver: PlannedSaver) -> Stages:
    """Return the peaks of a step that begins with the previous step's blocks in torch's cache."""
    device = saver.planned
    begun = device.emptied
    peaks.passed("build")
    peaks.take()
    loop.to_rollout(1)
    loop.whole_step(1)
    stages, emptied, left = peaks.take(), device.emptied, saver.torch_bytes
    loop.to_rollout(2)
    stages |= peaks.take()
    if device.emptied > emptied:  # emptied on the way to the second step, as to the first
        return stages
    if emptied == begun:  # The cache was never emptied, so it only grows.
        # Small blocks of earlier steps decide where large ones fit: the larger of two ways counts.
        device.empty_cache()
        loop.whole_step(2)
        left = max(left, saver.torch_bytes)
        return {name: _with_cache(peak, left) for name, peak in stages.items()}
    loop.to_train()
    loop.to_rollout(2)
    loop.whole_step(2)
    return peaks.take()


def _with_cache(peak: dict[str, Any], cached: int) -> dict[str, Any]:
    """Return a stage's peak if torch holds at least `cached` bytes in the trainer."""
    more = max(0, cached - peak["torch"]["trainer"])
    grown = {
        name: peak[name] | {"trainer": peak[name]["trainer"] + more}
        for name in ("torch", "processes")
    }
    return {**peak, **grown, "device_bytes": peak["device_bytes"] + more}


@contextlib.contextmanager
def _frozen() -> Iterator[None]:
    """Exclude existing objects from garbage collection, which would take a third of the time.

    Objects that the process has frozen stay frozen.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def planned_trainer(
    recipe: Recipe,
    decisions: Decisions,
    directory: Path,
    *,
    prompt_tokens: int,
    workspace_bytes: int,
    caches: bool = True,
) -> Iterator[tuple[Callable[[Decisions], Setup], PlannedTrainer]]:
    """Build the recipe's trainer on a planned device, for dry runs with any further decisions.

    `directory` is the model's folder, and every prompt has `prompt_tokens` tokens. The function
    makes the setup of a dry run, whose answers depend on its micro batch. Both live inside the
    block. `workspace_bytes` and `caches` are as in `PlannedDevice`.
    """
    device = PlannedDevice(workspace_bytes, caches)
    if recipe.trainer.optimizer == "adamw_8bit":
        code_tables()  # An import on the planned device would leave tensors without content.
    ranks = 1 if decisions.alias else recipe.cluster.size  # aliased pages have whole parameters
    with _alone_among(ranks) as mesh, device, _frozen():

        def make_setup(decisions: Decisions) -> Setup:
            return _setup(recipe, decisions, directory, prompt_tokens)

        config = trainer_config(make_setup(decisions))
        config = dataclasses.replace(config, threads=None, random_init=True, leaving=())
        # An exact trainer launches kernels. What it keeps for the backward pass is the same.
        config = dataclasses.replace(config, exact=False)
        runtime = PlannedRuntime(mesh=mesh, planned=device)
        trainer = device.once(_BUILD, lambda: PlannedTrainer(config, runtime))
        yield make_setup, trainer


@contextlib.contextmanager
def _alone_among(world: int) -> Iterator[DeviceMesh]:
    """Build a mesh of `world` ranks of which only this one exists."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        rule = "a plan needs a process without a torch.distributed process group"
        raise ValueError(f"{rule}; destroy the group, or plan in another process")
    register_attention()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    finally:
        dist.destroy_process_group()


def _setup(recipe: Recipe, decisions: Decisions, directory: Path, prompt_tokens: int) -> Setup:
    answers = min(2 * decisions.micro_batch_size, recipe.answers_per_rank)
    group = 2 if recipe.algorithm == "grpo" else 1
    prompts = max(1, math.ceil(answers / group))
    # Fewer answers may not fill the mini batches. Two updates stand for any number.
    loop = LoopSection(
        prompts_per_step=prompts,
        samples_per_prompt=group,
        epochs=min(2, recipe.updates_per_step),
        router_replay=recipe.loop.router_replay,
    )
    ppo = dataclasses.replace(recipe.ppo, critic_warmup_steps=0)
    grpo = dataclasses.replace(recipe.grpo, sampling_rounds=1)  # all rewards are equal
    # All planned answers are cut off, and every planned step refreshes the reference.
    refreshes = min(1, recipe.loss.reference_every)
    loss = dataclasses.replace(recipe.loss, mask_cut_off=False, reference_every=refreshes)
    # Random weights could reject all answers.
    correction = dataclasses.replace(recipe.correction, reject=None, reject_above=None, veto=None)
    fields: dict[str, Any] = {"loop": loop, "grpo": grpo, "ppo": ppo}
    fields |= {"loss": loss, "correction": correction}
    small = dataclasses.replace(recipe, eval=dataclasses.replace(recipe.eval, every=0), **fields)
    ids = array("i", [0] * prompt_tokens)  # The planned prompts have a length and no content.
    problems = tuple(Problem(prompt=str(number), prompt_ids=ids) for number in range(prompts))
    wrong = Score(reward=0.0, correct=False)
    task = Task(name="planned", train=problems, held_out=problems, score=lambda *_: wrong)
    return Setup(
        recipe=small,
        decisions=decisions,
        tasks=Tasks(trained=(task,)),
        tokenizer=toy_tokenizer([]),
        model_dir=directory,
        device="cpu",
        kv_tokens=0,
        max_request_tokens=prompt_tokens + recipe.sampling.max_tokens,
    )
