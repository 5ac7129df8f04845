"""What a run shows while it goes: one line per row, and in a terminal a progress bar."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from recipes.logs.monitor import ProgressView, describe
from tests.helpers.recipes.folders import eval_row, train_row

ROW = train_row(3)


def terminal() -> Any:
    return Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)


def test_a_step_and_an_evaluation_are_one_line_each() -> None:
    models = {"kl_to_reference": 0.0123, "value_explained_variance": 0.5}
    assert "| kl 0.012 | critic explains 0.5 | length" in describe({**ROW, **models})
    signal = {"reward_std": 0.25, "groups_without_signal": 7}
    assert "reward 0.300 ± 0.250 | 7 groups without signal | exact" in describe({**ROW, **signal})
    line = describe({**ROW, "hidden_seconds": 0.5})
    assert line.startswith("reward 0.300 | exact 0.150 | mismatch 1.0e-06 mean 1.0e-05 max |")
    assert line.endswith("400 tok/s | 1.0 s | switch 0.140 s and 0.500 s beside work")
    evaluated = eval_row(2, 0.5, exact_match_2_digits=0.125, exact_match_3_digits=0.0)
    expected = "held-out exact match 0.500 of 16, 2 digits 0.125, 3 digits 0.000 after 2 updates"
    assert describe(evaluated) == expected
    told = describe({**evaluated, "also_trained": ["2_digits"]})
    assert "2 digits 0.125, 3 digits (untrained) 0.000" in told


def test_without_a_terminal_each_row_is_a_plain_line(capsys: pytest.CaptureFixture[str]) -> None:
    view = ProgressView(steps=9)
    for step in (3, 4):
        view.stage("generate_sequences")
        view.row(train_row(step))
    view.row(eval_row(4, 0.5))
    view.close()
    view.note("done")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"step 3/9: {describe(ROW)}"
    assert lines[1].startswith("step 4/9: reward 0.400 | ") and " | ETA 0:00:0" in lines[1]
    assert lines[2:] == [f"eval: {describe(eval_row(4, 0.5))}", "done"]


def test_in_a_terminal_a_bar_shows_stage_steps_and_newest_figures() -> None:
    console = terminal()
    view = ProgressView(9, console)
    view.row(ROW)
    view.stage("update_actor")
    view.close()
    line, _, bar = console.file.getvalue().rpartition(describe(ROW))
    assert line.endswith("step 3/9: ")
    for word in ("update_actor", "3/9", "-:--:--", "reward 0.300, 1.0 s, 400 tok/s"):
        assert word in bar


@pytest.mark.parametrize("text", ["set cycle.resident=[params,optim]", "[bold]x[/bold]", "\\[a]"])
def test_text_that_looks_like_markup_is_shown_unchanged(text: str) -> None:
    console = terminal()
    view = ProgressView(9, console)
    view.note(f"note {text}")
    view.stage(f"stage {text}")
    view.close()
    assert f"note {text}" in console.file.getvalue()
    assert f"stage {text}" in console.file.getvalue()
