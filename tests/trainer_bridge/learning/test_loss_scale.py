"""Training in float16: its loss scale, repeated updates, and errors if a model exceeds float16."""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given, settings

from tests.helpers.case_selection import some
from tests.helpers.trainer_bridge.models import as_sampled, describe, make_batch, value_batch
from tests.helpers.trainer_bridge.states import MOMENTS, assert_same_bits, bits
from tests.helpers.trainer_bridge.tolerance import LEARNING_RATE, STABLE
from trainer_bridge import CriticConfig, LoraConfig, Schedule, SequenceBatch, Trainer, TrainerConfig
from trainer_bridge.learning import loss_scale, trainer_model
from trainer_bridge.learning.loss_scale import FIRST, LARGEST, TRIES, LossScale
from trainer_bridge.learning.trainer_model import Model

Make = Callable[..., Trainer]
HALF: dict[str, Any] = {"param_dtype": "float16"}
LORA = LoraConfig(rank=4, alpha=8.0, target_modules=("q_proj", "o_proj", "down_proj"))
KINDS: list[dict[str, Any]] = [{}, {"lora": LORA}, {"optimizer_offload": True}]
FALLS = Schedule(kind="linear", updates=4)
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


def counters(side: Any) -> set[float]:
    return {float(state["step"]) for state in side.optimizer.state.values()}


# ------------------------------------------------------------------------------ the scale itself


class ScaleRules:
    """The scale's rules without arithmetic: exponents of 2, and updates at the last one."""

    exponent, good = round(math.log2(FIRST)), 0

    def update(self, size: int) -> tuple[int, int] | None:
        """Return exponent and overflows of an update whose gradient is 2**size; None: it fails.

        The largest power of 2 in float16 is 2**15.
        """
        overflows = max(0, self.exponent + size - 15)
        if overflows >= TRIES:
            return None
        used = self.exponent - overflows
        self.exponent, self.good = used, 1 if overflows else self.good + 1
        if self.good == 3:
            self.exponent, self.good = min(used + 1, round(math.log2(LARGEST))), 0
        return used, overflows


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(-20, 25), st.integers(1, 7)), max_size=8))
@example([(-20, 40), (0, 2), (25, 1)])  # reaches the largest scale
@example([(18, 2), (19, 1), (0, 1)])  # 19 and 4 overflows, and then none
def test_updates_repeat_as_a_model_of_the_scale_predicts(runs: list[tuple[int, int]]) -> None:
    """Run updates whose gradient is a power of 2, of which the parameter counts the sum."""
    param = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
    sgd = torch.optim.SGD([param], lr=1.0)
    config = TrainerConfig(
        model_path="-", param_dtype="float16", learning_rate=1.0, max_grad_norm=None
    )
    runtime: Any = SimpleNamespace(average_replicas=lambda _: None)
    learner, model = Model(torch.nn.Module(), config, runtime, sgd), ScaleRules()
    ours, failed = learner.loss_scale, list[Any]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_scale, "GOOD", 3)
        patch.setattr(trainer_model, "local_shard", lambda tensor: tensor)
        for size in (size for size, count in runs for _ in range(count)):

            def backward(scale: float, size: int = size) -> list[float]:
                assert param.grad is None and all(tensor() is None for tensor in failed)
                param.grad = torch.tensor(scale * 2.0**size).half().double()
                failed.append(weakref.ref(param.grad))
                return [0.5]

            learner.step = 6
            held, scale = float(param.detach()), dataclasses.replace(ours)
            if (expected := model.update(size)) is None:
                with pytest.raises(FloatingPointError, match="in step 7, .*loss scales tried: 20"):
                    learner.take_step(backward)
                assert (float(param.detach()), ours) == (held, scale)
            else:
                figures = learner.take_step(backward)[1]
                assert (math.log2(figures["loss_scale"]), figures["overflows"]) == expected
                used = 2.0 ** expected[0]  # float16 has no power of 2 below 2**-24
                learned = float(torch.tensor(used * 2.0**size).half()) / used
                assert float(param.detach()) == held - learned
            assert (math.log2(ours.value), ours.good) == (model.exponent, model.good)
            assert param.grad is None


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
    assert (got["loss_scale"], got["overflows"]) == (FIRST, 0.0) and "overflows" not in expected
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
    assert (got["critic_loss_scale"], got["critic_overflows"]) == (FIRST, 0.0)


def test_scale_keeps_gradients_that_vanish_in_float16(model_path: str, make_trainer: Make) -> None:
    """Learn from advantages near 1e-6, whose gradients per token are near 6e-8."""
    exact, half = make_trainer(model_path), make_trainer(model_path, **HALF)
    batch = on_policy(exact, size=1e-6)
    expected, got = (side.update_actor(batch)["grad_norm"] for side in (exact, half))
    assert got == pytest.approx(expected, rel=4 * math.sqrt(140) * U)
    unscaled = make_trainer(model_path, **HALF)
    unscaled.policy.loss_scale.value = 1.0
    assert unscaled.update_actor(batch)["grad_norm"] < expected / 2


# -------------------------------------------------------------------------------- repeated updates


@pytest.mark.parametrize("changes", some(*KINDS[::2], whole=[KINDS[1]]), ids=str)
def test_repeated_update_has_the_bits_of_one_that_starts_at_the_scale_that_worked(
    changes: dict[str, Any], device: str, model_path: str, make_trainer: Make
) -> None:
    both = {"critic": CriticConfig(learning_rate=1e-2), "schedule": FALLS, **changes, **HALF}
    repeats, twin = (make_trainer(model_path, device=device, **both) for _ in "ab")
    for learn, side in (("update_actor", 0), ("update_critic", 1)):
        prefix = "critic_" * side
        first, second = ((one.policy, one.critic)[side] for one in (repeats, twin))
        for one in (repeats, twin):
            getattr(one, learn)(value_batch(4))
        batch = as_sampled(value_batch(4, seed=1))  # a repeated update scores again
        assert first.loss_scale == LossScale(dynamic=True, value=FIRST, good=1)  # of its own
        first.loss_scale.value = 2.0**34
        got = getattr(repeats, learn)(batch)
        overflows, worked = got.pop(prefix + "overflows"), got[prefix + "loss_scale"]
        assert overflows > 0 and worked == 2.0 ** (34 - overflows)
        vars(second.loss_scale).update(value=worked, good=0)
        expected = getattr(twin, learn)(batch)
        assert expected.pop(prefix + "overflows") == 0
        assert got == expected and got[prefix + "grad_norm"] > 0
        assert first.loss_scale == second.loss_scale
        assert_same_bits(bits(first), bits(second))
        assert (first.step, counters(first)) == (2, {2.0})
        assert all(param.grad is None for param in first.module.parameters())


def test_checkpoint_keeps_the_scale_and_continues_bit_identical(
    model_path: str, make_trainer: Make, tmp_path: Path
) -> None:
    critic = {"critic": CriticConfig(learning_rate=1e-2)}
    first, second = (make_trainer(model_path, **critic, **HALF) for _ in "ab")
    first.policy.loss_scale.value = 2.0**34
    first.critic.loss_scale.value = FIRST / 4  # no overflow
    for seed in range(2):
        first.update_actor(value_batch(4, seed))
        first.update_critic(value_batch(4, seed))
    first.save_checkpoint(str(tmp_path / "saved"))
    second.load_checkpoint(str(tmp_path / "saved"))
    for one, other in zip(first.models, second.models, strict=True):
        assert (one.loss_scale, counters(other)) == (other.loss_scale, {2.0})
    assert FIRST < second.policy.loss_scale.value < 2.0**34
    assert second.critic.loss_scale == LossScale(dynamic=True, value=FIRST / 4, good=2)
    for learn in ("update_actor", "update_critic"):
        good = value_batch(4, seed=3)
        assert getattr(first, learn)(good) == getattr(second, learn)(good)
    assert_same_bits(bits(first), bits(second))
    assert_same_bits(bits(first.critic), bits(second.critic))


def test_update_that_overflows_at_20_scales_changes_nothing(
    model_path: str, make_trainer: Make
) -> None:
    trainer = make_trainer(model_path, critic=CriticConfig(), **HALF)
    for learn, side in (("update_actor", trainer.policy), ("update_critic", trainer.critic)):
        getattr(trainer, learn)(value_batch(4))
        before, scale = bits(side), dataclasses.replace(side.loss_scale)
        with pytest.raises(FloatingPointError) as caught:
            getattr(trainer, learn)(overflowing(value_batch(4, seed=1)))
        text = str(caught.value)
        assert "in step 2, parameters are unchanged, loss scales tried: 20 from 65536 " in text
        assert "model.dtype=bfloat16" in text
        assert_same_bits(bits(side), before)
        assert (side.step, counters(side), side.loss_scale) == (1, {1.0}, scale)
        assert all(param.grad is None for param in side.module.parameters())
        getattr(trainer, learn)(value_batch(4, seed=1))


def test_checkpoint_of_float16_continues_in_bfloat16_and_the_reverse(
    model_path: str, make_trainer: Make, tmp_path: Path
) -> None:
    """Keep masters, moments and Adam's counters; the scale starts again."""
    half, brain = make_trainer(model_path, **HALF), make_trainer(model_path, param_dtype="bfloat16")
    half.policy.loss_scale.value = 2.0**34
    half.update_actor(make_batch(4))
    half.save_checkpoint(str(tmp_path / "half"))
    brain.load_checkpoint(str(tmp_path / "half"))
    assert_same_bits(bits(brain), bits(half))
    assert (brain.step, counters(brain), brain.policy.loss_scale.value) == (1, {1.0}, 1.0)
    assert "overflows" not in brain.update_actor(make_batch(4))
    brain.save_checkpoint(str(tmp_path / "brain"))
    half.load_checkpoint(str(tmp_path / "brain"))
    assert (half.step, counters(half)) == (2, {2.0})
    assert half.update_actor(make_batch(4))["loss_scale"] == FIRST


# ---------------------------------------------------------------- what no loss scale can repair


def test_loss_that_is_not_finite_raises_immediately(model_path: str, make_trainer: Make) -> None:
    trainer = make_trainer(model_path, **HALF)
    before = bits(trainer)
    poisoned = dataclasses.replace(make_batch(3), advantages=[1.0, math.nan, 1.0])
    with pytest.raises(FloatingPointError, match=r"batch's float fields.*model\.dtype=bfloat16"):
        trainer.update_actor(poisoned)
    assert_same_bits(bits(trainer), before)
    assert (trainer.step, trainer.policy.loss_scale) == (0, LossScale(dynamic=True, value=FIRST))


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
