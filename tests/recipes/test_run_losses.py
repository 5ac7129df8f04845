"""Runs with each key of section loss, and of grpo for its advantages."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from recipes.logs.recorded_samples import read_samples
from recipes.logs.report_page import write_report
from recipes.run import continue_run, start_run
from tests.helpers.case_selection import some
from tests.helpers.recipes.tiny_runs import (
    ONE_LAYER,
    MakeRun,
    has_pictures,
    rows,
    same_rows,
    without_pictures,
)
from tests.helpers.trainer_bridge.states import assert_same_bits
from trainer_bridge.models import read_values

# Rewards are lengths of texts: an untrained model gets different ones.
FEW = ["loop.prompts_per_step=3", "loop.samples_per_prompt=4", "eval.every=0", "samples=64"]
FEW += ["task.rewards=[tests.helpers.recipes.reward_functions:kept]", "task.workers=0"]
FEW += ["checkpoint.export_every=null", ONE_LAYER]
MANY = ["loop.epochs=2", "loop.mini_batches=2", "trainer.learning_rate=0.02"]


@pytest.mark.parametrize(
    "words",
    [
        "grpo.baseline=leave_one_out grpo.scale=none",
        "grpo.scale=batch loss.aggregation=sequence",
        "grpo.baseline=batch grpo.scale=batch loop.samples_per_prompt=1 loss.aggregation=sequence",
        "grpo.scale=none loss.aggregation=constant",
        "grpo.baseline=leave_one_out loss.mask_cut_off=true",
        "loss.kl_coef=0.3 loss.kl_in=reward loss.kl_estimator=k2",
    ],
)
def test_loss_of_first_update_is_that_of_the_formula(words: str, make_run: MakeRun) -> None:
    """Compute the loss from the recorded answers, with ratios of 1 and no divergence.

    Terms are fp32, in a sum over less than 64 tokens. A ratio of two passes is 1 up to the rounding
    of log-probabilities of magnitude 8, an ulp of which is 5e-7, so the sum is exact to 1e-5 of the
    largest term.
    """
    folder = make_run("tiny", *FEW, "steps=1", "checkpoint.every=0", *words.split())
    (row,), samples = rows(folder, "train"), read_samples(folder)
    keys = dict(word.split("=") for word in words.split())
    group_size = int(keys.get("loop.samples_per_prompt", 4))
    rewards = np.array([sample["reward"] for sample in samples]).reshape(-1, group_size)
    lengths = np.array([sample["tokens"] for sample in samples])
    assert rewards.size == 3 * group_size == row["tokens"] / row["response_length"]
    baseline, scale = keys.get("grpo.baseline", "group"), keys.get("grpo.scale", "group")
    if baseline == "batch":
        of_tokens = np.repeat(rewards, lengths)
        advantages = (rewards - of_tokens.mean()) / (of_tokens.std(ddof=1) + 1e-6)
    else:
        advantages = rewards - rewards.mean(1, keepdims=True)
        if baseline == "leave_one_out":
            others = rewards.sum(1, keepdims=True) - rewards
            advantages = rewards - others / (group_size - 1)
        if scale == "group":
            advantages /= rewards.std(1, ddof=1, keepdims=True) + 1e-6
        elif scale == "batch":
            advantages /= rewards.std(ddof=1) + 1e-6
    taught = np.ones(len(samples), dtype=bool)
    if "loss.mask_cut_off" in keys:
        taught = np.array([sample["finish_reason"] == "stop" for sample in samples])
        assert 0 < taught.sum() < taught.size
    kept, sizes = advantages.ravel()[taught], lengths[taught]
    factors = {
        "token": sizes / sizes.sum(),
        "sequence": np.full(len(sizes), 1 / len(sizes)),
        "constant": sizes / (3 * len(sizes)),
    }[keys.get("loss.aggregation", "token")]
    largest = np.abs(advantages).max()
    assert row["loss"] == pytest.approx(-(factors * kept).sum(), abs=1e-5 * largest)
    assert row["grad_norm"] > 1e-3 and row["clip_fraction"] == 0
    assert largest > 0.1 or scale == "none"


def test_several_updates_of_a_step_clip_and_end_the_schedule(make_run: MakeRun) -> None:
    """Expect the same first step from every kind but for what clipping changes."""
    two = [*FEW, *MANY, "loss.clip_low=0.01", "loss.clip_high=0.01", "trainer.schedule=linear"]
    kinds = {
        words: rows(folder := make_run("tiny", *two, words, "steps=2"), "train")
        for words in ("loss.kind=ppo", "loss.kind=gspo", "loss.kind=cispo", "loss.dual_clip=1.01")
    }
    assert read_values(str(folder / "checkpoints" / "step_2"))["step"] == 2 * 4
    for first, second in kinds.values():
        assert first["reward"] == kinds["loss.kind=ppo"][0]["reward"]
        # The rate of update k of 8 is 0.02 (1 - k / 8), and a step has four of them.
        assert first["learning_rate"] == pytest.approx(0.02 * (1 - 1.5 / 8))
        assert second["learning_rate"] == pytest.approx(0.02 * (1 - 5.5 / 8))
        for row in (first, second):
            low, high = row["clip_fraction_low"], row["clip_fraction_high"]
            assert 0 < row["clip_fraction"] == pytest.approx(low + high) and row["approx_kl"] > 0
    assert len({first["loss"] for first, _ in kinds.values()}) == len(kinds)
    dual, plain = kinds["loss.dual_clip=1.01"][0], kinds["loss.kind=ppo"][0]
    assert dual["clip_fraction_high"] > plain["clip_fraction_high"]


def test_penalty_in_the_rewards_changes_later_advantages(make_run: MakeRun) -> None:
    """Expect the free run's first update, because the divergence is 0 at the initial weights."""
    two = [*FEW, "steps=2"]
    free = rows(make_run("tiny", *two), "train")
    held = rows(make_run("tiny", *two, "loss.kl_coef=1", "loss.kl_in=reward"), "train")
    assert held[0]["loss"] == free[0]["loss"] and held[0]["kl_to_reference"] == 0
    assert held[1]["reward"] == free[1]["reward"] and held[1]["kl_to_reference"] > 1e-3
    assert held[1]["grad_norm"] != pytest.approx(free[1]["grad_norm"], rel=1e-3)


def test_ppo_with_divergence_in_the_loss_adds_the_k3_estimate(make_run: MakeRun) -> None:
    """Compare with a run without reference, which takes the same first update.

    The losses, of size 1 in fp32, are exact to 1e-6, so their difference is, too.
    """
    two = [word.replace("grpo.", "ppo.") for word in FEW] + ["loop.mini_batches=1", "steps=2"]
    free = rows(make_run("tiny-ppo", *two, "loss.kl_coef=0"), "train")
    held = rows(make_run("tiny-ppo", *two, "loss.kl_coef=0.5", "loss.kl_in=loss"), "train")
    assert [row["value_loss"] for row in held] == [row["value_loss"] for row in free]
    assert held[0]["loss"] == free[0]["loss"]
    divergence = held[1]["kl_to_reference"]
    assert divergence > 1e-3
    assert held[1]["loss"] - free[1]["loss"] == pytest.approx(0.5 * divergence, abs=2e-6)


def test_resumed_run_with_mini_batches_and_refreshed_reference_equals_an_uninterrupted_one(
    make_run: MakeRun, tmp_path: Path, no_pictures: None
) -> None:
    """Resume between two refreshes, with the reference on the device from then on."""
    words = [*FEW, *MANY, "loss.kl_coef=0.1", "loss.reference_every=2", "loss.mask_cut_off=true"]
    words.append("seed=3")  # an answer of steps 1 and 3 is not cut off
    straight, halves = make_run("tiny", *words, "steps=5"), tmp_path / "halves"
    shutil.copytree(make_run("tiny", *words, "steps=3"), halves)
    continue_run(halves, None, ["steps=5", "cycle.resident=[reference]"])
    assert same_rows(halves, straight)
    train = rows(straight, "train")
    assert [row["reference_step"] for row in train] == [0, 0, 2, 2, 4]
    assert [row["kl_to_reference"] > 0 for row in train] == [False, True, False, True, False]
    refreshed = [row["step"] for row in train if "refresh_reference" in row["stages"]]
    assert refreshed == [2, 4]
    assert train[1]["peaks"]["refresh_reference"]["tags"]["reference"] > 0
    assert train[0]["memory"]["train"]["reference"] == 0
    weights = [
        load_file(next((folder / "checkpoints" / "step_5").glob("*.safetensors")))
        for folder in (straight, halves)
    ]
    assert_same_bits(*weights)
    assert any(name.startswith("reference.") for name in weights[0])


@pytest.mark.parametrize("algorithm", some("ppo", whole=["grpo"]))
def test_step_whose_answers_are_all_cut_off_trains_nothing(
    algorithm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Draw pictures and a report, feed a tracker, and resume: no figure of an update is needed."""
    recipe = {"grpo": "tiny", "ppo": "tiny-ppo"}[algorithm]
    words = [f"{algorithm}.prompts_per_step=2", f"{algorithm}.samples_per_prompt=2"]
    words += ["sampling.max_tokens=1", "loss.mask_cut_off=true", "eval.every=1"]
    words += ["trackers=[tensorboard]", "checkpoint.export_every=null"]
    with without_pictures():
        folder = start_run(recipe, [*words, "steps=1"], tmp_path / "run")
    continue_run(folder, None, ["steps=2"])
    train = rows(folder, "train")
    said = capsys.readouterr().out
    assert said.count(" | no update of the policy | ") == 2 and "tracker tensorboard" not in said
    assert [row["cut_off"] for row in train] == [1.0, 1.0], "choose another seed"
    for row in train:
        assert row["tokens"] == 4 and not {"loss", "value_loss", "grad_norm"} & row.keys()
    values = read_values(str(folder / "checkpoints" / "step_2"))
    assert values["step"] == values.get("critic_step", 0) == 0
    assert has_pictures(folder) and "cut off" in write_report(folder).read_text()
