"""The monitor of a run: peaks per stage from what the sides report (before, after, torch, what
else is on the device), failures that name their stage, and what is shown: one line per row, and in
a terminal a progress bar.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from memsaver import MemorySaver, Usage
from recipes.errors import LostWorker, RunError
from recipes.logs.monitor import Monitor, Peaks, ProgressView, View, describe
from recipes.logs.run_folder import RunFolder
from tests.helpers.recipes.run_folders import eval_row, train_row
from trainer_bridge import ActorDied, ActorTimeout, RankFailed

ROW = train_row(3)


def usage(tags: dict[str, int], torch: int = 0, peak: int = 0, used: int | None = None) -> Usage:
    return Usage(
        tags=tags, torch_bytes=torch, torch_peak_bytes=peak, device_used_bytes=used, host_bytes=0
    )


class Side:
    def __init__(self, *readings: Usage) -> None:
        self.readings = list(readings)

    def take_usage(self) -> Usage:
        return self.readings.pop(0)


def collect(stages: list[str], **sides: list[Usage]) -> dict[str, Any]:
    peaks = Peaks()
    for owner, readings in sides.items():
        peaks.watch(owner.replace("_0", "[0]").replace("_1", "[1]"), Side(*readings).take_usage)
    for stage in stages:
        peaks.passed(stage)
    return peaks.take()


def test_a_side_that_leaves_counts_with_what_it_held_before() -> None:
    found = collect(
        ["train", "offload"],
        trainer=[usage({"params": 10}, 5, 7, 100), usage({"params": 0}, 0, 5, 85)],
    )
    assert found["train"] == {
        "processes": {"trainer": 17},
        "torch": {"trainer": 7},
        "device_bytes": 102,  # 100 now, and torch held 2 more in between
        "tags": {"params": 10},
    }
    assert found["offload"]["processes"] == {"trainer": 15}
    assert found["offload"]["device_bytes"] == 100  # 85 now; 10 of the tag and 5 of torch have gone


def test_pages_that_leave_the_page_pool_for_a_tag_count_once() -> None:
    found = collect(
        ["offload", "wake"],
        rollout=[usage({"the page pool": 10}, used=50), usage({"weights": 12}, 1, 1, used=53)],
    )["wake"]
    assert found["processes"] == {"rollout": 13} and found["device_bytes"] == 53


def test_what_comes_while_another_goes_comes_into_its_place() -> None:
    """Moments leave behind the answers, and a pool grows; 2 more in torch meanwhile."""
    found = collect(
        ["wake", "generate"],
        trainer=[usage({"optim": 30}, used=55), usage({"optim": 0}, used=50)],
        rollout=[usage({"kv_cache": 5}, used=55), usage({"kv_cache": 28}, 2, 4, used=50)],
    )["generate"]
    assert found["processes"] == {"trainer": 30, "rollout": 32}
    assert found["device_bytes"] == 50 + (35 - 28) + 2


def test_the_fullest_of_several_devices_counts() -> None:
    found = collect(
        ["sync"],
        trainer_0=[usage({"params": 10}, 0, 0, 50)],
        rollout_0=[usage({"weights": 4}, 1, 3, 51)],
        trainer_1=[usage({"params": 10}, 0, 0, 40)],
    )["sync"]
    assert found["device_bytes"] == 53
    assert found["tags"] == {"params[0]": 10, "weights[0]": 4, "params[1]": 10}
    assert found["processes"] == {"trainer[0]": 10, "rollout[0]": 7, "trainer[1]": 10}


def test_a_stage_that_comes_twice_keeps_the_larger_figures_and_a_taken_step_is_gone() -> None:
    peaks = Peaks()
    side = Side(
        usage({"kv_cache": 3}, 0, 9, 20), usage({"kv_cache": 8}, 0, 1, 30), usage({}, 0, 0, 5)
    )
    peaks.watch("rollout", side.take_usage)
    peaks.passed("generate")
    peaks.passed("generate")
    found = peaks.take()["generate"]
    assert (found["tags"], found["torch"]) == ({"kv_cache": 8}, {"rollout": 9})
    assert found["device_bytes"] == 31
    peaks.passed("sleep")
    assert set(peaks.take()) == {"sleep"}


def test_a_saver_tells_its_tags_and_on_the_cpu_nothing_else() -> None:
    saver = MemorySaver(device="cpu")
    resident = saver.empty((1 << 16,), tag="kv_cache")
    assert saver.take_usage() == usage({"kv_cache": resident.nbytes})
    saver.pause("kv_cache", content="host")
    found = saver.take_usage()
    assert found.tags == {"kv_cache": 0} and found.host_bytes >= resident.nbytes
    saver.close()


def test_what_is_on_no_tag_of_a_plan(tmp_path: Path) -> None:
    """Graphs' tag, workspaces and contexts; the trainer's tags and both of the engine's are not.
    Of several devices it is the most.
    """
    monitor = Monitor(RunFolder(tmp_path), View())
    engine = {"weights:discard": 30, "kv_cache:discard": 20, "cuda_graph:host": 7, "workspace": 3}
    for owner, tags in {"trainer": {"params": 10, "optim": 20}, "rollout": engine}.items():
        side: Any = Side(usage(tags, torch=5, used=100))
        monitor.watch(owner, side)
    assert monitor.outside() == 100 - 10 - 20 - 30 - 20
    several = Monitor(RunFolder(tmp_path), View())
    for rank, used in enumerate((90, 100)):
        for name in ("trainer", "rollout"):
            side = Side(usage({"weights": 10 + 20 * rank}, torch=5, used=used))
            several.watch(f"{name}[{rank}]", side)
    assert several.outside() == 90 - 2 * 10


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ActorDied("rollout[1]", "commit_update", "died"), LostWorker),
        (ValueError("out of range"), RunError),
    ],
)
def test_a_rank_that_failed_is_lost_only_if_an_actor_was(
    error: Exception, kind: type[Exception], tmp_path: Path
) -> None:
    monitor = Monitor(RunFolder(tmp_path), View())
    with pytest.raises(RunError) as found, monitor.phase("to_rollout"):
        raise RankFailed("trainer[1]", "sync_weights", error)
    assert type(found.value) is kind
    assert "the trainer[1] actor failed in sync_weights()" in str(found.value)


def test_an_actor_that_was_slow_names_the_key_to_raise(tmp_path: Path) -> None:
    monitor = Monitor(RunFolder(tmp_path), View())
    with pytest.raises(LostWorker) as found, monitor.phase("update_actor"):
        raise ActorTimeout("trainer", "update_actor", "gave no answer for 600 s")
    assert str(found.value).endswith(
        "in update_actor() (if it was at work: raise cluster.call_timeout)"
    )


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
