"""Advantages from rewards against exact arithmetic, and what training leaves out of them."""

from __future__ import annotations

import math
import random
import statistics
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import recipes
from recipes.config.sections import Baseline, Scale
from recipes.loops.advantages import (
    compare_answers,
    compare_tokens,
    compute_advantages,
    with_signal,
)
from trainer_bridge.learning import Tokens

OFFSETS = [0.0, 1.0, -30000.0, 2e6, 2.0**40]
SCALES = [1e-9, 1e-3, 1.0, 1e6]
HALF_APART = math.sqrt(3 / 4)  # of two rewards, each given twice, in sample deviations
Group = list[float | None]


def spread_of(rewards: list[Fraction]) -> Fraction:
    """Return the sample deviation, to 50 digits."""
    mean = sum(rewards, Fraction()) / max(1, len(rewards))
    variance = sum(((reward - mean) ** 2 for reward in rewards), Fraction())
    variance /= max(1, len(rewards) - 1)
    with localcontext() as context:
        context.prec = 50
        return Fraction((Decimal(variance.numerator) / Decimal(variance.denominator)).sqrt())


def by_definition(drawn: list[Group], baseline: Baseline, scale: Scale) -> list[float]:
    """Return the advantages of groups, computed with fractions and 50 digits."""
    exact = [[None if reward is None else Fraction(reward) for reward in group] for group in drawn]
    every = [reward for group in exact for reward in group if reward is not None]
    advantages = []
    for group in exact:
        known = [reward for reward in group if reward is not None]
        for reward in group:
            if reward is None or (baseline == "leave_one_out" and len(known) == 1):
                advantages.append(0.0)
                continue
            others = sum(known) - reward
            mean = sum(known) / len(known)
            if baseline == "leave_one_out":
                mean = others / (len(known) - 1)
            spread = {"group": spread_of(known), "batch": spread_of(every)}.get(scale)
            divisor = 1 if spread is None else spread + Fraction(1, 10**6)
            advantages.append(float((reward - mean) / divisor))
    return advantages


@st.composite
def groups(draw: st.DrawFn) -> list[Group]:
    """Draw groups of one size, whose rewards are steps of some size above some offset."""
    size = draw(st.integers(2, 6))
    steps = st.none() | st.integers(-3, 3) | st.floats(-1, 1)
    drawn = []
    for _ in range(draw(st.integers(1, 5))):
        offset, scale = draw(st.sampled_from(OFFSETS)), draw(st.sampled_from(SCALES))
        group = draw(st.lists(steps, min_size=size, max_size=size))
        drawn.append([None if step is None else offset + scale * step for step in group])
    return drawn


@settings(max_examples=200)
@given(
    groups(),
    st.sampled_from(["group", "leave_one_out"]),
    st.sampled_from(["group", "batch", "none"]),
)
def test_advantages_of_any_size_and_offset_match_exact_arithmetic(
    drawn: list[Group], baseline: Baseline, scale: Scale
) -> None:
    size = len(drawn[0])
    flat = [reward for group in drawn for reward in group]
    advantages, expected = (
        compare_answers(flat, size, baseline, scale),
        by_definition(drawn, baseline, scale),
    )
    assert len(advantages) == len(flat)
    for index, group in enumerate(drawn):
        own, right = (part[index * size :][:size] for part in (advantages, expected))
        assert own == pytest.approx(right, rel=1e-12, abs=1e-13 * max(map(abs, right)))
        if len({*group} - {None}) <= 1:
            assert own == [0.0] * size, "equal rewards, a single one or none"
    dead = sum(len({*group} - {None}) <= 1 for group in drawn)
    assert with_signal(flat, size).count(False) == dead


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        ([2e6, 2e6 + 1], HALF_APART),
        ([-30000.01, -29999.99], HALF_APART),
        ([2.0**24, 2.0**24 + 1], HALF_APART),
        ([0.0, 1e-6], 0.5 / (0.5 / HALF_APART + 1)),  # as small as the added 1e-6
        ([1e-9, 3e-9], 1e-3),  # far below
    ],
)
def test_different_rewards_give_a_signal(group: list[float], expected: float) -> None:
    advantages = compare_answers(group * 2, 4)
    assert advantages == pytest.approx([-expected, expected] * 2, rel=2e-3)
    assert with_signal(group * 2, 4) == [True]


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 2e6 + 0.1, -1e300])
def test_equal_rewards_give_exactly_0(reward: float) -> None:
    for scale in get_args(Scale):
        assert compare_answers([reward] * 6, 3, scale=scale) == [0.0] * 6


def test_answer_without_reward_changes_no_other_advantage() -> None:
    alone = compare_answers([1.0, 0.0, 0.5], 3)
    for nothing in (None, math.nan):
        rewards = [1.0, nothing, 0.0, 0.5]
        assert compare_answers(rewards, 4) == [alone[0], 0.0, *alone[1:]]
    assert compare_answers([None, 3.0, None, None], 2) == [0.0] * 4


def test_groups_that_are_not_whole_are_refused() -> None:
    with pytest.raises(ValueError, match="7 rewards are no multiple of 4"):
        compare_answers([0.0] * 7, 4)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.none() | st.floats(-2, 2), st.integers(1, 5)), min_size=1, max_size=6))
def test_token_advantages_are_whitened_rewards_minus_later_penalties(
    answers: list[tuple[float | None, int]],
) -> None:
    """Compare with REINFORCE++ by definition; the tolerance is that of sums of 30 numbers."""
    draw = random.Random(len(answers))
    penalties = [[draw.uniform(-1, 1) for _ in range(length)] for _, length in answers]
    rewards = [reward for reward, _ in answers]
    returns = [
        [] if reward is None else [reward - math.fsum(row[at:]) for at in range(len(row))]
        for reward, row in zip(rewards, penalties, strict=True)
    ]
    tokens = [number for row in returns for number in row]
    mean = statistics.fmean(tokens) if tokens else 0.0
    spread = statistics.stdev(tokens) if len(tokens) > 1 else 0.0
    for scale, divisor in (("none", 1.0), ("batch", spread + 1e-6)):
        expected = [
            [(number - mean) / divisor for number in got] or [0.0] * len(row)
            for got, row in zip(returns, penalties, strict=True)
        ]
        # Centering leaves at most 1e-14; the constant may magnify it by 1e6.
        for got, right in zip(
            compare_tokens(rewards, Tokens.of(penalties), scale), expected, strict=True
        ):
            assert got == pytest.approx(right, rel=1e-9, abs=1e-7)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_in_reward_is_subtracted_from_answers_and_tokens(estimator: str) -> None:
    words = ["loss.kl_coef=0.5", "loss.kl_in=reward", f"loss.kl_estimator={estimator}"]
    policy, reference = map(Tokens.of, ([[-1.0, -2.0], [-0.5]], [[-1.5, -1.0], [-0.5]]))
    differences = [[0.5, -1.0], [0.0]]
    formulas = {
        "k1": lambda d: d,
        "k2": lambda d: d * d / 2,
        "k3": lambda d: math.exp(-d) - 1 + d,
    }
    taken = [[0.5 * formulas[estimator](d) for d in row] for row in differences]
    recipe = recipes.load("tiny", [*words, "loop.samples_per_prompt=2", "grpo.scale=none"])
    got = compute_advantages(recipe, [1.0, 0.0], policy, reference)
    half = (1.0 - sum(taken[0])) / 2
    assert got == pytest.approx([half, -half])
    recipe = recipes.load("tiny", [*words, "grpo.baseline=batch", "grpo.scale=none"])
    got = compute_advantages(recipe, [1.0, 0.0], policy, reference)
    returns = [1.0 - sum(taken[0]), 1.0 - taken[0][1], 0.0]
    mean = sum(returns) / 3
    assert [number for row in got for number in row] == pytest.approx([r - mean for r in returns])
    plain = compute_advantages(
        recipes.load("tiny", ["loop.samples_per_prompt=2"]), [1, 0], policy, None
    )
    assert plain == compare_answers([1.0, 0.0], 2)
