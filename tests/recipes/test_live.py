"""What a run shows: lines in a pipe, a panel in a terminal."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from recipes.logs.history import Run
from recipes.logs.monitor import LiveView, LogView, describe, sparkline, time_left
from tests.helpers.recipes.folders import eval_row, train_row

ROW = train_row(3)


def test_sparkline_rises_with_its_values_and_stays_in_range() -> None:
    line = sparkline([0.0, 0.25, 0.5, 0.75, 1.0])
    assert list(line) == sorted(line) and (line[0], line[-1]) == ("▁", "█")
    assert sparkline([]) == "" and len(sparkline([0.5] * 100, width=10)) == 10
    assert sparkline([-3.0, 5.0]) == "▁█"


def test_a_step_and_an_evaluation_are_one_line_each() -> None:
    models = {"kl_to_reference": 0.0123, "value_explained_variance": 0.5}
    assert "| kl 0.012 | critic explains 0.5 | length" in describe({**ROW, **models})
    signal = {"reward_std": 0.25, "groups_without_signal": 7}
    assert "reward 0.300 ± 0.250 | 7 groups without signal | exact" in describe({**ROW, **signal})
    line = describe(ROW)
    for word in ("reward 0.300", "exact 0.150", "1.0e-06", "1.0e-05", "400 tok/s", "switch 0.14 s"):
        assert word in line
    assert "\n" not in line
    evaluated = eval_row(2, 0.5, exact_match_2_digits=0.125, exact_match_3_digits=0.0)
    expected = "held-out exact match 0.500 of 16, 2 digits 0.125, 3 digits 0.000 after 2 updates"
    assert describe(evaluated) == expected
    told = describe({**evaluated, "also_trained": ["2_digits"]})
    assert "2 digits 0.125, 3 digits (untrained) 0.000" in told


def test_the_log_has_a_line_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    view = LogView(steps=9)
    view.stage("generate_sequences")
    view.memory({"weights": (1, 2)})
    view.row(ROW)
    view.row(eval_row(2, 0.5))
    view.close()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("step 3/9: reward 0.300") and lines[0].endswith(
        "400 tok/s | 1.0 s | switch 0.14 s | ETA 0:00:06"
    )
    assert "held-out exact match 0.500 of 16 after 2 updates" in lines[1]


def test_the_time_left_follows_the_last_ten_steps() -> None:
    run = Run(rows=[{"kind": "train", "step": 1, "step_seconds": 50.0}])
    assert time_left(run, 100) == "ETA 1:22:30"
    run.rows += [{"kind": "train", "step": step, "step_seconds": 2.0} for step in range(2, 12)]
    assert time_left(run, 100) == "ETA 0:02:58"


def test_a_long_stage_is_told_while_it_goes_on_and_nothing_after_the_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    view, seen, deadline = LogView(9, quiet_seconds=0.01), "", time.monotonic() + 20

    def wait_for(line: str) -> None:
        nonlocal seen
        while line not in seen.splitlines():
            assert time.monotonic() < deadline
            seen += capsys.readouterr().out

    view.stage("build")
    wait_for("in build")
    view.row(ROW)
    view.stage("generate_sequences")
    wait_for("after step 3/9: in generate_sequences")
    view.close()
    capsys.readouterr()
    time.sleep(0.05)
    assert capsys.readouterr().out == ""


def test_the_panel_shows_step_stage_reward_gap_and_memory() -> None:
    out = io.StringIO()
    view = LiveView("tiny", 9, Console(file=out, force_terminal=True, width=110, color_system=None))
    try:
        view.stage("update_actor")
        view.row(eval_row(2, 0.5))
        view.row(ROW)
        view.memory({"weights": (3 * 2**20, 0), "params": (0, 5 * 2**20)})
        console = Console(file=io.StringIO(), width=110)
        console.print(view.render())
        text = console.file.getvalue()
    finally:
        view.close()
    shown = ("3/9", "update_actor", "0.300", "1.0e-06", "0.500", "ETA 0:00:06")
    for word in (*shown, "weights", "3.0 MiB", "params", "paused", "5.0 MiB"):
        assert word in text


@pytest.mark.parametrize(
    "text",
    ["no space in [/data/runs]", "set cycle.resident=[params,optim]", "[bold]x[/bold]", "\\[a]"],
)
def test_what_looks_like_markup_is_shown_as_it_is(text: str) -> None:
    console = Console(file=io.StringIO(), width=200, force_terminal=True, color_system=None)
    view = LiveView(text, 9, console)
    view.stage(f"stage {text}")
    view.memory({f"tag {text}": (1, 2)})
    view.note(f"note {text}")
    console.print(view.render())
    view.close()
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(f"{head}{text}" in shown for head in ("note ", "stage ", "tag ", " "))
