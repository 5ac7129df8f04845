"""Finished runs that are continued, and runs during which the system's clock is set back."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.logs.checkpoints import Checkpoints
from recipes.loops.evaluation import standing
from recipes.run import continue_run, start_run
from tests.helpers.recipes.fake_sides import fake_runs
from tests.helpers.recipes.tiny_runs import rows, trace, without_clock, without_pictures

WORDS = ["loop.prompts_per_step=8", "loop.samples_per_prompt=2", "samples=4", "checkpoint.keep=1"]


@pytest.fixture(scope="module", autouse=True)
def fakes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with fake_runs(tmp_path_factory.mktemp("model")), without_pictures():
        yield


@settings(max_examples=12)
@given(
    every=st.tuples(st.integers(1, 4), st.integers(0, 4)),
    steps=st.integers(1, 9),
    more=st.integers(1, 4),
    saved=st.integers(1, 4),
)
def test_continued_run_keeps_rows_samples_and_best_checkpoint(
    every: tuple[int, int], steps: int, more: int, saved: int
) -> None:
    with tempfile.TemporaryDirectory() as parent:
        path = Path(parent, "run")
        words = [*WORDS, f"eval.every={every[0]}", f"checkpoint.every={saved}", f"steps={steps}"]
        start_run("tiny", words, path)
        first, samples = rows(path), sample_places(path)
        continue_run(path, None, [f"eval.every={every[1]}", f"steps={steps + more}"])
        assert without_clock(rows(path)[: len(first)]) == without_clock(first)
        assert sample_places(path)[: len(samples)] == samples
        evaluated = [row["step"] for row in rows(path, "eval")]
        assert len(evaluated) == len({*evaluated})
        best = standing(rows(path, "eval"), "correct")
        kept = Checkpoints(path).best()
        assert best and (kept is None if best.step == 0 else kept and kept.is_dir())
        assert kept is None or kept.name == f"step_{best.step}"


def sample_places(path: Path) -> list[tuple[str, int, int]]:
    lines = map(json.loads, (path / "samples.jsonl").read_text().splitlines())
    return [(sample["kind"], sample["step"], sample["group"]) for sample in lines]


def test_clock_that_is_set_back_leaves_all_seconds_positive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, clock = time.monotonic(), time.time
    monkeypatch.setattr(time, "time", lambda: clock() - 3600 * (time.monotonic() - started))
    path = start_run("tiny", [*WORDS, "steps=2"], tmp_path / "run")
    for row in rows(path, "train"):
        seconds = [row["step_seconds"], row["hidden_seconds"], *row["stages"].values()]
        assert min(seconds) >= 0 and sum(row["stages"].values()) <= row["step_seconds"]
    spans = [event for event in trace(path) if event["ph"] == "X"]
    assert spans and min(event["dur"] for event in spans) >= 0
