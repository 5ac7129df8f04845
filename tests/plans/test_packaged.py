"""Plans of every recipe, packaged or under examples/plans, on its own GPUs.

They take minutes, so `make plans` runs them and `make test` does not.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import recipes
from recipes.planner.command import plan_of
from recipes.planner.sizes import GIB
from tests.helpers.docs.pages import ROOT

PLANS = ROOT / "examples" / "plans"
FILES = sorted((ROOT / "recipes").glob("*.yaml")) + sorted(PLANS.glob("*.yaml"))
# Planned by `make test-all` only: shape and options are those of another recipe, on more or larger
# GPUs, or tests/recipes/planner compares the plan with measurements.
LIKE_ANOTHER = {"tiny", "smollm2-135m-2digits", "qwen2.5-0.5b", "qwen2.5-7b", "qwen2.5-7b-h200"}
LIKE_ANOTHER |= {"qwen2.5-32b-8xh200", "llama-3.1-70b-24xh100", "llama-3.1-70b-16xh200"}
LIKE_ANOTHER |= {"qwen3-235b-a22b-48xh200", "qwen2.5-7b-ppo-8xh100"}
LIKE_ANOTHER |= {"qwen3-30b-a3b-8xh200", "qwen3-30b-a3b-cut"}


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, marks=[pytest.mark.extended] * (file.stem in LIKE_ANOTHER), id=file.stem)
        for file in FILES
    ],
)
def test_recipe_fits_its_gpus(file: Path) -> None:
    # A recipe that fits with every tag offloaded fits with its decided switch (test_switch.py), and
    # one that fits with single sequences fits with its decided micro batch (test_micro_batch.py).
    words, recipe = ["cycle.resident=[]"], recipes.load(file)
    if recipe.trainer.micro_batch_size == "auto":
        words.append("trainer.micro_batch_size=1")
    plan = plan_of(recipes.load(file, words), file.stem, gpu=None)
    assert plan.fits, plan.needs
    assert plan.host_bytes / GIB < 2048 and plan.kv_tokens > 0


@pytest.mark.parametrize(
    ("fraction", "staged", "fit"), [(0.6, False, True), (0.8, False, False), (0.9, True, True)]
)
def test_staged_wake_up_of_32b_leaves_room_for_a_larger_pool(
    fraction: float, staged: bool, fit: bool
) -> None:
    """Compare wake-ups: at 0.8 of the device, an unstaged one runs out of memory in the sync."""
    recipe = recipes.load(
        PLANS / "qwen2.5-32b-8xh100.yaml",
        [
            "cycle.resident=[]",
            "trainer.micro_batch_size=1",
            f"engine.mem_fraction_static={fraction}",
        ],
    )
    plan = plan_of(recipe, "32b", gpu="h100-80gb:8", staged=staged)
    fits = {stage.stage: stage.device_bytes <= plan.room for stage in plan.stages}
    assert plan.devices == 8 and plan.fits == fits["sync_weights"] == fit
    assert fits["generate_sequences"] and fits["update_actor"]
    assert all(fits.values()) if fit else "engine.mem_fraction_static=0.7" in plan.needs[0]
    assert not staged or plan.kv_tokens > 300_000
