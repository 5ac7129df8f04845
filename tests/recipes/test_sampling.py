"""Prompts and sampling seeds as functions of (seed, step), and which answers are scored."""

from __future__ import annotations

from collections import Counter

import pytest

from recipes.sampling import sampling_seed, scored
from recipes.tasks import Problem, Score, Task
from recipes.tasks.schedule import pick_problems


def sets(*sizes: int) -> list[Task]:
    """Return sets of problems whose prompts are their set's index and a number."""
    return [
        Task(
            name=str(index),
            train=tuple(Problem(prompt=f"{index} {n}") for n in range(size)),
            held_out=(),
            score=lambda *_: 0.0,
        )
        for index, size in enumerate(sizes)
    ]


def picked(tasks: list[Task], count: int, step: int, seed: int = 0) -> list[str]:
    chosen = pick_problems(tasks, count, seed, step)
    assert all(problem in task.train for task, problem in chosen)
    return [problem.text for _, problem in chosen]


def test_prompts_are_a_function_of_seed_and_step() -> None:
    tasks = sets(50)
    first = picked(tasks, 8, step=1)
    assert first == picked(tasks, 8, step=1)
    assert len(set(first)) == 8
    assert first != picked(tasks, 8, step=2)
    assert first != picked(tasks, 8, step=1, seed=1)


@pytest.mark.parametrize(
    ("sizes", "count"), [((50,), 8), ((11,), 11), ((9, 50, 3), 2), ((9, 50, 3), 7), ((7, 5), 9)]
)
def test_every_pass_has_each_problem_once_and_equal_sets_have_equal_shares(
    sizes: tuple[int, ...], count: int
) -> None:
    """Include steps that begin in one pass and end in the next."""
    tasks = sets(*sizes)
    steps = [picked(tasks, count, step) for step in range(1, 201)]
    assert all(len(set(prompts)) == count for prompts in steps)
    for prompts in steps:
        shares = Counter(prompt.split()[0] for prompt in prompts)
        assert all(abs(shares[task.name] - count / len(tasks)) < 1 for task in tasks)
    flat = [prompt for prompts in steps for prompt in prompts]
    for task in tasks:
        own = [prompt for prompt in flat if prompt.split()[0] == task.name]
        assert abs(len(own) - len(flat) / len(tasks)) < 1
        size = len(task.train)
        passes = [own[start : start + size] for start in range(0, len(own), size)]
        assert all(len(set(prompts)) == size for prompts in passes[:-1])
        assert len({*map(tuple, passes[:-1])}) > 1 or size == -(-count // len(tasks))


def test_sampling_seeds_differ_and_fit_63_bits() -> None:
    seeds = {
        sampling_seed(seed, step, index)
        for seed in range(3)
        for step in range(20)
        for index in range(16)
    }
    assert len(seeds) == 3 * 20 * 16
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_answers_with_a_reward_are_scored() -> None:
    scores = [Score(reward=reward) for reward in (None, 0.0, 1.0, None, -1.0)]
    assert scored(scores) == [1, 2, 4]
