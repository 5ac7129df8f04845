"""Arithmetic of PPO against explicit formulas."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import recipes
from recipes.loops.ppo import (
    PpoLoop,
    explained_variance,
    gae,
    token_rewards,
    whiten,
    with_advantages,
)
from trainer_bridge import Schedule, SequenceBatch
from trainer_bridge.learning import Tokens

EXACT = settings(max_examples=100)
number = st.floats(-3, 3)
# (reward, value) of every token.
answers = st.lists(st.lists(st.tuples(number, number), max_size=6), min_size=1, max_size=5)


def by_definition(
    rewards: list[float], values: list[float], gamma: float, lam: float
) -> list[float]:
    """Return the weighted means of all n-step advantages; the last weight goes to the longest."""
    advantages = []
    for t in range(len(rewards)):
        left = len(rewards) - t
        estimates = []
        for n in range(1, left + 1):
            earned = sum(gamma**k * rewards[t + k] for k in range(n))
            after = gamma**n * values[t + n] if n < left else 0.0
            estimates.append(earned + after - values[t])
        weights = [(1 - lam) * lam**k for k in range(left - 1)] + [lam ** (left - 1)]
        advantages.append(
            sum(weight * estimate for weight, estimate in zip(weights, estimates, strict=True))
        )
    return advantages


@EXACT
@given(answers, st.floats(0.1, 1), st.floats(0.1, 1))
def test_advantages_are_weighted_means_of_n_step_advantages(
    tokens: list[list[tuple[float, float]]], gamma: float, lam: float
) -> None:
    rewards = [[reward for reward, _ in row] for row in tokens]
    values = [[value for _, value in row] for row in tokens]
    lengths = [*map(len, tokens)]
    earned = Tokens.of(rewards)
    computed = gae(earned.values, Tokens.of(values).values, lengths, gamma, lam)
    advantages, returns = map(earned.with_values, computed)
    for row, (actual, targets) in enumerate(zip(advantages, returns, strict=True)):
        expected = by_definition(rewards[row], values[row], gamma, lam)
        assert actual == pytest.approx(expected, abs=1e-9)
        assert targets == pytest.approx(
            [a + v for a, v in zip(actual, values[row], strict=True)], abs=1e-12
        )


@EXACT
@given(
    st.lists(st.integers(-5, 5), min_size=1, max_size=20),
    st.sampled_from([(0.0, 1.0), (2e6, 1.0), (-30000.0, 0.01), (0.0, 1e-6)]),
)
def test_whiten_normalizes_over_all_tokens(steps: list[int], place: tuple[float, float]) -> None:
    numbers = [place[0] + place[1] * step for step in steps]
    white = whiten(np.array(numbers)).tolist()
    if len({*numbers}) == 1:
        assert white == [0.0] * len(numbers)
        return
    exact = [Fraction(number) for number in numbers]
    mean, variance = statistics.mean(exact), statistics.variance(exact)
    expected = [float(number - mean) / math.sqrt(variance + Fraction(1, 10**8)) for number in exact]
    assert white == pytest.approx(expected, rel=1e-9, abs=1e-9)
    if place[1] >= 0.01:
        assert statistics.mean(white) == pytest.approx(0, abs=1e-12)
        assert statistics.stdev(white) == pytest.approx(1, rel=1e-3)


def test_token_rewards_are_the_reward_at_the_last_token_minus_penalties() -> None:
    lengths = [2, 1, 0, 1]
    earned = token_rewards([1.0, 0.5, 9.0, -1.0], np.array([0.05, -0.1, 0.0, -0.2]), lengths)
    assert earned.tolist() == pytest.approx([-0.05, 1.1, 0.5, -0.8])


def test_penalties_are_the_coefficient_times_the_distance_from_the_reference() -> None:
    """Take values of 0 and no discount, so that returns are sums of the rewards that follow."""
    ids: dict[str, Any] = {"prompt_ids": [[1], [2]], "response_ids": [[3, 4], [5]]}
    scored = {"old_logprobs": [[-1.0, -2.0], [-3.0]], "values": [[0.0, 0.0], [0.0]]}
    reference = [[-1.5, -1.0], [-3.0]]
    words = ["ppo.gae_lambda=1", "ppo.normalize_advantages=false", "loss.kl_coef=0.1"]
    recipe = recipes.load("tiny-ppo", words)
    for first, expected in ((None, [[1.0, 1.0], [0.5]]), (reference, [[1.05, 1.1], [0.5]])):
        batch = SequenceBatch(**ids, **scored, ref_logprobs=first)
        learning, figures = with_advantages(batch, [1.0, 0.5], recipe)
        assert learning.returns == learning.advantages
        assert learning.returns == [pytest.approx(row) for row in expected]
        assert learning.ref_logprobs is None and learning.old_logprobs == batch.old_logprobs
        assert figures["value_explained_variance"] == 0
        tokens = [reward for row in expected for reward in row]
        assert figures["advantage_std"] == pytest.approx(statistics.stdev(tokens))


def test_explained_variance_is_1_for_perfect_and_0_for_constant_critics() -> None:
    returns = np.array([1.0, 2.0, 3.0])
    assert explained_variance(returns, returns) == 1
    assert explained_variance(np.array([5.0, 5.0, 5.0]), returns) == 0
    expected = 1 - statistics.pvariance([-0.5, 0.0, 0.0]) / statistics.pvariance([1.0, 2.0, 3.0])
    assert explained_variance(np.array([1.5, 2.0, 3.0]), returns) == pytest.approx(expected)


@EXACT
@given(st.lists(number, min_size=1, max_size=20), st.sampled_from([0.1, 1.0, 2e6]))
def test_returns_that_differ_by_rounding_leave_nothing_to_explain(
    values: list[float], reward: float
) -> None:
    """Let every return be the reward, as the sum of an advantage and a value."""
    estimates = np.array(values)
    assert explained_variance(estimates, np.full(len(values), reward)) == 0
    assert explained_variance(estimates, (reward - estimates) + estimates) == 0


def test_trainer_fields_follow_from_the_algorithms_section() -> None:
    words = ["steps=10", "loop.epochs=2", "loop.mini_batches=3"]
    words += ["ppo.critic_warmup_steps=4", "ppo.value_clip=0.5"]
    words += ["trainer.schedule=cosine", "trainer.warmup_steps=2", "trainer.final_rate=0.1"]
    fields = PpoLoop.trainer_fields(recipes.load("tiny-ppo", words))
    course = Schedule(kind="cosine", warmup_updates=2 * 6, updates=6 * 6, final_rate=0.1)
    assert fields["schedule"] == course
    assert fields["critic"].schedule == replace(course, updates=10 * 6)
    assert fields["critic"].value_clip == 0.5
    fields = PpoLoop.trainer_fields(recipes.load("tiny-ppo"))
    assert fields["schedule"].kind == fields["critic"].schedule.kind == "constant"
