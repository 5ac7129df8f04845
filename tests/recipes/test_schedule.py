"""Schedule of prompts: shares by weight, passes, and what a step may hold."""

from __future__ import annotations

import time
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.tasks import Problem, Score, Task
from recipes.tasks.schedule import LONGEST, Shares, pick_problems, shares_of

WEIGHTS = st.lists(
    st.one_of(st.integers(1, 20), st.decimals("0.001", 30, places=3)).map(float),
    min_size=1,
    max_size=8,
)


def make_set(name: str, size: int, weight: float = 1.0) -> Task:
    problems = tuple(Problem(prompt=f"{name} {number}") for number in range(size))
    score = Score(reward=0.0)
    return Task(name=name, train=problems, held_out=(), score=lambda *_: score, weight=weight)


@settings(max_examples=100, deadline=None)
@given(WEIGHTS, st.integers(0, 10**7))
def test_share_of_each_set_is_within_one_prompt_at_every_moment(
    weights: list[float], begin: int
) -> None:
    shares = Shares(weights)
    exact = [Fraction(str(weight)) for weight in weights]
    if shares.period > 5000:
        begin %= 5000
    if shares.period >= LONGEST:  # Weights are rounded.
        exact = list(map(Fraction, shares.rates))
    total, picked = sum(exact), shares.between(begin, begin + 200)
    counts = dict(reversed(picked))  # before the first prompt
    for number, (index, position) in enumerate(picked, begin + 1):
        assert position == counts[index]
        counts[index] += 1
        for other, count in counts.items():
            assert abs(count - number * exact[other] / total) < 1


@settings(max_examples=60, deadline=None)
@given(st.data(), WEIGHTS, st.integers(1, 40), st.integers(0, 3), st.integers(1, 10**6))
def test_steps_hold_distinct_problems_and_passes_hold_each_problem_once(
    data: st.DataObject, weights: list[float], count: int, seed: int, first: int
) -> None:
    """Draw sets that are hardly large enough, and follow 40 steps from any step on."""
    shares = shares_of(tuple(weights))
    least = [shares.most(index, count) for index in range(len(weights))]
    sizes = [size + data.draw(st.integers(0, 30)) for size in least]
    sets = [
        make_set(str(i), *sizes_and_weight)
        for i, sizes_and_weight in enumerate(zip(sizes, weights, strict=True))
    ]
    if shares.period > 5000:
        first %= 100
    steps = [pick_problems(sets, count, seed, step) for step in range(first, first + 40)]
    for picked in steps:
        assert len({problem for _, problem in picked}) == count
    flat = [pair for picked in steps for pair in picked]
    numbers = shares.between((first - 1) * count, (first + 39) * count)
    for index, task in enumerate(sets):
        positions = [position for i, position in numbers if i == index]
        taken = [problem for of, problem in flat if of is task]
        passes: dict[int, list[Problem]] = {}
        for position, problem in zip(positions, taken, strict=True):
            passes.setdefault(position // len(task.train), []).append(problem)
        for problems in passes.values():
            assert max(Counter(problems).values()) == 1
        for whole in [*passes.values()][1:-1]:
            assert {*whole} == {*task.train}


def test_prompts_are_a_function_of_seed_and_step() -> None:
    tasks = [make_set("a", 50)]
    first = pick_problems(tasks, 8, seed=0, step=1)
    assert first == pick_problems(tasks, 8, seed=0, step=1)
    assert first != pick_problems(tasks, 8, seed=0, step=2)
    assert first != pick_problems(tasks, 8, seed=1, step=1)


def test_one_pass_over_7500_problems_sees_each_once_and_the_next_in_another_order() -> None:
    tasks = [make_set("a", 7500)]
    passes = [
        [p.text for step in steps for _, p in pick_problems(tasks, 50, 0, step)]
        for steps in (range(1, 151), range(151, 301))
    ]
    assert len({*passes[0]}) == len({*passes[1]}) == 7500
    same = sum(a == b for a, b in zip(*passes, strict=True))
    assert same < 50


def test_set_of_small_weight_is_neither_starved_nor_doubled() -> None:
    tasks = [make_set("a", 60), make_set("b", 60, 0.5), make_set("c", 60, 0.01)]
    counts = Counter(
        task.name for step in range(1, 152) for task, _ in pick_problems(tasks, 2, 0, step)
    )
    assert counts == {"a": 200, "b": 100, "c": 2}


@pytest.mark.parametrize("weights", [(1.0,), (0.7, 0.3), (1 / 3, 0.1234567891, 2.0)])
def test_late_step_is_as_fast_as_an_early_one(weights: tuple[float, ...]) -> None:
    tasks = [make_set(str(weight), 500, weight) for weight in weights]
    pick_problems(tasks, 64, 0, 100_000)
    begun = time.process_time()
    for step in range(100_001, 100_051):
        pick_problems(tasks, 64, 0, step)
    assert time.process_time() - begun < 2  # Counting from the first step takes minutes.
