"""Whole runs with environments: figures, records, resumes, corrections, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from recipes.config.load import load
from recipes.errors import RecipeError, RunError
from recipes.evaluate_model import Question, evaluate_model
from recipes.logs.recorded_samples import read_samples
from recipes.run import continue_run, start_run
from recipes.setup.preparation import prepare
from tests.helpers.recipes.tiny_runs import MakeRun, rows, same_rows

FEW = ("loop.prompts_per_step=6", "loop.samples_per_prompt=4", "loop.parallel_environments=4")
SHORT = (*FEW, "eval.problems=8", "eval.every=2", "samples=16")
WORLDS = "task.environment=tests.helpers.recipes.worlds"
JUDGE = "tests.helpers.recipes.worlds:by_calls"
TALKATIVE = (*SHORT, f"{WORLDS}:Friend", f"task.rewards={JUDGE}", "exact=true")


@pytest.fixture(scope="module")
def short(make_run: MakeRun) -> Path:
    """Run three steps in the trainer's order and rounding, in an environment that is talkative."""
    return make_run("guess", *TALKATIVE, "steps=3")


def test_the_trainer_scores_what_the_engine_sampled_bit_for_bit(short: Path) -> None:
    for row in rows(short, "train"):
        assert row["mismatch_max"] == 0.0
        assert 1 < row["turns"] <= 4
        assert row["tool_calls"] == row["tool_errors"] == 0
        assert row["environment_seconds"] > 0
        assert 0 < row["recomputed_tokens"] <= 15 * 24 * (row["turns"] - 1), "a part of a page"
        assert row["response_length_max"] <= 32
    assert {row["step"] for row in rows(short, "eval")} == {0, 2, 3}


def test_samples_have_every_message(short: Path) -> None:
    samples = read_samples(short)
    talks = [[message["role"] for message in sample["messages"]] for sample in samples]
    assert any(len(roles) > 1 for roles in talks)
    for sample, roles in zip(samples, talks, strict=True):
        assert roles == (["assistant", "user"] * len(roles))[: len(roles)]
        assert sample["completion"].startswith("assistant: ")
        numbers = sample["figures"]
        assert sample["reward"] == pytest.approx(numbers["Friend"] + numbers["by_calls"])
        thousandths = round(1000 * (numbers["by_calls"] - len(roles) / 10))
        assert thousandths % 1000 in range(1, 9), "the column number, after whole answers"


def test_a_resumed_run_repeats_the_conversations(
    short: Path, make_run: MakeRun, tmp_path: Path, no_pictures: None
) -> None:
    halves = tmp_path / "halves"
    shutil.copytree(make_run("guess", *TALKATIVE, "steps=2"), halves)
    continue_run(halves, None, ["steps=3"])
    assert same_rows(halves, short)


def test_an_evaluation_outside_of_the_run_is_that_of_the_run(short: Path) -> None:
    row = evaluate_model(str(short), Question())
    last = rows(short, "eval")[-1]
    assert {name: row[name] for name in last if name != "memory"}.items() >= {
        name: last[name] for name in ("correct", "reward", "length", "cut_off", "problems")
    }.items()


@pytest.mark.parametrize(
    "words",
    [
        ("algorithm=ppo", "loss.kl_coef=0.1"),
        ("correction.mode=decoupled", "grpo.baseline=batch", "grpo.scale=batch"),
        ("loss.kl_coef=0.1", "loss.kl_in=reward", "loop.epochs=2", "grpo.sampling_rounds=2"),
    ],
)
def test_masked_rows_pass_through_every_loop(words: tuple[str, ...], tmp_path: Path) -> None:
    always = [*SHORT, f"{WORLDS}:Friend", "eval.every=0", "steps=2"]
    start_run("guess", [*always, *words], tmp_path / "run")
    train = rows(tmp_path / "run", "train")
    assert len(train) == 2
    for row in train:
        assert row["mismatch_max"] < 1e-4, "fp32 on both sides, in other orders of sums"
        assert row.get("kl_to_reference", 0.0) >= 0 and row["grad_norm"] >= 0


def test_faults_of_environments_cost_rewards_and_end_a_run_without_any(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no answer has a reward: .*no score today"):
        start_run("guess", [*FEW, f"{WORLDS}:Unrewarding", "steps=1"], tmp_path / "run")


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ([f"{WORLDS}:Useless"], "task.environment=.*Useless: .*neither public methods"),
        ([f"{WORLDS}:Echo"], "task.environment=.*Echo: has no method get_reward"),
        ([f"{WORLDS}:World"], "the chat template refuses the prompt .*takes no tools"),
        (["task.environment={a: 'x:Y'}"], "the column environment of .* it must be one of a"),
        (["task.environment={}"], "task.environment=.*names no class"),
        (["task.environment=Guess"], "task.environment"),
        (["task.template=none"], "needs a chat template, and prompts are plain text"),
        (["task.parameters={largest: 1}"], "guess takes only largest, a number above 1"),
        (["loop.router_replay=true"], "exclude it"),
    ],
)
def test_recipes_that_cannot_converse_are_refused(
    words: list[str], refusal: str, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=refusal):
        prepare(load("guess", words), tmp_path)


def test_rows_of_a_file_need_no_answers(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"game {n}"}) + "\n" for n in range(20)))
    words = ["task.name=file", f"task.data={data}", "task.answer_column=null", f"{WORLDS}:Friend"]
    setup = prepare(load("guess", [*words, "loop.prompts_per_step=2"]), tmp_path)
    (task,) = setup.tasks.trained
    assert task.environment_of(task.train[0]) == "tests.helpers.recipes.worlds:Friend"
    assert setup.conversations is not None
