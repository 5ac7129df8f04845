"""Corrections in runs whose rollout computes other probabilities than the trainer."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import recipes.loops.loop
from recipes.config.load import load
from recipes.errors import RecipeError
from recipes.logs.monitor import Monitor
from recipes.logs.run_folder import RunFolder
from recipes.logs.view import View
from recipes.loops.corrections import correct_step, summary
from recipes.loops.sampling import Samples
from recipes.run import start_run
from tests.helpers.recipes.tiny_runs import SMALL, SMALL_PPO, rows
from trainer_bridge import SequenceBatch
from trainer_bridge.learning import Tokens
from trainer_bridge.sync import SyncReceipt
from trainer_bridge.trainer import Trainer

FP8 = ("engine.kv_cache_dtype=fp8_e4m3", "eval.every=0", "checkpoint.every=0", "steps=2")
DECOUPLED, BYPASS = "correction.mode=decoupled", "correction.mode=bypass"
SERVED = ("lora.rank=8", "model.dtype=bfloat16")
LORA = (*SERVED, "lora.merge=true")
HOSTED = ("device=auto", "engine.kind=vllm")


@pytest.mark.parametrize(
    ("words", "mode", "said"),
    [
        ((), "none", ""),
        (("lora.rank=8", "lora.merge=true"), "none", ""),
        (SERVED, "none", ""),
        (("model.dtype=bfloat16",), "none", ""),
        (LORA, "decoupled", "(adapters merged into bfloat16)"),
        (FP8, "decoupled", "token weights, truncated above 2 (engine.kv_cache_dtype=fp8_e4m3)"),
        (HOSTED, "decoupled", "(engine.kind=vllm)"),
        ((*LORA, "correction.mode=none"), "none", ""),
        ((*LORA, BYPASS), "bypass", "the loss compares with the rollout's log-probabilities"),
        (
            (DECOUPLED, "correction.level=geometric", "correction.how=mask"),
            "decoupled",
            "geometric weights, masked outside 0.5 to 2",
        ),
    ],
)
def test_auto_corrects_where_the_rollout_is_inexact_and_the_start_says_so(
    words: tuple[str, ...], mode: str, said: str
) -> None:
    recipe = load("tiny", words)
    assert recipe.correction_mode == mode
    assert summary(recipe).endswith(said) and bool(summary(recipe)) == bool(said)


@pytest.mark.parametrize(
    ("mode", "word", "why"),
    [
        (BYPASS, "correction.veto=3", "correction.mode=bypass"),
        ("correction.mode=none", "correction.level=sequence", "correction.mode=none"),
        (DECOUPLED, "correction.low=0.1", "correction.how=truncate"),
        (DECOUPLED, "loss.clip_low=0.1", "one update a step"),
    ],
)
def test_option_without_effect_in_this_mode_is_refused(mode: str, word: str, why: str) -> None:
    with pytest.raises(RecipeError, match=f"{word}: has no effect with {why}"):
        load("tiny", [mode, word])
    load("tiny", [BYPASS, "loss.clip_low=0.1"])  # ratios to the rollout's are not 1


class Spied:
    """A run's samples and updates, recorded as they pass."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.samples: list[Samples] = []
        self.updates: list[SequenceBatch] = []
        generate, update = recipes.loops.loop.generate_sequences, Trainer.update_actor

        def spy_samples(*arguments: Any) -> Samples:
            self.samples.append(generate(*arguments))
            return self.samples[-1]

        def spy_update(trainer: Trainer, batch: SequenceBatch) -> dict[str, float]:
            self.updates.append(batch)
            return update(trainer, batch)

        patch.setattr(recipes.loops.loop, "generate_sequences", spy_samples)
        patch.setattr(Trainer, "update_actor", spy_update)

    def rollouts(self, step: int, batch: SequenceBatch) -> list[list[float]]:
        """Return the rollout's log-probabilities of the sequences of an update of a step."""
        samples = self.samples[step]
        keys = zip(samples.prompt_ids, samples.response_ids, strict=True)
        known = {
            (tuple(prompt), tuple(response)): logprobs
            for (prompt, response), logprobs in zip(keys, samples.logprobs, strict=True)
        }
        sequences = zip(batch.prompt_ids, batch.response_ids, strict=True)
        return [known[tuple(prompt), tuple(response)] for prompt, response in sequences]


@pytest.fixture
def spied(monkeypatch: pytest.MonkeyPatch) -> Spied:
    return Spied(monkeypatch)


@pytest.mark.parametrize(("recipe", "small"), [("tiny", SMALL), ("tiny-ppo", SMALL_PPO)])
def test_updates_with_a_quantized_cache_have_importance_weights(
    recipe: str, small: tuple[str, ...], tmp_path: Path, spied: Spied, no_pictures: None
) -> None:
    """Truncate at 1.05 in a second run, where many weights are cut."""
    for name, words, high in (
        ("auto", (), 2.0),
        ("cut", (DECOUPLED, "correction.high=1.05"), 1.05),
    ):
        spied.samples.clear()
        spied.updates.clear()
        start_run(recipe, [*small, *FP8, *words], tmp_path / name)
        count = len(spied.updates) // 2
        train = rows(tmp_path / name, "train")
        for step, row in enumerate(train):
            for batch in spied.updates[count * step : count * (step + 1)]:
                rollouts = Tokens.of(spied.rollouts(step, batch))
                ratios = batch.tokens("old_logprobs").values - rollouts.values
                assert batch.tokens("weights").values == pytest.approx(
                    np.minimum(np.exp(ratios), high)
                )
            assert 1e-3 < row["mismatch_mean"] < row["mismatch_max"] < 0.5
            assert 0 < row["mismatch_k3"] < row["mismatch_mean"]
            assert 0.9 < row["effective_sample_size"] < 1
            assert (row["weights_truncated"] > 0.02) == (name == "cut")


def test_bypass_learns_from_the_rollouts_log_probabilities_without_another_pass(
    tmp_path: Path, spied: Spied, no_pictures: None
) -> None:
    """Compare with decoupled weights, whose gradient is the same if no ratio is clipped."""
    for name in ("decoupled", "bypass"):
        words = [*SMALL, *FP8, f"correction.mode={name}", "trainer.learning_rate=1e-4"]
        start_run("tiny", words, tmp_path / name)
    (weighted, bypassed) = (rows(tmp_path / name, "train") for name in ("decoupled", "bypass"))
    for step, batch in enumerate(spied.updates[2:]):
        assert batch.old_logprobs == spied.rollouts(2 + step, batch) and batch.weights is None
    for first, second in zip(weighted, bypassed, strict=True):
        assert "compute_log_prob" in first["stages"] and "compute_log_prob" not in second["stages"]
        assert not [name for name in second if name.startswith(("mismatch", "weights"))]
        assert second["clip_fraction"] == 0
        assert second["grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-4)
        assert second["approx_kl"] == pytest.approx(first["mismatch_k3"], rel=1e-3)


def test_rejected_answers_are_left_out_of_the_update(
    tmp_path: Path, spied: Spied, no_pictures: None
) -> None:
    words = [DECOUPLED, "correction.reject=max_k1", "correction.reject_above=0.06"]
    start_run("tiny", [*SMALL, *FP8, *words], tmp_path / "run")
    for step, (row, batch) in enumerate(zip(rows(tmp_path / "run"), spied.updates, strict=True)):
        assert 0 < row["answers_rejected"] < 1
        assert len(batch) == round(32 * (1 - row["answers_rejected"]))
        ratios = zip(batch.old_logprobs or (), spied.rollouts(step, batch), strict=True)
        assert max(abs(np.subtract(*pair)).max() for pair in ratios) <= 0.06
        assert all(map(all, batch.weights or ()))


@pytest.mark.parametrize(("recipe", "small"), [("tiny", SMALL), ("tiny-ppo", SMALL_PPO)])
def test_step_whose_answers_are_all_rejected_has_no_update_and_the_run_continues(
    recipe: str, small: tuple[str, ...], tmp_path: Path, spied: Spied, no_pictures: None
) -> None:
    words = [DECOUPLED, "correction.reject=max_k3", "correction.reject_above=1e-12"]
    words.append("model.config.num_hidden_layers=2")  # rewards of its step 2 differ
    start_run(recipe, [*small, *FP8, *words], tmp_path / "run")
    first, second = rows(tmp_path / "run", "train")
    assert not spied.updates and "loss" not in second and "value_loss" not in second
    assert first["answers_rejected"] == second["answers_rejected"] == 1
    assert first["effective_sample_size"] == second["effective_sample_size"] == 0
    assert second["reward_std"] > 0


def test_merge_that_loses_much_is_told_once_with_what_corrects_it(tmp_path: Path) -> None:
    said = io.StringIO()

    class Told(View):
        def note(self, text: str) -> None:
            print(text, file=said)

    receipt = SyncReceipt(
        version=2, digests=(), seconds=1.0, verify_seconds=0.0, stages={}, merge_lost=0.875
    )
    for corrected, words in ((True, "is corrected for it (section"), (False, "is not corrected")):
        said.truncate(0)
        monitor = Monitor(RunFolder(tmp_path), Told())
        monitor.synced(replace(receipt, merge_lost=0.1), corrected)
        assert said.getvalue() == ""
        for version in (2, 3):
            monitor.synced(replace(receipt, version=version), corrected)
        assert said.getvalue().count("version") == 1
        assert "version 2: rounding took 88% of the adapters' move (sync.merge_lost" in (
            said.getvalue()
        )
        assert f"the loss {words}" in said.getvalue()
        assert monitor.sync["merge_lost"] == 0.875


def test_tokens_of_tools_are_compared_with_nothing() -> None:
    """Rows with masked tokens between have the weights and figures of rows without these."""
    recipe = load("tiny", [DECOUPLED, "correction.level=geometric"])
    setup: Any = SimpleNamespace(recipe=recipe, scores_before_update=True)
    mask = Tokens.of([[True, False, True], [True], [False, True, False, True]], bool)
    old = Tokens.of([[-1.0, 0.0, -2.0], [-0.5], [0.0, -3.0, 0.0, -1.0]])
    new = Tokens.of([[-1.5, 0.0, -1.0], [-0.7], [0.0, -2.0, 0.0, -1.2]])

    def corrected(logprobs: Tokens, other: Tokens, mask: Tokens | None) -> Any:
        ids = [[1] * int(length) for length in logprobs.lengths]
        samples = samples_of(prompt_ids=[[1]] * 3, response_ids=ids, logprobs=logprobs, mask=mask)
        return correct_step(setup, samples, other)

    masked = corrected(old, new, mask)
    plain = corrected(old.where(mask), new.where(mask), None)
    assert masked.figures == plain.figures and masked.rejected == plain.rejected
    assert masked.weights.where(mask) == plain.weights


def samples_of(**columns: Any) -> Samples:
    """Return samples with some columns alone."""
    count = len(columns["prompt_ids"])
    others = ("tasks", "problems", "texts", "ended")
    return Samples(**{name: [None] * count for name in others}, **columns)
