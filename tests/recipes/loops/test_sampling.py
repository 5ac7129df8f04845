"""Prompts and sampling seeds, which answers are scored, and the length penalty."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.config.sections import SamplingSection
from recipes.loops.sampling import Samples, rewarded, sampling_seed, with_length_penalty
from recipes.tasks import Problem, Task
from recipes.tasks.schedule import pick_problems
from tests.helpers.recipes.scored_answers import scored
from trainer_bridge.learning import Tokens


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


def picked(tasks: list[Task], count: int, step: int) -> list[str]:
    chosen = pick_problems(tasks, count, 0, (step - 1) * count)
    assert all(problem in task.train for task, problem in chosen)
    return [problem.text for _, problem in chosen]


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
    scores = [scored(reward=reward) for reward in (None, 0.0, 1.0, None, -1.0)]
    assert rewarded(scores) == [1, 2, 4]


def answers(lengths: list[int]) -> Samples:
    """Return answers of these lengths."""
    count, (task,) = len(lengths), sets(1)
    return Samples(
        tasks=[task] * count,
        problems=[task.train[0]] * count,
        prompt_ids=[[1]] * count,
        response_ids=[[2] * length for length in lengths],
        logprobs=Tokens.of([[-1.0] * length for length in lengths]),
        texts=[""] * count,
        ended=[True] * count,
    )


@given(
    st.integers(1, 300).flatmap(lambda most: st.tuples(st.just(most), st.integers(1, most))),
    st.floats(1e-3, 10),
    st.none() | st.floats(-5, 5),
)
def test_length_penalty_is_the_soft_overlong_punishment_of_dapo(
    sizes: tuple[int, int], largest: float, reward: float | None
) -> None:
    """Compare with equation 13, whose pieces meet at both ends of the window."""
    most, window = sizes
    section = SamplingSection(max_tokens=most, length_penalty=largest, length_penalty_tokens=window)
    lengths = list(range(most + 1))
    raw = [scored(reward=reward, correct=True, figures={"right": 1.0})] * len(lengths)
    shaped = with_length_penalty(answers(lengths), raw, section)
    for length, score in zip(lengths, shaped, strict=True):
        if reward is None:
            assert score is raw[0]
            continue
        expected = (
            Fraction(0) if length <= most - window else Fraction(most - window - length, window)
        )
        deduction = score.figures["sampling.length_penalty"]
        # Two roundings, of the product and of the quotient.
        assert deduction == pytest.approx(-float(expected) * largest, rel=2**-51)
        assert score.reward == reward - deduction
        assert score.correct and score.figures["right"] == 1.0
    if reward is not None:
        assert shaped[-1].figures["sampling.length_penalty"] == pytest.approx(largest, rel=2**-51)


def test_length_penalty_is_off_by_default_and_takes_a_fifth_of_the_tokens() -> None:
    scores = [scored(reward=1.0)]
    assert with_length_penalty(answers([512]), scores, SamplingSection()) == scores
    assert SamplingSection(max_tokens=20480).penalized_tokens == 4096
    assert SamplingSection(max_tokens=1).penalized_tokens == 1
