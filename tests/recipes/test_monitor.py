"""Monitor of a run: peaks of stages, failures that name their stage, and the live display."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from memsaver import MemorySaver, Usage
from recipes.errors import LostWorker, RunError
from recipes.logs.monitor import Monitor
from recipes.logs.peaks import Peaks
from recipes.logs.run_folder import RunFolder
from recipes.logs.view import ProgressView, View, describe
from tests.helpers.memsaver.savers import until
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


def test_tag_that_leaves_in_a_stage_counts_with_its_bytes_before() -> None:
    stages = collect(
        ["train", "offload"],
        trainer=[usage({"params": 10}, 5, 7, 100), usage({"params": 0}, 0, 5, 85)],
    )
    assert stages["train"] == {
        "processes": {"trainer": 17},
        "torch": {"trainer": 7},
        "device_bytes": 102,  # 100 now, and 2 more of torch earlier
        "tags": {"params": 10},
    }
    assert stages["offload"]["processes"] == {"trainer": 15}
    # 85 now; 10 of the tag and 5 of torch were freed
    assert stages["offload"]["device_bytes"] == 100


def test_pages_that_move_from_page_pool_to_tag_count_once() -> None:
    peak = collect(
        ["offload", "wake"],
        rollout=[usage({"the page pool": 10}, used=50), usage({"weights": 12}, 1, 1, used=53)],
    )["wake"]
    assert peak["processes"] == {"rollout": 13} and peak["device_bytes"] == 53


def test_growing_tag_takes_the_pages_of_a_leaving_tag() -> None:
    """Pause moments during generation while the pool grows, with 2 more in torch."""
    peak = collect(
        ["wake", "generate"],
        trainer=[usage({"optim": 30}, used=55), usage({"optim": 0}, used=50)],
        rollout=[usage({"kv_cache": 5}, used=55), usage({"kv_cache": 28}, 2, 4, used=50)],
    )["generate"]
    assert peak["processes"] == {"trainer": 30, "rollout": 32}
    assert peak["device_bytes"] == 50 + (35 - 28) + 2


def test_device_bytes_are_those_of_the_fullest_device() -> None:
    peak = collect(
        ["sync"],
        trainer_0=[usage({"params": 10}, 0, 0, 50)],
        rollout_0=[usage({"weights": 4}, 1, 3, 51)],
        trainer_1=[usage({"params": 10}, 0, 0, 40)],
    )["sync"]
    assert peak["device_bytes"] == 53
    assert peak["tags"] == {"params[0]": 10, "weights[0]": 4, "params[1]": 10}
    assert peak["processes"] == {"trainer[0]": 10, "rollout[0]": 7, "trainer[1]": 10}


def test_repeated_stage_keeps_larger_figures_and_take_clears_them() -> None:
    peaks = Peaks()
    side = Side(
        usage({"kv_cache": 3}, 0, 9, 20), usage({"kv_cache": 8}, 0, 1, 30), usage({}, 0, 0, 5)
    )
    peaks.watch("rollout", side.take_usage)
    peaks.passed("generate")
    peaks.passed("generate")
    peak = peaks.take()["generate"]
    assert (peak["tags"], peak["torch"]) == ({"kv_cache": 8}, {"rollout": 9})
    assert peak["device_bytes"] == 31
    peaks.passed("sleep")
    assert set(peaks.take()) == {"sleep"}


def test_devices_without_a_trainer_count_apart() -> None:
    own = [usage({"params": 10}, 5, 7, 100)] * 2
    peak = collect(
        ["update", "update"],
        trainer_0=own,
        rollout_0=[usage({"weights": 0}, 0, 0, 100)] * 2,
        rollout_1=[usage({"weights": 4}, 0, 0, 300), usage({"weights": 4}, 0, 2, 300)],
    )["update"]
    assert (peak["device_bytes"], peak["rollout_device_bytes"]) == (102, 302)
    assert peak["tags"] == {"params[0]": 10, "weights[0]": 0, "weights[1]": 4}


def test_cpu_saver_reports_its_tags_only() -> None:
    saver = MemorySaver(device="cpu")
    resident = saver.empty((1 << 16,), tag="kv_cache")
    assert saver.take_usage() == usage({"kv_cache": resident.nbytes})
    saver.pause("kv_cache", content="host")
    paused = saver.take_usage()
    assert paused.tags == {"kv_cache": 0} and paused.host_bytes >= resident.nbytes
    saver.close()


def test_outside_is_the_most_bytes_on_no_planned_tag_of_a_device(tmp_path: Path) -> None:
    """Count graphs, workspaces and contexts."""
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
def test_failed_rank_counts_as_lost_worker_only_if_its_actor_died(
    error: Exception, kind: type[Exception], tmp_path: Path
) -> None:
    monitor = Monitor(RunFolder(tmp_path), View())
    with pytest.raises(RunError) as raised, monitor.phase("to_rollout"):
        raise RankFailed("trainer[1]", "sync_weights", error)
    assert type(raised.value) is kind
    assert "the trainer[1] actor failed in sync_weights()" in str(raised.value)


def test_actor_timeout_names_the_key_to_raise(tmp_path: Path) -> None:
    monitor = Monitor(RunFolder(tmp_path), View())
    with pytest.raises(LostWorker) as raised, monitor.phase("update_actor"):
        raise ActorTimeout("trainer", "update_actor", "gave no answer for 600 s")
    assert str(raised.value).endswith(
        "in update_actor() (if it was still working: raise cluster.call_timeout)"
    )


def terminal() -> Any:
    return Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)


def test_step_and_evaluation_are_described_in_one_line_each() -> None:
    models = {"kl_to_reference": 0.0123, "value_explained_variance": 0.5}
    assert "| kl 0.012 | critic explains 0.5 | length" in describe({**ROW, **models})
    signal = {"reward_std": 0.25, "groups_without_signal": 7}
    assert "reward 0.300 ± 0.250 | 7 groups without signal | correct" in describe({**ROW, **signal})
    failed = describe({**ROW, "reward": None, "faults": 3})
    assert failed.startswith("reward - | 3 faults of rewards | correct 0.150 |")
    line = describe({**ROW, "hidden_seconds": 0.5})
    assert line.startswith("reward 0.300 | correct 0.150 | mismatch 1.0e-06 mean 1.0e-05 max |")
    assert line.endswith("400 tok/s | 1.0 s | switch 0.140 s and 0.500 s overlapped")
    rejected = describe({**ROW, "answers_rejected": 0.125})
    assert "| mismatch 1.0e-06 mean 1.0e-05 max | 12% rejected |" in rejected
    bypassed = {key: value for key, value in ROW.items() if "mismatch" not in key}
    assert describe(bypassed).startswith("reward 0.300 | correct 0.150 | length")
    evaluated = eval_row(
        2, 0.5, correct_hard=0.125, **{"avg@4": 0.5, "pass@1": 0.5, "pass@4": 0.75}
    )
    shares = "correct 0.500, correct_hard 0.125, pass@4 0.750"
    assert describe(evaluated) == f"{shares} on 16 held-out problems after 2 updates"


def test_rows_are_plain_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_log_reports_a_stage_that_lasts_until_the_view_is_closed() -> None:
    console = Console(file=io.StringIO(), force_terminal=False)
    view = ProgressView(9, console, quiet=0.01)
    view.stage("build_engine")
    until(lambda: "build_engine: 0 s so far" in console.file.getvalue())
    view.close()
    view.stage("update_actor")
    assert "update_actor" not in console.file.getvalue()


def test_terminal_shows_the_line_of_a_step_and_a_bar() -> None:
    console = terminal()
    view = ProgressView(9, console)
    view.row(ROW)
    view.stage("update_actor")
    view.close()
    shown = console.file.getvalue().replace("\x1b[2K", "")
    line, last, bar = shown.rpartition("switch 0.140 s")
    assert f"step 3/9: {describe(ROW)}" in f"{line}{last}"
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
