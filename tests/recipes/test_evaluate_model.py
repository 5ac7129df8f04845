"""Tests of `memsaver evaluate`: figures equal those of runs, refusals, interrupts."""

from __future__ import annotations

import errno
import json
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from recipes import evaluate_model
from recipes.cli import main
from recipes.logs.run_folder import newest_run
from tests.helpers.recipes.models import save_byte_model
from tests.helpers.recipes.tiny_runs import SMALL, MakeRun, rows

SMALL_MODEL = ("sampling.max_tokens=4", "device=cpu")
REWARD = "tests.helpers.recipes.reward_functions:by_place"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "sums.jsonl"
    lines = [{"prompt": f"{n} + {n} =", "answer": str(2 * n)} for n in range(9)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def evaluated(*words: object) -> dict[str, Any]:
    """Evaluate with an `--out` among the words, and return the row."""
    assert main(["evaluate", *map(str, words)]) == 0
    (row,) = rows(Path(str(words[words.index("--out") + 1])))
    return row


def test_run_and_its_export_get_the_row_of_the_runs_last_evaluation(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = "model.config.vocab_size=300"  # Most ids are not the tokenizer's.
    run = make_run("tiny", *SMALL, wide, "steps=2", "eval.samples=3", "eval.temperature=1.0")
    last = rows(run, "eval")[-1]
    row = evaluated(run, "--out", tmp_path / "run")
    assert row == {key: last[key] for key in row} and row["step"] == 2 and "pass@2" in row
    export = run / "exports" / "step_2"
    again = evaluated(export, "--recipe", run / "recipe.yaml", "--out", tmp_path / "export")
    assert again == {**row, "step": 0}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        Path("runs").mkdir()
        shutil.copytree(run, "runs/own")
        (tmp_path / "run").rename("runs/later")
        assert newest_run() == Path("runs/own")
    capsys.readouterr()
    assert main(["samples", str(tmp_path / "runs/later"), "--json"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == row["problems"] * 3


def test_model_alone_answers_all_of_a_data_file_and_the_defaults_are_shown(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (model, "--data", data, "--reward", REWARD, "sampling.max_tokens=4", "device=cpu")
    row = evaluated(*words, "--out", tmp_path / "whole")
    assert row["problems"] == 9 and row["rewards"].keys() == {"by_place"}
    shown = capsys.readouterr().out
    for part in (
        "sums (9 held out)",
        "greedy",
        "at most 4 tokens",
        "the chat template",
        "native engine",
    ):
        assert part in shown
    few = evaluated(*words, "--limit", 2, "--out", tmp_path / "few")
    assert few["problems"] == 2 and few["rewards"].keys() == row["rewards"].keys()


def test_data_file_needs_no_set_of_the_runs_recipe(data: Path, model: Path, tmp_path: Path) -> None:
    """Evaluate on the training file itself, under its name, then after it has gone."""
    recipe = tmp_path / "own.yaml"
    task = f"{{name: file, data: {data}, max_prompt_tokens: 99, held_out_fraction: 0.5}}"
    recipe.write_text(f"model: {{path: {model}}}\ntask: {task}\nsteps: 1\n")
    words = (model, "--recipe", recipe, *SMALL_MODEL)
    assert evaluated(*words, "--data", data, "--out", tmp_path / "same")["problems"] == 9
    moved = data.rename(tmp_path / "moved.jsonl")
    assert evaluated(*words, "--data", moved, "--out", tmp_path / "gone")["problems"] == 9
    renamed = moved.read_text().replace('"prompt"', '"question"')
    moved.write_text(renamed)
    column = "eval.sets[0].prompt_column=question"
    row = evaluated(*words, "--data", moved, column, "--out", tmp_path / "column")
    assert row["problems"] == 9


def test_figures_are_shown_although_they_cannot_be_written(
    model: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(evaluate_model, "replace_text", full)
    words = [model, "--data", data, *SMALL_MODEL, "--out", tmp_path / "out"]
    assert main(["evaluate", *map(str, words)]) == 1
    printed = capsys.readouterr()
    assert "problems 9" in printed.out
    assert re.search("No space left on device; the figures are above", printed.err)


def test_rewards_that_all_fail_and_engines_that_do_not_start_are_told_on_one_line(
    model: Path, data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["evaluate", *map(str, (model, "--data", data, *SMALL_MODEL))]
    monkeypatch.setattr(evaluate_model, "rewarded", lambda scores: [])
    assert main(words) == 1
    assert "no answer got a reward" in capsys.readouterr().err

    def broken(*arguments: Any) -> Any:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(evaluate_model, "build_engine", broken)
    assert main(words) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "memsaver: build_engine failed: RuntimeError: no kernel image"


def test_interrupted_evaluation_keeps_the_answers_until_then_and_says_that_they_are_partial(
    model: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls = []

    def interrupted(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return answer_held_out(*arguments)

    answer_held_out = evaluate_model.answer_held_out
    monkeypatch.setattr(evaluate_model, "answer_held_out", interrupted)
    out, small = tmp_path / "out", ("sampling.max_tokens=4", "engine.max_running=1", "device=cpu")
    words = [model, "--data", data, *small, "--out", out]
    assert main(["evaluate", *map(str, words)]) == 128 + signal.SIGINT
    (row,) = rows(out)
    assert row["partial"] and row["problems"] == 8
    printed = capsys.readouterr()
    assert "4 of 9 problems answered" in printed.out and "interrupted; partial: " in printed.out
    assert "evaluation: no answer yet to 1 problem;" in printed.err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["{folder}"], "is neither a recipe, nor the folder of a run or of a model"),
        (["smolm2-135m"], "did you mean smollm2-135m"),
        (["tiny"], "its model has random weights"),
        (["{model}"], "a model alone has no problems to answer; give --data FILE"),
        (["{model}", "--reward", "math"], "--reward: names functions for the file of --data"),
        (["{model}", "--step", "1"], "--step: .* holds no run; name a run"),
        (["{model}", "--data", "{data}", "steps=3"], "steps=3: has no effect on an evaluation"),
        (["{model}", "--data", "{data}", "engine.tensor_parallel_size=2"], "runs on one device"),
        (["{model}", "--data", "{data}", "model.path=x"], "model.path=x: the model to evaluate is"),
        (["{model}", "--data", "{data}", "eval.sets=[]"], "--data: replaces eval.sets"),
        (["{folder}/tiny"], "is neither a recipe"),
        (["tiny", "--recipe", "tiny"], "--recipe: tiny is a recipe itself"),
        (["{model}", "--data", "{folder}/none.jsonl"], "none.jsonl"),
        (["{model}", "--data", "{data}", "--reward", "{folder}/no.py:f"], "no.py"),
        (["{model}", "--data", "{data}", "--out", "{folder}"], "is not empty; name a new folder"),
    ],
)
def test_refusal_is_one_line_and_writes_nothing(
    words: list[str],
    why: str,
    model: Path,
    data: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    named = {"folder": data.parent, "model": model, "data": data}
    before = sorted(data.parent.rglob("*"))
    assert main(["evaluate", *(word.format(**named) for word in words)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(why, line) and sorted(data.parent.rglob("*")) == before
