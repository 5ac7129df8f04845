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
LEAST = ["cycle.resident=[]", "cycle.overlap=[]", "trainer.keep_unsharded=false"]


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, marks=[pytest.mark.extended] * (file.stem in LIKE_ANOTHER), id=file.stem)
        for file in FILES
    ],
)
def test_recipe_fits_its_gpus(file: Path) -> None:
    # A recipe that fits with the least memory fits as decided: test_switch.py, and
    # test_micro_batch.py and test_recomputation.py in tests/recipes/planner.
    words, trainer = [*LEAST], recipes.load(file).trainer
    if trainer.micro_batch_size == "auto":
        words.append("trainer.micro_batch_size=1")
    if trainer.activation_checkpointing == "auto":
        words.append("trainer.activation_checkpointing=layers")
    plan = plan_of(recipes.load(file, words), file.stem, gpu=None)
    assert plan.fits, plan.needs
    assert plan.host_bytes / GIB < 2048 and plan.kv_tokens > 0


def test_unstaged_wake_up_of_32b_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the pool 0.8 of the device; its recipe wakes up in stages, and has 0.9 (above)."""
    monkeypatch.setattr("recipes.planner.remedies.remedied", lambda plan, *_: plan)
    words = [*LEAST, "trainer.micro_batch_size=1", "engine.mem_fraction_static=0.8"]
    recipe = recipes.load(PLANS / "qwen2.5-32b-8xh100.yaml", words)
    plan = plan_of(recipe, "32b", gpu="h100-80gb:8", staged=False)
    short = {stage.stage for stage in plan.stages if stage.device_bytes > plan.room}
    assert plan.devices == 8 and "sync_weights" in short
    assert not short & {"generate_sequences", "update_actor"}
