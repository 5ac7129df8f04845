"""Advantages of GRPO, figures, evaluations, and prompts and seeds as functions of (seed, step)."""

from __future__ import annotations

import math
import statistics
import types
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import recipes
from recipes.grpo import compute_advantages, signal_of
from recipes.loop import evaluate, logprob_mismatch, pick_problems, sampling_seed
from recipes.ppo import explained_variance, whiten
from recipes.setup.models import toy_tokenizer
from recipes.tasks import Problem, Score, Task
from rollout import Completion

EXACT = settings(max_examples=100)
rewards_of_groups = st.integers(2, 6).flatmap(
    lambda size: st.lists(
        st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=size, max_size=size),
        min_size=1,
        max_size=5,
    )
)


@pytest.mark.parametrize(
    "group",
    [[2e6, 2e6 + 1], [-30000.01, -29999.99], [1e-9, 3e-9], [2.0**24, 2.0**24 + 1], [1e9, 1e9 + 1]],
)
def test_different_rewards_give_a_signal_at_any_scale(group: list[float]) -> None:
    assert compute_advantages(group * 2, 4, normalize_std=True) == pytest.approx([-1, 1] * 2)
    assert whiten([group, group]) == [pytest.approx([-1, 1])] * 2
    assert signal_of(group * 2, 4) == {"groups_without_signal": 0, "groups_within_rounding": 0}


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e6])
@pytest.mark.parametrize("parts", [[0.1, 0.2], [0.7, 0.1], [1 / 3, 1 / 7, 1e-3]])
def test_rewards_that_differ_by_rounding_count_as_equal(parts: list[float], size: float) -> None:
    """Sum the same partial credits in another order, and up to a size of 1 in fp32."""
    credits = [part * size for part in parts]
    exact, in_fp32 = math.fsum(credits), float(torch.tensor(credits).sum())
    group = [sum(credits), sum(credits[::-1]), exact, in_fp32 if size <= 1 else exact]
    for normalize_std in (True, False):
        assert compute_advantages(group, 4, normalize_std) == [0.0] * 4
    assert whiten([group[:2], group[2:]]) == [[0.0] * 2] * 2
    assert explained_variance([[0.0] * 4], [group]) == 0


def test_groups_without_signal_and_groups_within_rounding_are_counted() -> None:
    rewards = [1.0, 1.0, 0.3, 0.1 + 0.2, 0.0, 1.0]
    assert signal_of(rewards, 2) == {"groups_without_signal": 2, "groups_within_rounding": 1}


@EXACT
@given(rewards_of_groups, st.booleans())
def test_every_group_is_centered_and_scaled_alone(
    groups: list[list[float]], normalize_std: bool
) -> None:
    size = len(groups[0])
    flat = [reward for group in groups for reward in group]
    advantages = compute_advantages(flat, size, normalize_std)
    assert len(advantages) == len(flat)
    for index, group in enumerate(groups):
        own = advantages[index * size : (index + 1) * size]
        assert own == compute_advantages(group, size, normalize_std), "depends on other groups"
        assert statistics.fmean(own) == pytest.approx(0, abs=1e-12)
        if len(set(group)) == 1:
            assert own == [0.0] * size
        else:
            spread = 1.0 if normalize_std else statistics.pstdev(group)
            assert statistics.pstdev(own) == pytest.approx(spread)
            order = sorted(range(size), key=lambda i: group[i])
            assert [own[i] for i in order] == sorted(own)


def test_mismatch_is_over_tokens_and_refuses_unequal_lengths() -> None:
    mean, largest = logprob_mismatch([[-1.0], [-1.0, -2.0, -3.0]], [[-1.5], [-1.0, -2.25, -3.25]])
    assert mean == pytest.approx(0.25)
    assert largest == 0.5
    with pytest.raises(ValueError, match="zip"):
        logprob_mismatch([[-1.0, -2.0]], [[-1.0]])


def test_prompts_are_a_function_of_seed_and_step() -> None:
    kinds = [[Problem(question=str(n), answer="") for n in range(50)]]
    first = pick_problems(kinds, 8, seed=0, step=1)
    assert first == pick_problems(kinds, 8, seed=0, step=1)
    assert len(set(first)) == 8
    assert first != pick_problems(kinds, 8, seed=0, step=2)
    assert first != pick_problems(kinds, 8, seed=1, step=1)


def test_step_has_equally_many_problems_of_each_kind() -> None:
    sizes = {"a": 9, "b": 50, "c": 3}
    kinds = [
        [Problem(question=f"{kind} {n}", answer="") for n in range(size)]
        for kind, size in sizes.items()
    ]
    for count, shares in ((9, (3, 3, 3)), (8, (3, 3, 2)), (7, (3, 2, 2)), (2, (1, 1, 0))):
        picked = pick_problems(kinds, count, seed=0, step=1)
        assert len(set(picked)) == count
        counts = Counter(problem.question[0] for problem in picked)
        assert tuple(counts[kind] for kind in "abc") == shares


@pytest.mark.parametrize(
    ("sizes", "count"), [((50,), 8), ((11,), 11), ((9, 50, 3), 2), ((7, 5), 9)]
)
def test_every_pass_has_each_problem_once_and_kinds_alternate(
    sizes: tuple[int, ...], count: int
) -> None:
    """Include steps that begin in one pass and end in the next."""
    kinds = [
        [Problem(question=f"{kind} {n}", answer="") for n in range(size)]
        for kind, size in enumerate(sizes)
    ]
    steps = [pick_problems(kinds, count, 0, step) for step in range(1, 201)]
    assert all(len(set(picked)) == count for picked in steps)
    flat = [problem for picked in steps for problem in picked]
    assert flat[count:] == [
        problem for step in range(2, 201) for problem in pick_problems(kinds, count, 0, step)
    ]
    for kind in kinds:
        of_kind = [problem for problem in flat if problem in kind]
        assert abs(len(of_kind) - len(flat) / len(kinds)) < 1
        passes = [of_kind[start : start + len(kind)] for start in range(0, len(of_kind), len(kind))]
        assert all(set(problems) == set(kind) for problems in passes[:-1])
        assert len({*map(tuple, passes[:-1])}) > 1 or len(kind) == -(-count // len(kinds))


def test_sampling_seeds_differ_and_fit_63_bits() -> None:
    seeds = {
        sampling_seed(seed, step, index)
        for seed in range(3)
        for step in range(20)
        for index in range(16)
    }
    assert len(seeds) == 3 * 20 * 16
    assert all(0 <= seed < 2**63 for seed in seeds)


class Parrot:
    """Rollout that answers every prompt with its first token and the end token."""

    def generate(self, prompts: list[list[int]], params: list[Any]) -> list[list[Completion]]:
        assert all(param.temperature == 0 and param.max_tokens == 3 for param in params)
        return [[completion([prompt[0], 3])] for prompt in prompts]


def completion(ids: list[int]) -> Completion:
    nothing = [0.0] * len(ids)
    return Completion(
        token_ids=ids, logprobs=nothing, finish_reason="stop", weight_versions=[1] * len(ids)
    )


def test_evaluation_covers_further_kinds_of_problems() -> None:
    tokenizer = toy_tokenizer(["a", "b"])

    def problems(*pairs: tuple[str, str]) -> tuple[Problem, ...]:
        return tuple(Problem(question=question, answer=answer) for question, answer in pairs)

    task = Task(
        name="parrot",
        train=problems(("a", "a")),
        held_out=problems(("a", "a"), ("b", "a"), ("b", "b")),
        also_train={"2_digits": problems(("a", "b"))},
        beside={
            "2_digits": problems(("b", "b"), ("b", "b"), ("a", "b")),
            "3_digits": problems(("a", "b")),
        },
        score=lambda problem, text, ended: Score(
            reward=0.0, exact=ended and text == problem.answer
        ),
    )
    setup = types.SimpleNamespace(
        recipe=recipes.load("tiny", ["eval.problems=2"]),
        task=task,
        tokenizer=tokenizer,
        prompt_ids=lambda problem: tokenizer.convert_tokens_to_ids([problem.question]),
    )
    expected = {
        "exact_match": 0.5,
        "exact_match_2_digits": 1.0,
        "exact_match_3_digits": 0.0,
        "problems": 2,
    }
    assert evaluate(Parrot(), setup) == {**expected, "also_trained": ["2_digits"]}
