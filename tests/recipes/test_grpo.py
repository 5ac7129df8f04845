"""Advantages of GRPO against exact arithmetic, and what training leaves out of them."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.grpo import compute_advantages

OFFSETS = [0.0, 1.0, -30000.0, 2e6, 2.0**40]
SCALES = [1e-9, 1e-3, 1.0, 1e6]
HALF_APART = math.sqrt(3 / 4)  # of two rewards, each given twice, in sample deviations
Group = list[float | None]


def by_definition(group: Group, normalize_std: bool) -> list[float]:
    """Return the advantages of a group, computed with fractions and 50 digits."""
    known = [Fraction(reward) for reward in group if reward is not None]
    mean = sum(known, Fraction()) / max(1, len(known))
    variance = sum(((reward - mean) ** 2 for reward in known), Fraction()) / max(1, len(known) - 1)
    with localcontext() as context:
        context.prec = 50
        spread = (Decimal(variance.numerator) / Decimal(variance.denominator)).sqrt()
    scale = Fraction(spread) + Fraction(1, 10**6) if normalize_std else 1
    return [0.0 if reward is None else float((Fraction(reward) - mean) / scale) for reward in group]


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
@given(groups(), st.booleans())
def test_advantages_of_any_size_and_offset_match_exact_arithmetic(
    drawn: list[Group], normalize_std: bool
) -> None:
    size = len(drawn[0])
    flat = [reward for group in drawn for reward in group]
    advantages = compute_advantages(flat, size, normalize_std)
    assert len(advantages) == len(flat)
    for index, group in enumerate(drawn):
        own, expected = advantages[index * size :][:size], by_definition(group, normalize_std)
        assert own == pytest.approx(expected, rel=1e-12, abs=1e-13 * max(map(abs, expected)))
        if len({*group} - {None}) <= 1:
            assert own == [0.0] * size, "equal rewards, a single one or none"


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
    advantages = compute_advantages(group * 2, 4, normalize_std=True)
    assert advantages == pytest.approx([-expected, expected] * 2, rel=2e-3)


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 2e6 + 0.1, -1e300])
def test_equal_rewards_give_exactly_0(reward: float) -> None:
    for normalize_std in (True, False):
        assert compute_advantages([reward] * 6, 3, normalize_std) == [0.0] * 6


def test_advantages_are_those_of_verl_and_trl_but_for_the_added_constant() -> None:
    """Compare with the deviation of a sample of 8: one right answer has 7 / sqrt(8)."""
    advantages = compute_advantages([1.0] + [0.0] * 7, 8, normalize_std=True)
    assert advantages[0] == pytest.approx(7 / math.sqrt(8), rel=1e-5)


def test_answer_without_reward_changes_no_other_advantage() -> None:
    alone = compute_advantages([1.0, 0.0, 0.5], 3, True)
    for nothing in (None, math.nan):
        rewards = [1.0, nothing, 0.0, 0.5]
        assert compute_advantages(rewards, 4, True) == [alone[0], 0.0, *alone[1:]]
    assert compute_advantages([None, 3.0, None, None], 2, True) == [0.0] * 4


def test_groups_that_are_not_whole_are_refused() -> None:
    with pytest.raises(ValueError, match="7 rewards are no multiple of 4"):
        compute_advantages([0.0] * 7, 4, True)
