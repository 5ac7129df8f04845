"""Dynamic sampling: which groups a step takes, and runs with further generations."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import recipes
from memsaver.ops.hash import hash_text
from recipes.config.load import load
from recipes.errors import ScorerError
from recipes.logs.report_page import write_report
from recipes.loops.rounds import sample_groups
from recipes.loops.sampling import Samples
from recipes.rewards import Answer, Scored
from recipes.rewards.rewards import Rewards
from recipes.run import continue_run, start_run
from recipes.tasks import Problem, Task
from recipes.tasks.schedule import pick_problems
from recipes.tasks.task_sources import make_tasks
from tests.helpers.recipes.scored_answers import scored
from tests.helpers.recipes.tiny_runs import SMALL, SMALL_PPO, rows, same_rows
from trainer_bridge.learning import Tokens

SET = Task(name="a", train=(), held_out=(), score=lambda *_: 0.0)
SIZE = 3  # answers of a group
Group = list[tuple[float | None, bool]]
"""Reward of each answer, and whether it ended."""
answers = st.tuples(st.sampled_from([None, 0.0, 0.0, 1.0]), st.sampled_from([True, True, False]))
groups = st.lists(answers, min_size=SIZE, max_size=SIZE)


def teaches(group: Group) -> bool:
    """Return whether two rewards differ, and an answer with a reward ended."""
    rewards = {reward for reward, _ in group} - {None}
    return len(rewards) > 1 and any(ended and reward is not None for reward, ended in group)


class FakeLoop:
    """Loop that samples a given group for the prompt at each place of a step.

    Attributes:
        asked: Places of each generation, and whether it was announced as the last one.
        notes: Lines that were shown.
    """

    def __init__(self, wanted: int, most: int, drawn: Sequence[Group], replays: bool) -> None:
        words = [f"loop.prompts_per_step={wanted}", f"loop.samples_per_prompt={SIZE}"]
        words += [f"grpo.sampling_rounds={most}", "loss.mask_cut_off=true"]
        self.setup = SimpleNamespace(recipe=recipes.load("tiny", words))
        self.asked = list[tuple[range, bool]]()
        self.notes = list[str]()
        self.sink = SimpleNamespace(note=self.notes.append)
        self.stage: Any = contextlib.nullcontext
        self._drawn = drawn
        self._replays = replays

    def sample(self, step: int, places: range, last: bool) -> tuple[Samples, Any]:
        self.asked.append((places, last))
        numbers = list(chain.from_iterable([place] * SIZE for place in places))
        group = [answer for place in places for answer in self._drawn[place]]
        scores = [scored(reward=reward) for reward, _ in group]
        samples = Samples(
            tasks=[SET] * len(numbers),
            problems=[Problem(prompt=str(number)) for number in numbers],
            prompt_ids=[[number] for number in numbers],
            response_ids=[[number, index % SIZE] for index, number in enumerate(numbers)],
            logprobs=Tokens.of([[0.0, 0.0]] * len(numbers)),
            texts=[""] * len(numbers),
            ended=[ended for _, ended in group],
            routed_experts=[None] * len(numbers) if self._replays else None,
        )
        return samples, lambda: scores


@given(st.data(), st.integers(1, 6), st.integers(2, 5), st.booleans())
def test_step_takes_the_first_groups_with_signal_in_order(
    data: st.DataObject, wanted: int, most: int, replays: bool
) -> None:
    """Compare with the first `wanted` groups with signal of the sequence, as far as it is sampled.

    The missing groups of a generation are the groups without signal of the one before. Answers that
    did not end are left out of updates.
    """
    drawn = data.draw(st.lists(groups, min_size=wanted * most, max_size=wanted * most))
    drawn[0][0] = 1.0, True  # Without any reward, the step fails.
    dead = [not teaches(group) for group in drawn]
    loop: Any = FakeLoop(wanted, most, drawn, replays)
    sampled = sample_groups(loop, 1)
    generations = [[*places] for places, _ in loop.asked]
    assert list(chain.from_iterable(generations)) == list(range(sum(map(len, generations))))
    sizes = [wanted, *(sum(dead[place] for place in places) for places in generations)]
    assert list(map(len, generations)) == sizes[:-1]
    assert len(generations) == most or sizes[-1] == 0
    assert [last for _, last in loop.asked] == [n == most for n in range(1, len(generations) + 1)]
    living = [place for place in range(len(drawn)) if not dead[place]][:wanted]
    expected = [place for place in living if place < sum(sizes[:-1])]
    samples, scoring = sampled.to_train_on()
    assert samples.response_ids == [[place, index] for place in expected for index in range(SIZE)]
    rewards = [reward for place in expected for reward, _ in drawn[place]]
    assert [score.reward for score in scoring()] == rewards
    assert (samples.routed_experts is None) != replays
    assert len(sampled.samples.texts) == len(sampled.scoring()) == SIZE * sum(sizes[:-1])
    assert sampled.figures == {
        "groups_sampled": sum(sizes[:-1]),
        "sampling_rounds": len(generations),
    }
    assert len(loop.notes) == (not expected)


def test_step_whose_generations_have_no_reward_fails() -> None:
    loop: Any = FakeLoop(2, 3, [[(None, True)] * SIZE] * 6, replays=False)
    with pytest.raises(ScorerError, match="none of the step's 18 answers got a reward"):
        sample_groups(loop, 1)


# ---------------------------------------------------------------- whole runs


def by_prompt(quiet: set[str]) -> Callable[..., Callable[[], list[Scored]]]:
    """Return a `Rewards.submit` by the answer's text; answers to `quiet` prompts get 0."""

    def reward(answer: Answer) -> float:
        return 0.0 if answer.prompt in quiet else hash_text(answer.text) % 997 / 997

    def submit(rewards: Any, answers: Sequence[Answer], **_: Any) -> Callable[[], list[Scored]]:
        return lambda: [scored(reward=reward(answer)) for answer in answers]

    return submit


def first_prompts(count: int, apart: int) -> set[Any]:
    """Return the first prompts of the recipe tiny."""
    tasks = make_tasks(load("tiny").task, [])
    return {problem.prompt for _, problem in pick_problems(tasks.trained, count, 0, 0, apart)}


def test_step_without_signal_is_skipped_and_a_resumed_run_repeats_the_whole(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    no_pictures: None,
) -> None:
    """Let the real sides train, where the prompts of the first step's two generations are quiet.

    The parameters return during a generation only if it is the last that the step may have.
    """
    monkeypatch.setattr(Rewards, "submit", by_prompt(first_prompts(4, 2)))
    words = ["loop.prompts_per_step=2", "loop.samples_per_prompt=4", "grpo.sampling_rounds=2"]
    words += ["eval.every=0", "checkpoint.every=1", "cycle.overlap=[params]", "samples=100"]
    start_run("tiny", [*words, "steps=3"], tmp_path / "straight")
    said = capsys.readouterr().out
    assert "step 1: no update: none of 4 groups of 2 generations has signal" in said
    first, second, third = rows(tmp_path / "straight", "train")
    assert not {"loss", "mismatch_mean", "entropy"} & first.keys() and third["loss"]
    assert first["groups_sampled"] == first["groups_without_signal"] == first["prompts_drawn"] == 4
    assert second["groups_sampled"] == 2 and second["prompts_drawn"] == 6
    assert [row["sampling_rounds"] for row in (first, second, third)] == [2, 1, 1]
    assert ["prefetch" in row["stages"] for row in (first, second)] == [True, False]
    write_report(tmp_path / "straight")
    start_run("tiny", [*words, "steps=1"], tmp_path / "resumed")
    continue_run(tmp_path / "resumed", None, ["steps=3"])
    assert same_rows(tmp_path / "straight", tmp_path / "resumed")


@pytest.mark.parametrize("recipe", ["tiny", "tiny-ppo"])
def test_length_penalty_lowers_rewards_of_training_but_not_of_evaluations(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_pictures: None
) -> None:
    """Give every answer the reward 1, so that only lengths make a difference."""

    def submit(rewards: Any, answers: Sequence[Answer], **_: Any) -> Callable[[], list[Scored]]:
        return lambda: [scored(reward=1.0, figures={"mine": 1.0})] * len(answers)

    monkeypatch.setattr(Rewards, "submit", submit)
    small = SMALL if recipe == "tiny" else SMALL_PPO
    words = [*small, "steps=1", "checkpoint.every=0", "checkpoint.export_every=null"]
    words += ["sampling.length_penalty=0.5", "sampling.length_penalty_tokens=2", "samples=100"]
    start_run(recipe, words, tmp_path / "run")
    most = load(recipe).sampling.max_tokens
    (row,) = rows(tmp_path / "run", "train")
    lines = map(json.loads, (tmp_path / "run" / "samples.jsonl").read_text().splitlines())
    samples = [sample for sample in lines if sample["kind"] == "train"]
    deductions = [0.25 * max(0, sample["tokens"] - most + 2) for sample in samples]
    assert len(samples) == 32 and 0 < len({*deductions}) <= 3
    assert [sample["reward"] for sample in samples] == [1 - cost for cost in deductions]
    assert row["rewards"]["mine"]["mean"] == 1
    assert row["rewards"]["sampling.length_penalty"]["mean"] == pytest.approx(sum(deductions) / 32)
    assert row["reward"] == pytest.approx(1 - sum(deductions) / 32)
    assert all(row["reward"] == 1 for row in rows(tmp_path / "run", "eval"))
    if recipe == "tiny":
        assert row["groups_without_signal"] == 8, "lengths are no signal"


def test_ten_steps_without_signal_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_pictures: None
) -> None:
    words = [*SMALL, "steps=11", "checkpoint.every=0", "checkpoint.export_every=null"]
    words += ["task.parameters.partial_credit=0.9", "eval.every=0"]
    (tmp_path / "same.py").write_text("def same(completion):\n    return 0.5\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        words += ["task.rewards=[same:same]", "task.workers=0"]
        start_run("tiny", words, tmp_path / "run")
    lines = [line for line in capsys.readouterr().out.splitlines() if "the same reward" in line]
    assert len(lines) == 1
    assert lines[0].startswith("step 10: for 10 steps, all answers to a prompt have had the same")
