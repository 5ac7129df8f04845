"""Decisions of recomputation and CUDA graphs in updates: what takes least time and fits."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

from recipes.config.decisions import Decisions
from recipes.config.literals import Checkpointing
from recipes.config.recipe import Recipe
from recipes.planner.memory_plan import MemoryPlan
from recipes.setup.operations import count_operations
from rollout.model import load_hf_config
from trainer_bridge.models import why_no_graphs

_RATE = 4e14
"""Operations a second of a pass that recomputes nothing and is limited by the device."""


class _Way(NamedTuple):
    """A way of recomputation, measured on H200s at the 0.5B and 7B shapes.

    Attributes:
        device: Time of a pass that the device limits, over that of one without recomputation.
        host: Seconds that the host takes to launch a layer of a pass, forward and backward.
        words: What is recomputed, for a reader.
    """

    device: float
    host: float
    words: str


_WAYS: Mapping[Checkpointing, _Way] = {
    "none": _Way(1.0, 4.5e-3, "nothing"),
    "mlp": _Way(1.16, 6e-3, "MLPs"),
    "layers": _Way(1.23, 8.5e-3, "layers"),
}


@dataclass(frozen=True)
class Work:
    """The work of a step's updates on a rank.

    Attributes:
        operations: Operations of forward and backward, without what backward repeats.
        updates: Number of updates.
        answers: Answers of an update.
        layers: Layers of the model.
        graphs: Whether layers can be launched as CUDA graphs, which take the host no time.
    """

    operations: float
    updates: int
    answers: int
    layers: int
    graphs: bool = False

    @classmethod
    def of(cls, recipe: Recipe, model_dir: Path, longest: int) -> Self | None:
        """Count the work of a recipe; None if its model's configuration does not tell.

        Args:
            recipe: The recipe.
            model_dir: Folder of the model.
            longest: Tokens of every sequence.
        """
        counted, answers = count_operations(recipe, model_dir), recipe.answers_per_update
        if counted is None:
            return None
        config = load_hf_config(model_dir)
        update = counted.update([longest] * answers, answers * recipe.sampling.max_tokens)
        return cls(
            operations=recipe.updates_per_step * update,
            updates=recipe.updates_per_step,
            answers=answers,
            layers=config.get_text_config().num_hidden_layers,
            graphs=not why_no_graphs(config, recipe.cluster.size),
        )

    def device_seconds(self, way: Checkpointing) -> float:
        """Estimate the seconds that the device takes for the updates; `way` is of recomputation."""
        return _WAYS[way].device * self.operations / _RATE

    def seconds(self, decisions: Decisions) -> float:
        """Estimate the seconds of the updates."""
        way, size = decisions.activation_checkpointing, decisions.micro_batch_size
        passes = self.updates * math.ceil(self.answers / size)
        launches = 0.0 if decisions.cuda_graphs else _WAYS[way].host * self.layers * passes
        return max(self.device_seconds(way), launches)


def with_recomputation(
    planned: Callable[[Checkpointing, Mapping[str, str]], MemoryPlan],
    seconds: Callable[[MemoryPlan], float],
    work: Work,
) -> MemoryPlan:
    """Return the plan whose step takes least time among those that surely fit.

    If none does, the least memory decides: the plan that recomputes layers is returned. A way that
    cannot be better than one before is not planned.

    Args:
        planned: Returns the plan of a way with all open decisions made, given a line about the way
            for a reader, by the name of the decision.
        seconds: Returns the seconds of a plan's step besides updates and generation.
        work: The work of the updates.
    """
    least = math.inf
    for way, (*_, words) in _WAYS.items():
        if work.device_seconds(way) >= least:
            break
        plan = planned(way, {"activation_checkpointing": f"recomputed in backward: {words}"})
        took = work.seconds(plan.decisions) + seconds(plan)
        if not _surely_fits(plan):
            took = math.inf
        if took < least or least == math.inf:
            best, least = plan, took
    return best


def with_graphs(
    plan: MemoryPlan, planned: Callable[[Mapping[str, str]], MemoryPlan], work: Work
) -> MemoryPlan:
    """Return the plan, or that of a run with CUDA graphs, if they save time and surely fit.

    Args:
        plan: The plan of a run without them.
        planned: Returns the plan of a run with them, given a line about it for a reader, by the
            name of the decision.
        work: The work of the updates.
    """
    device = work.device_seconds(plan.decisions.activation_checkpointing)
    waits = work.seconds(plan.decisions) / device
    if not work.graphs or waits <= 1:
        return plan
    line = f"CUDA graphs of layers in updates: launches would take {waits:.1f} x the work's time"
    graphed = planned({"cuda_graphs": line})
    return graphed if _surely_fits(graphed) else plan


def _surely_fits(plan: MemoryPlan) -> bool:
    """Return whether all stages have room, and the trainer's passes have room to spare."""
    passes = [stage for stage in plan.stages if stage.stage.startswith(("compute", "update"))]
    return plan.fits and all(stage.device_bytes <= plan.sure_room for stage in passes)
