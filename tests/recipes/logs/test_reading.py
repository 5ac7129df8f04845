"""What is read of a run's folder, whole or broken, and what is said to be missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipes.logs.history import read_run
from recipes.logs.report_page import render_page
from tests.helpers.recipes.folders import MIB, eval_row, make_run, train_row

TAGS = ("params", "optim")  # of the trainer
PLAN = {"stages": [{"stage": "update_actor", "device_bytes": {"trainer": 5}}]}


def test_a_whole_run_is_read_with_the_times_and_bytes_of_its_trace(tmp_path: Path) -> None:
    whole = read_run(make_run(tmp_path / "whole", plan=PLAN))
    assert whole.gaps == [] and whole.plan == PLAN
    assert [row["step"] for row in whole.train] == [1, 2, 3, 4, 5, 6]
    assert [row["exact_match"] for row in whole.evaluations] == [0.125, 0.75]
    assert whole.recipe["steps"] == 6 and "kv_tokens" in whole.recipe_text
    assert whole.environments[0]["cpus"] >= 1 and "torch" in whole.environments[0]["packages"]
    assert whole.end == pytest.approx(7.0)
    assert ("step 1", pytest.approx(1.0), pytest.approx(2.0)) in whole.spans
    first = whole.events["trainer"][0]
    assert (first.op, first.tag) == ("pause", "optim")
    assert (first.committed_bytes, first.backup_bytes) == (0, 8 * MIB)
    assert first.time == pytest.approx(1.01) and first.seconds == pytest.approx(0.001)


def test_a_killed_run_says_what_it_left_out(tmp_path: Path) -> None:
    path = make_run(tmp_path / "killed", steps=3, trace=False)
    lines = (path / "metrics.jsonl").read_text().splitlines()
    (path / "metrics.jsonl").write_text("\n".join(lines[:3]) + '\n{"kind": "tra')
    (path / "environment.json").unlink()
    run = read_run(path)
    assert [row["step"] for row in run.train] == [1, 2]
    assert run.spans == [] and run.events == {} and run.end == 0.0
    said = "\n".join(run.gaps)
    for words in (
        "1 of 4 lines are not whole",
        "after step 2 of 3",
        "trace.json is missing",
        "environment.json is",
    ):
        assert words in said


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("recipe.yaml", "steps: [1", "recipe.yaml cannot be read"),
        ("recipe.yaml", None, "recipe.yaml is missing"),
        ("trace.json", '{"traceEvents": [{"ph": "X"', "trace.json cannot be read"),
        ("trace.json", "[]", "trace.json cannot be read"),
        ("trace.json", '{"traceEvents": [{"ph": "X", "pid": 9}]}', "trace.json cannot be read"),
        ("environment.json", "{", "environment.json cannot be read"),
        ("plan.json", "?", "plan.json cannot be read"),
        ("metrics.jsonl", None, "metrics.jsonl is missing"),
        ("metrics.jsonl", '5\n{"kind": "train"}\nnull\n', "3 of 3 lines"),
    ],
)
def test_a_broken_file_is_a_gap_and_the_others_are_read(
    tmp_path: Path, name: str, content: str | None, words: list[str]
) -> None:
    path = make_run(tmp_path / "run", steps=1)
    if content is None:
        (path / name).unlink()
    else:
        (path / name).write_text(content)
    run = read_run(path)
    assert any(words in gap for gap in run.gaps), run.gaps
    assert (len(run.rows) == 3) == (name != "metrics.jsonl")
    assert bool(run.spans) == (name != "trace.json")


def test_sessions_of_a_resumed_run_stand_one_behind_the_other(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", steps=2)
    trace = (path / "trace.json").read_text()
    (path / "trace-until-step-9-1.json").write_text(trace)
    (path / "trace-until-step-10-1.json").write_text(trace)
    run = read_run(path)
    assert run.breaks == [pytest.approx(3.0), pytest.approx(6.0)]
    assert [round(start) for name, start, _ in run.spans if name == "step 2"] == [2, 5, 8]
    ended = [event for event in run.events["trainer"] if event.op == "end"]
    assert {(round(event.time), event.tag) for event in ended} == {
        (t, tag) for t in (3, 6) for tag in TAGS
    }
    assert {event.committed_bytes for event in ended} == {0}


@pytest.mark.parametrize("odd", [None, "text", [], {"a": None}, True, [[1]]])
def test_figures_of_another_type_are_left_out(odd: object, tmp_path: Path) -> None:
    """Of each key of both kinds of row, and of what stands in a table; the page is written."""
    peaks = {"update_actor": {"processes": {"trainer": 4}, "device_bytes": 5, "tags": {}}}
    row = train_row(1, peaks=peaks)
    rows = [row | {key: odd} for key in row if key not in ("kind", "step")]
    rows += [
        row | {key: {**row[key], "update_actor": odd}} for key in ("stages", "memory", "peaks")
    ]
    rows += [
        eval_row(1, 0.5, also_trained=[]) | {key: odd}
        for key in ("exact_match", "problems", "also_trained")
    ]
    text = "\n".join(map(json.dumps, [row, *rows]))
    (tmp_path / "metrics.jsonl").write_text(text)
    run = read_run(tmp_path)
    assert len(run.rows) == 1 + len(rows) and run.train[0] == row
    assert "reward" in render_page(run)
