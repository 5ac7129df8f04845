"""The run folder: rows that survive a kill, checkpoints that are whole or absent, a trace and pictures that open."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from matplotlib import pyplot

import recipes
from memsaver import Event
from recipes import environment
from recipes.config import Recipe
from recipes.plots import draw_reward, evaluations_panel
from recipes.run_folder import RunFolder

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def recipe():
    return recipes.load("tiny")


@pytest.fixture
def folder(tmp_path: Path, recipe: Recipe):
    return RunFolder.create(tmp_path / "run", recipe)


def train_row(step: int, reward: float = 0.5):
    gaps = {"gap_mean": 1e-6, "gap_max": 1e-5}
    return {"kind": "train", "step": step, "reward": reward, "exact_match": reward, **gaps}


def event(time: float, tag: str, committed: int, backup: int = 0, op: str = "resume"):
    return Event(time=time, seconds=0.01, op=op, tag=tag, committed_bytes=committed, backup_bytes=backup)


def fill(path: Path):
    path.mkdir()
    (path / "state").write_text("x")


def test_a_used_folder_is_refused(folder: RunFolder, recipe: Recipe) -> None:
    with pytest.raises(recipes.RecipeError, match="--resume"):
        RunFolder.create(folder.path, recipe)


def test_a_folder_that_ray_deletes_is_refused(tmp_path: Path, recipe: Recipe) -> None:
    inside = tmp_path / "working_dir_files" / "_ray_pkg_0123456789abcdef" / "runs" / "tiny"
    with pytest.raises(recipes.RecipeError, match="working_dir, which Ray deletes; give a folder on shared storage"):
        RunFolder.create(inside, recipe)
    assert not inside.exists()


def test_rows_are_on_disk_as_soon_as_they_are_added(folder: RunFolder) -> None:
    folder.add_row(train_row(1))
    assert json.loads((folder.path / "metrics.jsonl").read_text()) == train_row(1)


def test_the_latest_checkpoint_is_one_that_was_written(folder: RunFolder) -> None:
    with pytest.raises(recipes.RecipeError, match="no checkpoint"):
        folder.last_checkpoint()
    folder.save_checkpoint(2, 1, fill)

    def fail(path: Path):
        path.with_name(path.name + ".partial").mkdir()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        folder.save_checkpoint(4, 1, fail)
    assert folder.last_checkpoint().name == "step_2"
    assert (folder.last_checkpoint() / "state").read_text() == "x"
    folder.save_checkpoint(6, 1, fill)  # what the failed one left behind is in nobody's way
    assert folder.last_checkpoint_step() == 6


def test_the_newest_checkpoints_stay(folder: RunFolder) -> None:
    for step in (2, 4, 10, 12):
        folder.save_checkpoint(step, 2, fill)
    names = {path.name for path in (folder.path / "checkpoints").iterdir()}
    assert names == {"step_10", "step_12", "latest"}
    assert folder.last_checkpoint_step() == 12


def test_reopening_drops_what_the_checkpoint_does_not_know(folder: RunFolder, recipe: Recipe) -> None:
    rows = [{"kind": "eval", "step": 0}, train_row(1), train_row(2), {"kind": "eval", "step": 2}, train_row(3)]
    for row in rows:
        folder.add_row(row)
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "tra')  # killed while writing
    folder.save_checkpoint(2, 1, fill)
    (folder.path / "trace.json").write_text("old")
    again = RunFolder.reopen(folder.path, recipe)
    assert again.rows == rows[:3]
    lines = (folder.path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == rows[:3]
    assert (folder.path / "trace-until-step-2-1.json").read_text() == "old"


def test_reopening_before_the_first_checkpoint_drops_everything(folder: RunFolder, recipe: Recipe) -> None:
    for row in ({"kind": "eval", "step": 0}, train_row(1)):
        folder.add_row(row)
    again = RunFolder.reopen(folder.path, recipe)
    assert again.rows == [] and (folder.path / "metrics.jsonl").read_text() == ""


def test_trace_and_pictures(folder: RunFolder) -> None:
    for step in (1, 2):
        folder.add_row(train_row(step))
        start = 100.0 + step
        for offset, name in enumerate(["park_optim", "generate_sequences", "update_actor"]):
            folder.add_span(name, start + offset * 0.3, start + offset * 0.3 + 0.3)
        folder.add_span(f"step {step}", start, start + 0.9)
    folder.add_row({"kind": "eval", "step": 2, "exact_match": 0.5, "problems": 4})
    folder.add_events("trainer", [event(101.1, "params", 2**20), event(102.1, "params", 0, 2**20, "pause")])
    folder.add_events("rollout", [event(102.2, "weights", 2**21), event(102.3, "something_new", 2**19)])
    folder.write_trace()
    assert folder.write_pictures() is None
    trace = json.loads((folder.path / "trace.json").read_text())["traceEvents"]
    spans = {entry["name"] for entry in trace if entry["ph"] == "X"}
    assert {"step 1", "update_actor", "pause params", "resume weights"} <= spans
    counters = [entry for entry in trace if entry["ph"] == "C" and entry["name"] == "params"]
    assert [entry["args"]["committed"] for entry in counters] == [2**20, 0]
    for name in ("reward.png", "memory.png"):
        data = (folder.path / name).read_bytes()
        assert data.startswith(PNG) and len(data) > 10_000


def test_every_kind_of_evaluation_has_a_curve(folder: RunFolder) -> None:
    """Also where only the later session of a run evaluated that kind."""
    rows = [{"kind": "eval", "step": 0, "exact_match": 0.25, "problems": 4}, train_row(1)]
    rows += [{"kind": "eval", "step": 1, "exact_match": 0.5, "exact_match_2_digits": 0.125, "problems": 4}]
    figure, axes = pyplot.subplots()
    try:
        evaluations_panel(axes, [row for row in rows if row["kind"] == "eval"])
        curves = {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}
    finally:
        pyplot.close(figure)
    assert curves == {
        "held-out exact match, greedy": [[0, 0.25], [1, 0.5]],
        "2 digits, never trained on, greedy": [[1, 0.125]],
    }
    draw_reward(rows, folder.path / "reward.png")
    assert (folder.path / "reward.png").read_bytes().startswith(PNG)


def test_a_run_that_failed_early_still_gets_its_trace(folder: RunFolder) -> None:
    folder.add_span("build", 1.0, 2.0)
    folder.write_trace()
    assert folder.write_pictures() is None
    assert (folder.path / "memory.png").stat().st_size > 5_000
    assert not (folder.path / "reward.png").exists()


def test_a_run_that_did_nothing_has_an_empty_trace(folder: RunFolder) -> None:
    folder.write_trace()
    assert folder.write_pictures() is None
    assert json.loads((folder.path / "trace.json").read_text())["traceEvents"] == []


def test_missing_matplotlib_is_a_sentence(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "recipes.plots", None)
    monkeypatch.delattr(recipes, "plots", raising=False)
    assert "pip install 'memsaver[plots]'" in folder.write_pictures()


def test_where_a_session_ran_is_recorded_and_kept_over_a_resume(
    folder: RunFolder, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = json.loads((folder.path / "environment.json").read_text())
    assert found["cpus"] >= 1 and found["packages"]["torch"] == torch.__version__
    folder.save_checkpoint(2, 1, fill)
    listed = "NVIDIA H100 80GB HBM3, 81559 MiB, 580.95.05\n"
    monkeypatch.setattr(
        environment.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0, listed)
    )
    RunFolder.reopen(folder.path, recipe)
    gpu = {"name": "NVIDIA H100 80GB HBM3", "memory": "81559 MiB", "driver": "580.95.05"}
    assert json.loads((folder.path / "environment.json").read_text())["gpus"] == [gpu]
    assert json.loads((folder.path / "environment-until-step-2-1.json").read_text()) == found
