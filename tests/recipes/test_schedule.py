"""Schedule of prompts: shares by weight, passes, and what a step may hold."""

from __future__ import annotations

import hashlib
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


@settings(max_examples=50, deadline=None)
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


@settings(max_examples=30, deadline=None)
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
    steps = [
        pick_problems(sets, count, seed, (step - 1) * count) for step in range(first, first + 40)
    ]
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


MIXED = [make_set("a", 31), make_set("b", 20, 0.5), make_set("c", 9, 0.25)]


def test_prompts_are_those_of_earlier_versions() -> None:
    """Compare 100 steps with recorded ones: a run may be resumed by a newer version."""
    steps = [[p.text for _, p in pick_problems(MIXED, 8, 3, 8 * step)] for step in range(100)]
    assert steps[0] == ["a 11", "b 13", "a 13", "c 5", "a 1", "b 17", "a 4", "a 22"]
    assert (
        hashlib.sha256(repr(steps).encode()).hexdigest().startswith("fee2e861b212b21a1c1b71e3fc98")
    )
    assert pick_problems(MIXED, 8, 3, 0) != pick_problems(MIXED, 8, 4, 0)


@settings(max_examples=30)
@given(st.integers(0, 3), st.integers(0, 500), st.lists(st.integers(1, 8), max_size=12))
def test_prompts_do_not_depend_on_how_many_are_drawn_together(
    seed: int, drawn: int, counts: list[int]
) -> None:
    parts = list[tuple[Task, Problem]]()
    for count in counts:
        parts += pick_problems(MIXED, count, seed, drawn + len(parts), apart=8)
    together = pick_problems(MIXED, len(parts), seed, drawn, apart=8)
    assert parts == together
    for start in range(len(parts)):
        window = [problem for _, problem in parts[start : start + 8]]
        assert len({*window}) == len(window)


def test_one_pass_over_7500_problems_sees_each_once_and_the_next_in_another_order() -> None:
    tasks = [make_set("a", 7500)]
    passes = [
        [p.text for step in steps for _, p in pick_problems(tasks, 50, 0, 50 * (step - 1))]
        for steps in (range(1, 151), range(151, 301))
    ]
    assert len({*passes[0]}) == len({*passes[1]}) == 7500
    same = sum(a == b for a, b in zip(*passes, strict=True))
    assert same < 50


def test_set_of_small_weight_is_neither_starved_nor_doubled() -> None:
    tasks = [make_set("a", 60), make_set("b", 60, 0.5), make_set("c", 60, 0.01)]
    counts = Counter(
        task.name
        for step in range(1, 152)
        for task, _ in pick_problems(tasks, 2, 0, 2 * (step - 1))
    )
    assert counts == {"a": 200, "b": 100, "c": 2}


@pytest.mark.parametrize("weights", [(1.0,), (0.7, 0.3), (1 / 3, 0.1234567891, 2.0)])
def test_late_step_is_as_fast_as_an_early_one(weights: tuple[float, ...]) -> None:
    tasks = [make_set(str(weight), 500, weight) for weight in weights]
    pick_problems(tasks, 64, 0, 6_400_000)
    begun = time.process_time()
    for step in range(100_001, 100_051):
        pick_problems(tasks, 64, 0, 64 * step)
    assert time.process_time() - begun < 2  # Counting from the first step takes minutes.
