"""The decisions that a prepared run needs a plan for, and those of a run without a plan."""

from dataclasses import replace
from typing import Any

from recipes.child_process import ChildError, call_in_child
from recipes.config.decisions import Decisions
from recipes.planner.memory_plan import MemoryPlan, PlanRequest
from recipes.planner.remedies import plan_with_remedies
from recipes.planner.sizes import of_device
from recipes.setup.model_decisions import unplanned, without_moves
from recipes.setup.preparation import Setup
from rollout.tag_names import CUDA_GRAPH

PATIENCE = 300.0
"""Seconds that a run waits for its plan; the largest plans take about a minute."""


def decide(
    setup: Setup, total: int | None, outside: int | None = None
) -> tuple[Decisions, MemoryPlan | None]:
    """Make the decisions of a prepared run that are open.

    On a GPU, a plan makes them. If it fails, the run follows its keys, and a line says why.

    Args:
        setup: The prepared run.
        total: Bytes of the GPU; None: a CPU.
        outside: Bytes outside of the tags of a hosted engine, as measured; None: a native engine.

    Returns:
        The decisions, and the plan that made them, if there is one.
    """
    recipe, decisions = setup.recipe, setup.decisions
    if total is None:
        return without_moves(decisions, recipe), None
    if not decisions.open:
        return decisions, None
    try:
        plan = plan_apart(setup, total, outside)
    except ChildError as error:
        line = f"stays: {', '.join(decisions.resident) or 'nothing'}; there is no plan: {error}"
        decisions = replace(decisions, reasons={**decisions.reasons, "resident": line})
        return unplanned(decisions), None
    made = plan.decisions
    if outside is not None and "resident" in decisions.open and made.resident:
        # The measured bytes include CUDA graphs, so graphs must stay.
        made = replace(made, resident=(*made.resident, CUDA_GRAPH))
    return made, plan


def plan_apart(setup: Setup, total: int, outside: int | None = None) -> MemoryPlan:
    """Plan a prepared run for a GPU of `total` bytes in a separate process.

    `outside` are bytes as in `PlanRequest`. A plan replaces parts of torch, which the process of a
    run needs.

    Raises:
        ChildError: The plan failed, or took longer than `PATIENCE`.
    """
    request = PlanRequest(
        name="run",
        gpu=of_device(total),
        directory=setup.model_dir,
        prompt_tokens=setup.longest_prompt,
        outside=outside,
    )
    how: dict[str, Any] = {"environment": {"CUDA_VISIBLE_DEVICES": ""}, "patience": PATIENCE}
    asked = setup.recipe, setup.decisions, request
    return call_in_child(plan_with_remedies, *asked, **how, quiet=True)
