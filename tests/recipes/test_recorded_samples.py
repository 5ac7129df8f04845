"""Samples: which answers a row records, their file, and the command that prints them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import recipes
from recipes.cli import main
from recipes.logs.metric_rows import whole_rows
from recipes.logs.monitor import Monitor
from recipes.logs.recorded_samples import FAULTY, read_samples, records_of
from recipes.logs.run_folder import RunFolder
from recipes.logs.view import View
from recipes.loops.sampling import Samples
from recipes.rewards import Scored
from recipes.tasks import Problem
from tests.helpers.recipes.run_folders import eval_row, train_row
from tests.helpers.recipes.scored_answers import scored
from tests.helpers.recipes.whole_saves import save
from trainer_bridge.learning import Tokens

TRAIN, EVAL = {"kind": "train", "step": 3}, {"kind": "eval", "step": 3}


def answers(*sets: str, size: int = 2, faulty: tuple[int, ...] = ()) -> tuple[Any, list[Scored]]:
    """Return groups of `size` answers, one of each named set, and their scores."""
    problems = [Problem(prompt=f"problem {n}", answer=str(n)) for n in range(len(sets))]
    places = [n for n in range(len(sets)) for _ in range(size)]
    named: list[Any] = [SimpleNamespace(name=sets[n]) for n in places]
    samples = Samples(
        tasks=named,
        prompt_ids=[[1] for _ in places],
        logprobs=Tokens.of([[0.0] * (k + 1) for k in range(len(places))]),
        problems=[problems[n] for n in places],
        texts=[f"answer {k}" for k in range(len(places))],
        ended=[k % 2 == 0 for k in range(len(places))],
        response_ids=[[7] * (k + 1) for k in range(len(places))],
        weight_versions=Tokens.of([[4] + [5] * k for k in range(len(places))], int),
    )
    scores = [
        scored(reward=None, fault="raised KeyError: 'x' (mine.py:3)")
        if place in faulty
        else scored(reward=place / 10, correct=place == 1, figures={"length": -0.5})
        for place in range(len(places))
    ]
    return samples, scores


def test_record_has_the_whole_answer_and_its_score() -> None:
    samples, scores = answers("sums", faulty=(0,))
    first, second = records_of([(samples, scores)], EVAL, 16)
    assert first["fault"].startswith("raised KeyError") and first["reward"] is None
    assert second == {
        "kind": "eval", "step": 3, "set": "sums", "group": 0, "prompt": "problem 0",
        "answer": "0", "completion": "answer 1", "reward": 0.1, "correct": True,
        "figures": {"length": -0.5}, "fault": "", "finish_reason": "length", "tokens": 2,
        "weight_versions": [[4, 1], [5, 1]],
    }  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from("abcd"), min_size=1, max_size=12),
    st.integers(1, 5),
    st.integers(0, 20),
    st.integers(1, 9),
)
def test_whole_groups_of_all_sets_are_recorded_within_the_limit(
    sets: list[str], size: int, limit: int, step: int
) -> None:
    batch = answers(*sets, size=size)
    records = records_of([batch], {"kind": "train", "step": step}, limit)
    if not limit:
        assert records == []
        return
    groups = Counter(record["group"] for record in records)
    assert 0 < len(records) <= limit
    assert set(groups.values()) == {min(size, limit)}
    fitting = max(1, limit // size)
    assert len(groups) == min(fitting, len(sets))
    names = {record["set"] for record in records}
    assert len(names) == min(len(set(sets)), len(groups))
    assert [record["group"] for record in records] == sorted(groups.elements())


def test_every_set_appears_over_the_steps_and_evaluations_take_the_same_problems() -> None:
    batch = answers("a", "b", "c", size=4)

    def recorded(kind: str, step: int) -> list[str]:
        return [record["set"] for record in records_of([batch], {"kind": kind, "step": step}, 4)]

    assert [recorded("train", step)[0] for step in range(4)] == ["a", "b", "c", "a"]
    assert recorded("eval", 0) == recorded("eval", 1) == ["a"] * 4


def test_faulty_answers_are_recorded_beyond_the_limit_up_to_a_number() -> None:
    batch = answers(*"ab", size=40, faulty=tuple(range(50, 80)))
    records = records_of([batch], TRAIN, 8)
    assert [bool(record["fault"]) for record in records].count(True) == FAULTY
    assert [bool(record["fault"]) for record in records].count(False) == 8
    assert records_of([batch], TRAIN, 0) == []


# ---------------------------------------------------------------- the file


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Build a run of three steps with evaluations, a chat and hostile text among its answers."""
    folder = RunFolder.create(tmp_path / "run", recipes.load("tiny"))
    monitor = Monitor(folder, View(), samples=6)
    for row in (eval_row(0, 0.0), train_row(1), train_row(2), eval_row(2, 0.5), train_row(3)):
        samples, scores = answers("sums", "words", "words", faulty=(2,))
        samples.problems[0:2] = [Problem(prompt=({"role": "user", "content": "2 + 2"},))] * 2
        samples.texts[1] = "<b>bold</b> \x1b[31mred\u202e |\n" + "long " * 500
        monitor.answered(samples, scores)
        monitor.row(row)
    return folder


def keys(rows: list[dict[str, Any]]) -> Counter[tuple[str, int]]:
    return Counter((row["kind"], row["step"]) for row in rows)


def test_resume_leaves_samples_of_exactly_the_rows_that_stay(folder: RunFolder) -> None:
    file = folder.path / "samples.jsonl"
    assert set(keys(whole_rows(file)).values()) == {6}
    with file.open("a") as stream:
        stream.write('{"kind": "train", "step": 4')  # killed while writing the samples of step 4
    save(folder.checkpoints, 2, 1, Path.mkdir)
    again = RunFolder.reopen(folder.path, recipes.load("tiny"))
    assert set(keys(again.rows())) == set(keys(whole_rows(file)))
    kept = [("eval", 0), ("train", 1), ("train", 2), ("eval", 2)]  # of the checkpoint's weights
    assert keys(read_samples(folder.path)) == dict.fromkeys(kept, 6)


def test_samples_whose_row_a_killed_run_did_not_write_are_not_read(folder: RunFolder) -> None:
    before = read_samples(folder.path)
    with (folder.path / "samples.jsonl").open("a") as file:
        file.write(json.dumps({**before[0], "kind": "train", "step": 4}) + "\n")
    assert read_samples(folder.path) == before


# ---------------------------------------------------------------- the command


@pytest.fixture
def shown(
    folder: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    monkeypatch.setenv("COLUMNS", "80")

    def show(*words: str, status: int = 0) -> str:
        assert main(["samples", str(folder.path), *words]) == status
        captured = capsys.readouterr()
        return captured.err if status else captured.out

    yield show


def test_newest_answers_are_printed_plainly_and_safely(shown: Any) -> None:
    text = shown()
    lines = text.splitlines()
    assert lines[0] == "train 3 | sums | reward 0 | length -0.5 | 1 tokens, stop"
    assert [line.split()[0] for line in lines[1:3]] == ["prompt", "answer"]
    assert "user: 2 + 2" in lines[1] and max(map(len, lines)) <= 80
    assert "\\x1b[31mred\\u202e |" in text and "\x1b" not in text
    assert "more characters" in text and "fault" in text
    assert lines[-1].startswith("2 further samples of this row; --count 0 shows all")
    assert "further" not in shown("--count", "0") and shown("--count", "0").count("train 3 |") == 6


def test_options_choose_row_set_and_order(shown: Any) -> None:
    def records(*words: str) -> list[dict[str, Any]]:
        return list(map(json.loads, shown("--json", *words).splitlines()))

    assert keys(records()) == {("train", 3): 6} and keys(records("--count", "2")) == {
        ("train", 3): 2
    }
    assert [record["group"] for record in records("--count", "0")] == [0, 0, 1, 1, 2, 2]
    assert [record["group"] for record in records("--count", "4")] == [0, 1, 2, 0]
    for words in (["--best", "0"], ["--count", "-1"], ["--best", "1", "--worst", "1"]):
        with pytest.raises(SystemExit, match="2"):
            records(*words)
    assert keys(records("--kind", "eval")) == {("eval", 2): 6}
    assert keys(records("--step", "2")) == {("train", 2): 6, ("eval", 2): 6}
    assert {record["set"] for record in records("--set", "words")} == {"words"}
    assert [record["reward"] for record in records("--best", "2")] == [0.5, 0.4]
    assert [record["reward"] for record in records("--worst", "2")] == [None, 0.0]
    assert len(records()[1]["completion"]) > 2500


def test_request_without_samples_fails_in_one_line_with_status_2(
    shown: Any, folder: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = "there are kind=eval of steps 0 to 2 and kind=train of steps 1 to 3, of sums, words\n"
    for words, asked in {("--step", "9"): "step=9", ("--set", "x"): "set=x"}.items():
        line = shown(*words, status=2)
        assert line == f"memsaver: samples {folder.path}: no sample with {asked}; {there}"
    (folder.path / "samples.jsonl").unlink()
    assert "no sample is recorded yet; a run with samples=16 records" in shown(status=2)
    assert main(["samples", str(tmp_path)]) == 2
    assert "holds no run (no metrics.jsonl)" in capsys.readouterr().err
