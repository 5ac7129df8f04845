"""Every packaged recipe on the GPUs that it is for (`make plans`: minutes, so not among the tests
of `make test`).
"""

from __future__ import annotations

from pathlib import Path

import pytest

import recipes
from recipes.planner.command import plan_of
from recipes.planner.sizes import GIB

PACKAGE = Path(recipes.__file__).parent
PACKAGED = sorted(PACKAGE.glob("*.yaml"))
PLANS = sorted((PACKAGE.parent / "examples" / "plans").glob("*.yaml"))  # too large to be tried
# The shape and the way of another recipe, on more or larger GPUs; or measured in
# tests/recipes/planner. (make test-all)
LIKE_ANOTHER = {"tiny", "smollm2-135m-2digits", "qwen2.5-0.5b", "qwen2.5-7b", "qwen2.5-7b-h200"}
LIKE_ANOTHER |= {"qwen2.5-32b-8xh200", "llama-3.1-70b-24xh100"}
LIKE_ANOTHER |= {"qwen3-30b-a3b-8xh200", "qwen3-30b-a3b-cut"}


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, marks=[pytest.mark.extended] * (file.stem in LIKE_ANOTHER), id=file.stem)
        for file in PACKAGED + PLANS
    ],
)
def test_every_recipe_and_plan_is_planned_and_fits_its_gpus(file: Path) -> None:
    # if it fits handed over, what is decided fits (test_switch.py)
    plan = plan_of(recipes.load(file, ["cycle.resident=[]"]), file.stem, gpu=None)
    assert plan.fits, plan.needs
    assert plan.host_bytes / GIB < 2048 and plan.kv_tokens > 0


@pytest.mark.parametrize(
    ("fraction", "staged", "fit"), [(0.6, False, True), (0.8, False, False), (0.9, True, True)]
)
def test_a_staged_wake_up_of_32b_leaves_more_to_the_pool(
    fraction: float, staged: bool, fit: bool
) -> None:
    """At 0.8 an unstaged one is short at the sync."""
    recipe = recipes.load(
        "qwen2.5-32b-8xh100",
        ["cycle.resident=[]", f"engine.mem_fraction_static={fraction}"],
    )
    plan = plan_of(recipe, "32b", gpu="h100-80gb:8", staged=staged)
    fits = {stage.stage: stage.device_bytes <= plan.room for stage in plan.stages}
    assert plan.devices == 8 and plan.fits == fits["sync_weights"] == fit
    assert fits["generate_sequences"] and fits["update_actor"]
    assert all(fits.values()) if fit else "engine.mem_fraction_static=0.7" in plan.needs[0]
    assert not staged or plan.kv_tokens > 300_000
