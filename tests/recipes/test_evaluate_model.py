"""Tests of `memsaver evaluate`: figures equal those of runs, refusals, interrupts."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from recipes import evaluate_model
from recipes.cli import main
from tests.helpers.recipes.models import save_byte_model
from tests.helpers.recipes.tiny_runs import SMALL, MakeRun, rows

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
    run = make_run("tiny", *SMALL, "steps=2", "eval.samples=3", "eval.temperature=1.0")
    last = rows(run, "eval")[-1]
    row = evaluated(run, "--out", tmp_path / "run")
    assert row == {key: last[key] for key in row} and row["step"] == 2 and "pass@2" in row
    export = run / "exports" / "step_2"
    again = evaluated(export, "--recipe", run / "recipe.yaml", "--out", tmp_path / "export")
    assert again == {**row, "step": 0}
    capsys.readouterr()
    assert main(["samples", str(tmp_path / "run"), "--json"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == row["problems"] * 3


def test_model_alone_answers_all_of_a_data_file_and_the_defaults_are_shown(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (model, "--data", data, "--reward", REWARD, "sampling.max_tokens=4", "device=cpu")
    row = evaluated(*words, "--out", tmp_path / "whole")
    assert row["problems"] == 9 and row["rewards"].keys() == {"by_place"}
    shown = capsys.readouterr().out
    for part in ("sums (9)", "greedy", "at most 4 tokens", "the chat template", "native engine"):
        assert part in shown
    few = evaluated(*words, "--limit", 2, "--out", tmp_path / "few")
    assert few["problems"] == 2 and few["rewards"].keys() == row["rewards"].keys()


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
    assert "evaluation: 1 problems have no answer yet" in printed.err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["{folder}"], "is neither a recipe, nor the folder of a run or of a model"),
        (["smolm2-135m"], "did you mean smollm2-135m"),
        (["tiny"], "its model has random weights"),
        (["{model}"], "a model alone has no problems to answer; give --data FILE"),
        (["{model}", "--reward", "math"], "--reward: names functions for the file of --data"),
        (["{model}", "--step", "1"], "--step: .* holds no run; name a run"),
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
