"""Runs of 50 steps on a GPU with `exact`, in a file of their own because they take minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.run import continue_run, start_run
from tests.helpers.recipes.tiny_runs import EXACT_SMOLLM2, exported, rows, same_rows
from tests.helpers.trainer_bridge.states import assert_same_bits

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900), pytest.mark.usefixtures("no_pictures")]


def test_fifty_steps_in_other_batches_and_resumed_end_with_the_same_bits(tmp_path: Path) -> None:
    """Run 50 steps in other batches of the engine, and 25 steps that are resumed for 25 more."""
    batches = ["engine.max_running=100", "engine.max_prefill_tokens=300"]
    start_run("qwen2.5-0.5b", [*EXACT_SMOLLM2, *batches], tmp_path / "batches")
    start_run("qwen2.5-0.5b", [*EXACT_SMOLLM2, "steps=25"], tmp_path / "resumed")
    continue_run(tmp_path / "resumed", None, ["steps=50"])
    steps = rows(tmp_path / "resumed", "train")
    assert len(steps) == 50 and all(0 == row["unequal_tokens"] < row["grad_norm"] for row in steps)
    assert same_rows(tmp_path / "batches", tmp_path / "resumed")
    assert_same_bits(exported(tmp_path / "batches"), exported(tmp_path / "resumed"))
