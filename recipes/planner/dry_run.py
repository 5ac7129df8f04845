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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from recipes.config import Recipe
from recipes.models import describe_random_model, toy_tokenizer
from recipes.monitor import Monitor
from recipes.peaks import Peaks
from recipes.planner.attention import planned_attention
from recipes.planner.engine import EngineSizes, PlannedRollout
from recipes.planner.tracing import PlannedDevice, PlannedSaver
from recipes.preparation import Setup
from recipes.run import LOOPS, trainer_config
from recipes.tasks import Problem, Score, Task
from trainer_bridge import Cycle
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

    def sync_weights(self, version: int, **_: Any) -> Any: ...

    def share_weights(self, version: int, **_: Any) -> Any: ...


class _NoFolder:
    """Keeps nothing of what a monitor notes."""

    def add_span(self, *_: Any) -> None: ...

    def add_row(self, *_: Any) -> None: ...

    def add_events(self, *_: Any) -> None: ...


class _NoView:
    def stage(self, *_: Any) -> None: ...

    def row(self, *_: Any) -> None: ...

    def memory(self, *_: Any) -> None: ...


def dry_run(
    recipe: Recipe, fields: dict[str, Any], engine: EngineSizes, *, prompt_tokens: int, workspace_bytes: int
) -> Stages:
    """Peaks of a step after the first one. fields: of the model's config; the sizes on the engine's side are given."""
    device = PlannedDevice(workspace_bytes)
    with tempfile.TemporaryDirectory() as folder, _without_memory(recipe.cluster.size), device.following():
        tokenizer = toy_tokenizer([])
        describe_random_model(fields, tokenizer, Path(folder))
        setup = _setup(recipe, tokenizer, Path(folder), prompt_tokens)
        saver = PlannedSaver(device)
        config = dataclasses.replace(trainer_config(setup), device="cpu", threads=None, random_init=True)
        trainer = PlannedTrainer(config, saver)  # type: ignore[arg-type]
        trainer.planned, trainer.world = device, 1  # this rank's share of the sequences is all there is
        monitor = Monitor(_NoFolder(), _NoView())  # type: ignore[arg-type]
        rollout = PlannedRollout(engine)
        monitor.watch("trainer", trainer)  # type: ignore[arg-type]
        monitor.watch("rollout", rollout)
        cycle = Cycle(
            trainer,
            rollout,
            on_stage=monitor.passed,
            sleep_level=recipe.engine.sleep_level,
            keep=recipe.cycle.keep,
            critic=recipe.algorithm == "ppo",
            reference=recipe.loop.kl_coef > 0,
        )
        loop = LOOPS[recipe.algorithm](setup=setup, trainer=trainer, rollout=rollout, cycle=cycle, monitor=monitor)
        with mock.patch.object(dist, "get_world_size", _alone(dist.get_world_size)):
            for step in (1, 2):
                monitor.peaks.take()
                loop.train_step(step)
        return monitor.peaks.take()


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
            mock.patch("trainer_bridge.trainer.init_device_mesh", lambda *args, **kwargs: mesh),  # reads real tensors
        ):
            yield
    finally:
        dist.destroy_process_group()


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
    small = dataclasses.replace(recipe, **{recipe.algorithm: _one_pass(loop)}, eval=dataclasses.replace(recipe.eval, every=0))
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
