"""Training in float16: its loss scale, skipped updates, and errors if a model exceeds float16."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given, settings
from torch import Tensor

from tests.helpers.trainer_bridge.models import describe, make_batch, value_batch
from tests.helpers.trainer_bridge.states import MOMENTS, assert_same_bits, bits
from tests.helpers.trainer_bridge.tolerance import LEARNING_RATE, STABLE
from trainer_bridge import CriticConfig, LoraConfig, Schedule, SequenceBatch, Trainer
from trainer_bridge.training import loss_scale
from trainer_bridge.training.loss_scale import FAILED, FIRST, LARGEST, LossScale

Make = Callable[..., Trainer]
HALF: dict[str, Any] = {"param_dtype": "float16"}
LORA = LoraConfig(rank=4, alpha=8.0, target_modules=("q_proj", "o_proj", "down_proj"))
KINDS: list[dict[str, Any]] = [{}, {"lora": LORA}, {"optimizer_offload": True}]
U = 2.0**-11  # unit roundoff of float16


def overflowing(batch: SequenceBatch) -> SequenceBatch:
    """Return the batch with a finite loss whose gradients exceed float16 at any scale tried."""
    return dataclasses.replace(
        batch,
        advantages=[1e30] * len(batch),
        returns=[[1e18] * len(row) for row in batch.response_ids],
    )


def on_policy(trainer: Trainer, count: int = 6, size: float = 1.0) -> SequenceBatch:
    """Return a batch whose ratios are near 1, so that rounding clips no token."""
    batch = value_batch(count)
    assert batch.advantages is not None
    return dataclasses.replace(
        batch,
        old_logprobs=trainer.compute_log_prob(batch),
        advantages=[size * advantage for advantage in batch.advantages],
    )


def scale_of(trainer: Trainer) -> LossScale:
    return trainer._loss_scale


def counters(trainer: Trainer) -> set[float]:
    return {float(state["step"]) for state in trainer.optimizer.state.values()}


# ------------------------------------------------------------------------------ the scale itself


@settings(max_examples=30)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, FAILED - 1)), max_size=8))
@example([(True, 40), (False, 3), (True, 7)])  # reaches the largest scale
def test_scale_follows_torch_grad_scaler_up_to_the_largest(runs: list[tuple[bool, int]]) -> None:
    """Adapt both to runs of good and of bad updates, with an interval of 3 for growth."""
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], lr=0.0)
    oracle = torch.amp.GradScaler("cpu", init_scale=FIRST, growth_interval=3)
    ours, skipped, before = LossScale(dynamic=True, value=FIRST), 0, True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_scale, "GOOD", 3)
        for good, count in runs:
            if not (good or before):
                continue  # joined runs could be 20 long
            before = good
            for _ in range(count):
                assert ours.value == float(oracle.scale(torch.ones(())))
                param.grad = torch.full((1,), 1.0 if good else math.inf)
                oracle.step(optimizer)
                oracle.update()
                if oracle.get_scale() > LARGEST:
                    oracle.update(LARGEST)
                assert ours.accept(float(param.grad), 0.5, 1) is good
                skipped += not good
            assert (ours.skipped, ours.failed) == (skipped, 0 if good else count)
            assert ours.good == oracle._get_growth_tracker()


def test_scale_is_constant_and_refuses_infinite_gradients_without_float16() -> None:
    scale = LossScale(dynamic=False, value=1.0)
    assert all(scale.accept(1.0, 0.5, update) for update in range(2 * loss_scale.GOOD + 1))
    assert scale.value == 1.0
    with pytest.raises(FloatingPointError, match="norm is inf in step 7, parameters are unchanged"):
        scale.accept(math.inf, 0.5, 7)
    assert scale.skipped == 0


# ----------------------------------------------------------------------------- float16 and float32


@pytest.mark.parametrize("changes", KINDS, ids=str)
def test_float16_update_matches_float32(
    changes: dict[str, Any], device: str, model_path: str, make_trainer: Make
) -> None:
    """Compare with the same trainer in float32, which other tests compare with plain torch.

    A forward has 35 operations (`tolerance.py`). Each rounds its result, a sum in fp32, once, and
    its weights: 70 roundings of numbers below the largest log-probability. A gradient passes them
    twice. AdamW adds 1 - beta1 = 0.1 of its error to the first moment, twice 1 - beta2 = 0.001 to
    the second, as gradients are below 1, and moves a weight by at most lr * 2 / eps of the error.
    """
    exact, half = (
        make_trainer(model_path, device=device, **STABLE, **changes, **more) for more in ({}, HALF)
    )
    batch = on_policy(exact)
    scores, rounded = (
        torch.tensor([value for row in side.compute_log_prob(batch) for value in row])
        for side in (exact, half)
    )
    apart = float((scores - rounded).abs().max())
    assert 0 < apart <= 4 * math.sqrt(70) * U * float(scores.abs().max())
    expected, got = exact.update_actor(batch), half.update_actor(batch)
    assert (got["loss_scale"], got["skipped"]) == (FIRST, 0.0) and "skipped" not in expected
    off = 4 * math.sqrt(140) * U * expected["grad_norm"]
    assert abs(got["grad_norm"] - expected["grad_norm"]) <= off
    off /= max(1.0, expected["grad_norm"])  # clipping
    before, after = bits(exact), bits(half)
    for param, state in half.optimizer.state.items():
        assert param.grad is None and state["exp_avg"].dtype == torch.float32
    for name, value in before.items():
        kind = name.rpartition(".")[2]
        allowed = {"exp_avg": 0.1 * off, "exp_avg_sq": 0.002 * off}.get(
            kind, 2 * LEARNING_RATE * off / STABLE["adam_eps"]
        )
        if kind not in MOMENTS and "optimizer_offload" in changes:
            allowed += U * float(value.abs().max())  # the parameter is the rounded master
        assert float((after[name] - value).abs().max()) <= allowed, name


def test_critic_update_in_float16_matches_float32(model_path: str, make_trainer: Make) -> None:
    """Take the bounds of the policy's update; the values are below 1, and their head is zero."""
    both: dict[str, Any] = {"critic": CriticConfig(learning_rate=1e-2), **STABLE}
    sides = [make_trainer(model_path, **both, **more) for more in ({}, HALF)]
    batch = value_batch(6)
    expected, got = (side.update_critic(batch) for side in sides)
    off = 4 * math.sqrt(140) * U * expected["critic_grad_norm"]
    assert abs(got["critic_grad_norm"] - expected["critic_grad_norm"]) <= off
    assert (got["critic_loss_scale"], got["critic_skipped"]) == (FIRST, 0.0)


def test_float16_scores_round_less_than_a_quarter_of_bfloat16(
    model_path: str, make_trainer: Make
) -> None:
    """Expect an eighth, because float16 has three bits more, with room for chance."""
    batch, rows = make_batch(20), list[Tensor]()
    for dtype in ("float32", "float16", "bfloat16"):
        scores = make_trainer(model_path, param_dtype=dtype).compute_log_prob(batch)
        rows.append(torch.tensor([value for row in scores for value in row], dtype=torch.float64))
    half, brain = ((row - rows[0]).square().mean().sqrt() for row in rows[1:])
    assert 0 < half < brain / 4


def test_scale_keeps_gradients_that_vanish_in_float16(model_path: str, make_trainer: Make) -> None:
    """Learn from advantages near 1e-6, whose gradients per token are near 6e-8."""
    exact, half = make_trainer(model_path), make_trainer(model_path, **HALF)
    batch = on_policy(exact, size=1e-6)
    expected, got = (side.update_actor(batch)["grad_norm"] for side in (exact, half))
    assert got == pytest.approx(expected, rel=4 * math.sqrt(140) * U)
    unscaled = make_trainer(model_path, **HALF)
    scale_of(unscaled).value = 1.0
    assert unscaled.update_actor(batch)["grad_norm"] < expected / 2


# --------------------------------------------------------------------------------- skipped updates


@pytest.mark.parametrize("changes", KINDS, ids=str)
def test_skipped_update_changes_only_scale_and_schedule(
    changes: dict[str, Any], device: str, model_path: str, make_trainer: Make
) -> None:
    falls = Schedule(kind="linear", updates=4)
    trainer, twin = (
        make_trainer(model_path, device=device, schedule=falls, **changes, **HALF) for _ in "ab"
    )
    for side in (trainer, twin):
        side.update_actor(make_batch(4))
    before, batch = bits(trainer), overflowing(make_batch(4, seed=1))
    figures = trainer.update_actor(batch)
    assert (figures["skipped"], figures["loss_scale"], figures["grad_norm"]) == (1.0, FIRST, 0.0)
    assert math.isfinite(figures["loss"])
    assert_same_bits(bits(trainer), before)
    assert (trainer.step, counters(trainer)) == (2, {1.0})
    assert all(param.grad is None for param in trainer.model.parameters())
    twin.step = 2  # the twin never sees the batch
    scale_of(twin).value = FIRST / 2
    again = make_batch(4, seed=2)
    expected, got = (side.update_actor(again) for side in (twin, trainer))
    assert got == expected and got["learning_rate"] == LEARNING_RATE / 2
    assert_same_bits(bits(trainer), bits(twin))
    assert counters(trainer) == counters(twin) == {2.0}


def test_critic_skips_updates_with_a_scale_of_its_own(model_path: str, make_trainer: Make) -> None:
    trainer = make_trainer(model_path, critic=CriticConfig(learning_rate=1e-2), **HALF)
    assert trainer.critic is not None
    trainer.update_critic(value_batch(4))
    before, bad = bits(trainer.critic), overflowing(value_batch(4, seed=1))
    assert trainer.update_critic(bad)["critic_skipped"] == 1.0
    assert_same_bits(bits(trainer.critic), before)
    assert (trainer.critic.step, trainer.critic.loss_scale.value) == (2, FIRST / 2)
    assert trainer.update_critic(value_batch(4))["critic_loss_scale"] == FIRST / 2
    assert trainer.update_actor(make_batch(4))["loss_scale"] == FIRST


def test_checkpoint_amid_skipped_updates_continues_bit_identical_to_the_error(
    model_path: str, make_trainer: Make, tmp_path: Path
) -> None:
    critic = {"critic": CriticConfig(learning_rate=1e-2)}
    first, second = (make_trainer(model_path, **critic, **HALF) for _ in "ab")
    bad = overflowing(value_batch(4, seed=1))
    for batch in (value_batch(4), bad, value_batch(4, seed=2), *[bad] * 12):
        first.update_actor(batch)
        first.update_critic(batch)
    first.save_checkpoint(str(tmp_path / "amid"))
    second.load_checkpoint(str(tmp_path / "amid"))
    assert (second.step, counters(second), scale_of(second).value) == (15, {2.0}, FIRST * 2**-13)
    assert second.critic is not None and second.critic.loss_scale == first.critic.loss_scale  # type: ignore[union-attr]
    before = bits(first)
    for _ in range(FAILED - 1 - 12):
        assert first.update_actor(bad) == second.update_actor(bad)
    for side in (first, second):
        with pytest.raises(FloatingPointError) as caught:
            side.update_actor(bad)
        text = str(caught.value)
        assert "not finite in 20 updates in a row, up to step 23 with loss scale 0.0625" in text
        assert "parameters are unchanged" in text and "model.dtype=bfloat16" in text
        assert_same_bits(bits(side), before)
        assert (side.step, counters(side)) == (22, {2.0})
    good = value_batch(4, seed=3)
    for learn in ("update_actor", "update_critic"):
        assert getattr(first, learn)(good) == getattr(second, learn)(good)
    assert scale_of(first).failed == 0
    assert_same_bits(bits(first), bits(second))
    assert_same_bits(bits(first.critic), bits(second.critic))


def test_checkpoint_of_float16_continues_in_bfloat16_and_the_reverse(
    model_path: str, make_trainer: Make, tmp_path: Path
) -> None:
    """Keep masters, moments and Adam's counters; the scale starts again."""
    half, brain = make_trainer(model_path, **HALF), make_trainer(model_path, param_dtype="bfloat16")
    half.update_actor(make_batch(4))
    half.update_actor(overflowing(make_batch(4)))
    half.save_checkpoint(str(tmp_path / "half"))
    brain.load_checkpoint(str(tmp_path / "half"))
    assert_same_bits(bits(brain), bits(half))
    assert (brain.step, counters(brain), scale_of(brain).value) == (2, {1.0}, 1.0)
    assert "skipped" not in brain.update_actor(make_batch(4))
    brain.save_checkpoint(str(tmp_path / "brain"))
    half.load_checkpoint(str(tmp_path / "brain"))
    assert (half.step, counters(half)) == (3, {2.0})
    assert half.update_actor(make_batch(4))["loss_scale"] == FIRST


# ---------------------------------------------------------------- what no loss scale can repair


def test_loss_that_is_not_finite_raises_immediately(model_path: str, make_trainer: Make) -> None:
    trainer = make_trainer(model_path, **HALF)
    before = bits(trainer)
    poisoned = dataclasses.replace(make_batch(3), advantages=[1.0, math.nan, 1.0])
    with pytest.raises(FloatingPointError, match=r"batch's float fields.*model\.dtype=bfloat16"):
        trainer.update_actor(poisoned)
    assert_same_bits(bits(trainer), before)
    assert (trainer.step, scale_of(trainer)) == (0, LossScale(dynamic=True, value=FIRST))


def test_scores_of_a_model_that_exceeds_float16_are_refused(
    tmp_path: Path, make_trainer: Make
) -> None:
    """Multiply in the MLP numbers above 256, which float16 represents, but not their product."""
    path = describe(tmp_path, initializer_range=100.0)
    both: dict[str, Any] = {"random_init": True, "critic": CriticConfig(), "reference": True}
    half, wide = (
        make_trainer(path, **both, **more) for more in (HALF, {"param_dtype": "bfloat16"})
    )
    for side in (half, wide):
        side.reload()
    for method in ("compute_log_prob", "compute_ref_log_prob", "compute_values"):
        getattr(wide, method)(make_batch(3))
        with pytest.raises(FloatingPointError) as caught:
            getattr(half, method)(make_batch(3))
        assert str(caught.value).startswith(f"{method}(): 3 of 3 sequences have scores that are")
        assert "65,504: set param_dtype" in str(caught.value)


@pytest.mark.parametrize(
    ("dtypes", "message"),
    [
        ({"dtype": "float16"}, "dtype='float16': use float32, with param_dtype='float16'"),
        ({"dtype": "bfloat16", **HALF}, "param_dtype='float16': needs dtype='float32'"),
        ({"param_dtype": "float8"}, "use one of float32, bfloat16, float16, or None"),
    ],
)
def test_dtypes_that_lose_small_updates_are_refused(
    dtypes: dict[str, str], message: str, model_path: str, make_trainer: Make
) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer(model_path, **dtypes)
