"""The arithmetic of the loop, and that prompts and seeds depend on (seed, step) alone."""

import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.grpo import compute_advantages, logprob_gap, pick_problems, sampling_seed
from recipes.tasks import Problem

EXACT = settings(derandomize=True, max_examples=100, deadline=None)
rewards_of_groups = st.integers(2, 6).flatmap(
    lambda size: st.lists(
        st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=size, max_size=size), min_size=1, max_size=5
    )
)


def test_advantages_by_hand():
    assert compute_advantages([1, 0, 0, 0], 2, normalize_std=True) == [1.0, -1.0, 0.0, 0.0]
    assert compute_advantages([1, 0, 0, 0], 4, normalize_std=False) == [0.75, -0.25, -0.25, -0.25]
    expected = [3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)]
    assert compute_advantages([1, 0, 0, 0], 4, normalize_std=True) == pytest.approx(expected)


@EXACT
@given(rewards_of_groups, st.booleans())
def test_every_group_is_centred_and_scaled_by_itself(groups, normalize_std):
    size = len(groups[0])
    flat = [reward for group in groups for reward in group]
    advantages = compute_advantages(flat, size, normalize_std)
    assert len(advantages) == len(flat)
    for index, group in enumerate(groups):
        mine = advantages[index * size : (index + 1) * size]
        assert mine == compute_advantages(group, size, normalize_std)  # no other group matters
        assert statistics.fmean(mine) == pytest.approx(0, abs=1e-12)
        if len(set(group)) == 1:
            assert mine == [0.0] * size
        else:
            spread = 1.0 if normalize_std else statistics.pstdev(group)
            assert statistics.pstdev(mine) == pytest.approx(spread)
            order = sorted(range(size), key=lambda i: group[i])
            assert [mine[i] for i in order] == sorted(mine)


def test_the_gap_is_over_tokens_not_sequences():
    mean, largest = logprob_gap([[-1.0], [-1.0, -2.0, -3.0]], [[-1.5], [-1.0, -2.25, -3.25]])
    assert mean == pytest.approx(0.25)
    assert largest == 0.5


def test_a_token_without_partner_is_no_gap_but_an_error():
    with pytest.raises(ValueError, match="zip"):
        logprob_gap([[-1.0, -2.0]], [[-1.0]])


def test_prompts_are_a_function_of_seed_and_step():
    problems = [Problem(question=str(n), answer="") for n in range(50)]
    first = pick_problems(problems, 8, seed=0, step=1)
    assert first == pick_problems(problems, 8, seed=0, step=1)
    assert len(set(first)) == 8
    assert first != pick_problems(problems, 8, seed=0, step=2)
    assert first != pick_problems(problems, 8, seed=1, step=1)


def test_sampling_seeds_differ_and_fit_the_engine():
    seeds = {sampling_seed(seed, step, index) for seed in range(3) for step in range(20) for index in range(16)}
    assert len(seeds) == 3 * 20 * 16
    assert all(0 <= seed < 2**63 for seed in seeds)
