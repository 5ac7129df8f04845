"""Runs in float16: their figures, exports, repeated updates, and a model that exceeds float16."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from recipes.cli import main
from recipes.run import continue_run, start_run
from tests.helpers.recipes.tiny_runs import ONE_LAYER, SMALL, rows, same_rows
from trainer_bridge.learning import loss_scale

HALF = "model.dtype=float16"
# Rewards are lengths of texts, so that all updates have a gradient.
LENGTHS = ("task.rewards=[tests.helpers.recipes.reward_functions:kept]", "task.workers=0")
GRPO = ("loop.prompts_per_step=4", "loop.samples_per_prompt=4", "eval.every=0", ONE_LAYER, *LENGTHS)
PPO = ("loop.prompts_per_step=4", "loop.samples_per_prompt=4", "eval.every=0", *LENGTHS)
PPO += ("loop.mini_batches=2", "loss.kl_coef=0.1", ONE_LAYER)
SHARED = ("trainer.optimizer_offload=true", "cycle.alias=always")
# Rollout and trainer round 35 results and as many weights (unit roundoff 2**-11) of magnitude 8.
MISMATCH = 4 * math.sqrt(2 * 70) * 2**-11 * 8

pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.mark.parametrize(
    ("recipe", "words"),
    [("tiny", GRPO + SHARED), ("tiny", (*GRPO, "lora.rank=4")), ("tiny-ppo", PPO)],
    ids=["shared", "lora", "ppo"],
)
def test_run_in_float16_reports_its_loss_scale_and_exports_float16(
    recipe: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    start_run(recipe, [*words, HALF, "steps=3"], tmp_path / "run")
    train = rows(tmp_path / "run", "train")
    for row in train:
        assert 0 < row["mismatch_max"] <= MISMATCH
        assert row["grad_norm"] > 0
        assert ("critic_loss_scale" in row) == ("critic_overflows" in row) == (recipe == "tiny-ppo")
    if recipe == "tiny":  # the other has the means of two updates
        scale = loss_scale.FIRST
        for row in train:
            scale /= 2 ** row["overflows"]
            assert row["loss_scale"] == scale
    config = json.loads((tmp_path / "run" / "exports" / "step_3" / "config.json").read_text())
    assert config["dtype"] == "float16"


def test_resumed_run_continues_with_the_scale_that_worked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loss_scale, "FIRST", 2.0**21)  # the gradients of the first update overflow
    words = [*GRPO, HALF, "checkpoint.every=1"]
    start_run("tiny", [*words, "steps=2"], tmp_path / "whole")
    start_run("tiny", [*words, "steps=1"], tmp_path / "parts")
    overflows = rows(tmp_path / "parts", "train")[0]["overflows"]
    assert overflows > 0
    assert f"| {overflows:g} overflows per update |" in capsys.readouterr().out
    continue_run(tmp_path / "parts", overrides=["steps=2"])
    assert same_rows(tmp_path / "whole", tmp_path / "parts")


def test_model_that_exceeds_float16_ends_the_run_with_a_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rollout's first answer has NaN for a log-probability."""
    words = [*SMALL, HALF, "model.config.initializer_range=100.0", "steps=1"]
    assert main(["run", "tiny", *words, "--run-dir", str(tmp_path / "run")]) == 1
    message = capsys.readouterr().err.replace("\n", " ")
    assert "evaluate failed: FloatingPointError: a log-probability of sample 0.0 is" in message
    assert "values exceeded the range of the dtype of the engine" in message
    assert "use dtype bfloat16 or float32" in message
