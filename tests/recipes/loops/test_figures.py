"""Figures of a step against explicit formulas, and steps whose answers lack rewards."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from operator import add
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import recipes.loops.loop
from recipes.errors import RunError
from recipes.loops.figures import answer_figures
from recipes.loops.numbers import deviation
from recipes.loops.sampling import Samples
from recipes.rewards import Scored
from recipes.rewards.rewards import Rewards
from recipes.run import start_run
from recipes.tasks import Problem, Task
from tests.helpers.recipes.scored_answers import scored
from tests.helpers.recipes.tiny_runs import SMALL, SMALL_PPO, rows
from trainer_bridge import SequenceBatch
from trainer_bridge.learning import Tokens, log_ratios, reference_figures
from trainer_bridge.trainer import Trainer

number = st.floats(-3, 3)
A, B = (Task(name=name, train=(), held_out=(), score=lambda *_: 0.0) for name in "ab")


@settings(max_examples=100)
@given(st.lists(st.integers(-5, 5), min_size=1, max_size=20), st.sampled_from([0, 0.1, 2e6, 1e12]))
def test_deviation_is_the_samples_at_any_offset(steps: list[int], offset: float) -> None:
    numbers = [offset + step for step in steps]
    expected = statistics.stdev(numbers) if len(numbers) > 1 else 0.0
    assert deviation(numbers) == pytest.approx(expected, rel=1e-12)
    assert bool(deviation(numbers)) == (len({*numbers}) > 1)


def test_log_ratios_are_of_tokens_and_refuse_unequal_lengths() -> None:
    ratios = log_ratios([[-1.0], [-1.0, -2.0, -3.0]], [[-1.5], [-1.0, -2.25, -3.25]])
    assert ratios.tolist() == [-0.5, 0.0, -0.25, -0.25]
    for second in ([[-1.0]], [[-1.0], [-2.0]]):
        with pytest.raises(ValueError, match=r"log-probabilities of \[2\] and of \[1"):
            log_ratios([[-1.0, -2.0]], second)


def test_kl_to_reference_is_over_tokens_and_never_negative() -> None:
    policy = [[-1.0], [-1.0, -2.0]]
    assert reference_figures(policy, policy) == {"kl_to_reference": 0.0}
    apart = [[-1.0], [0.0, -3.0]]  # one token is as likely, one e times more, one e times less
    (divergence,) = reference_figures(policy, apart).values()
    assert divergence == pytest.approx((math.e - 2 + 1 / math.e) / 3)
    assert reference_figures(policy, None) == {}


def step_of(scores: Sequence[Scored], tasks: Sequence[Task]) -> dict[str, Any]:
    """Return the row of answers of 1, 2, ... tokens, of which the last one is cut off."""
    count = len(scores)
    logprobs = Tokens.of([[-1.0] * (n + 1) for n in range(count)])
    samples = Samples(
        tasks=[tasks[n % len(tasks)] for n in range(count)],
        problems=[Problem(prompt="p")] * count,
        prompt_ids=[[1]] * count,
        response_ids=[[2] * len(row) for row in logprobs],
        logprobs=logprobs,
        texts=[""] * count,
        ended=[True] * (count - 1) + [False],
    )
    return answer_figures(samples, scores, 0.5, tasks)


def test_row_has_rewards_lengths_and_answers_without_reward() -> None:
    scores = [
        scored(reward=1.0, correct=True, figures={"right": 1.0, "short": 0.5}),
        scored(reward=0.0, figures={"right": 0.0}),
        scored(reward=None, fault="right: raised KeyError: 'x' (rewards.py:3)"),
        scored(reward=None),
    ]
    row = step_of(scores, [A])
    assert row == {
        "reward": 0.5,
        "reward_std": pytest.approx(math.sqrt(0.5)),
        "correct": 0.25,
        "unscored": 2,
        "faults": 1,
        "response_length": 2.5,
        "response_length_min": 1,
        "response_length_max": 4,
        "cut_off": 0.25,
        "tokens": 10,
        "tokens_per_second": 20.0,
        "rewards": {
            "right": {"mean": 0.5, "std": pytest.approx(math.sqrt(0.5))},
            "short": {"mean": 0.5, "std": 0.0},
        },
    }
    assert json.loads(json.dumps(row)) == row


def test_row_has_figures_of_each_set_if_there_are_several() -> None:
    rewards = [1.0, None, 0.0, None, 1.0]
    row = step_of([scored(reward=reward, correct=reward == 1) for reward in rewards], [A, B])
    assert row["sets"] == {
        "a": {
            "answers": 3,
            "reward": pytest.approx(2 / 3),
            "reward_std": pytest.approx(math.sqrt(1 / 3)),
            "correct": pytest.approx(2 / 3),
        },
        "b": {"answers": 2, "correct": 0.0},
    }
    assert "sets" not in step_of([scored(reward=0.0)], [A])


Judge = Callable[[int], Scored]


def submitting(judge: Judge) -> Callable[..., Callable[[], list[Scored]]]:
    """Return a `Rewards.submit` whose scores depend on the number of the answer only."""
    return lambda rewards, answers, **_: lambda: [judge(number) for number in range(len(answers))]


def sequences(batch: SequenceBatch) -> list[list[int]]:
    return [*map(add, batch.prompt_ids, batch.response_ids)]


@pytest.mark.parametrize(
    ("recipe", "words", "updates"),
    [
        ("tiny", (*SMALL, "eval.every=0"), 1),
        ("tiny-ppo", (*SMALL_PPO, "eval.every=0", "loop.mini_batches=11"), 9),
    ],
)
def test_answers_without_reward_are_left_out_of_every_update(
    recipe: str,
    words: tuple[str, ...],
    updates: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    no_pictures: None,
) -> None:
    """Score 9 of 32 answers: the second prompt has one, the first and the third have four each."""
    kept, batches = [0, 1, 2, 3, 5, 8, 9, 10, 11], list[SequenceBatch]()
    judge = submitting(
        lambda number: scored(
            reward=number / 10 if number in kept else None, fault="x" * (number > 30)
        )
    )
    monkeypatch.setattr(Rewards, "submit", judge)
    whole: list[Samples] = []
    update, generate = Trainer.update_actor, recipes.loops.loop.generate_sequences

    def spy(trainer: Trainer, batch: SequenceBatch) -> dict[str, float]:
        batches.append(batch)
        return update(trainer, batch)

    def spy_samples(*arguments: Any) -> Samples:
        whole.append(generate(*arguments))
        return whole[-1]

    monkeypatch.setattr(Trainer, "update_actor", spy)
    monkeypatch.setattr(recipes.loops.loop, "generate_sequences", spy_samples)
    start_run(recipe, [*words, "steps=1", "checkpoint.every=0"], tmp_path / "run")
    assert len(batches) == updates
    learnt = [ids for batch in batches for ids in sequences(batch)]
    assert sorted(learnt) == sorted(sequences(whole[0].select(kept).batch(1.0)))
    (row,) = rows(tmp_path / "run", "train")
    assert (row["unscored"], row["faults"]) == (23, 1)
    assert row["reward"] == pytest.approx(sum(kept) / 90)
    if recipe == "tiny":
        assert row["groups_without_signal"] == 6
        ordered = sorted(batches[0].advantages)
        assert ordered.pop(4) == 0.0, "it is alone in its group"
        assert ordered[::2] == pytest.approx(ordered[1::2])


@pytest.mark.parametrize("recipe", ["tiny", "tiny-ppo"])
def test_step_without_any_reward_ends_the_run_with_one_line(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_pictures: None
) -> None:
    monkeypatch.setattr(Rewards, "submit", submitting(lambda number: scored(reward=None)))
    small = SMALL if recipe == "tiny" else SMALL_PPO
    message = "compute_reward failed: none of the step's 32 answers got a reward: .*; start again"
    with pytest.raises(RunError, match=message):
        start_run(recipe, [*small, "eval.every=0"], tmp_path / "run")
