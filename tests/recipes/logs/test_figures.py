"""Figures and tables: exact values under the pointer and in cells, in colours that can be read."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from memsaver import Event
from recipes.logs import plots, report_page
from recipes.logs.history import Run, read_run
from recipes.logs.plots import Chart, Tip
from recipes.logs.report_page import FOLDER
from tests.helpers.recipes.folders import MIB, eval_row, make_run, train_row
from tests.helpers.recipes.runs import Row

ALL = [
    plots.reward_chart,
    plots.mismatch_chart,
    plots.critic_chart,
    plots.run_chart,
    plots.seconds_chart,
    plots.speed_chart,
    plots.sync_chart,
    plots.tags_chart,
    plots.processes_chart,
    plots.devices_chart,
    plots.step_chart,
    plots.wake_up_chart,
    plots.phases_chart,
]


GPU = {"name": "H100", "memory": "81559 MiB", "driver": "580.1"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return read_run(
        make_run(tmp_path_factory.mktemp("runs") / "run", value_loss=0.5, kl_to_reference=0.0625)
    )


def tips(chart: Chart | None) -> list[str]:
    assert chart is not None
    return [
        tip.replace("\n", ", ")
        for tip in re.findall(r"<title>(.*?)</title>", report_page.svg_of(chart), re.DOTALL)
    ]


def test_there_is_no_figure_of_what_is_not_there(run: Run, tmp_path: Path) -> None:
    assert [figure.__name__ for figure in ALL if figure(Run()) is not None] == []
    assert plots.critic_chart(Run(rows=[train_row(1)])) is None
    assert plots.phases_chart(run) is None, "there is a trace"


@pytest.mark.parametrize(
    ("figure", "tip"),
    [
        (
            plots.reward_chart,
            "step 1 (reward), reward, mean of the step: 0.1, reward, smoothed: 0.1, "
            "exact match of samples: 0.05",
        ),
        (
            plots.reward_chart,
            "step 6 (reward), reward, mean of the step: 0.6, reward, smoothed: 0.405883, "
            "exact match of samples: 0.3, held-out exact match, greedy: 0.75",
        ),
        (
            plots.mismatch_chart,
            "step 3 (nats a token), mean: 1e-06, max: 1e-05, KL from the reference: 0.0625",
        ),
        (plots.critic_chart, "step 1 (loss of the critic), loss of the critic: 0.5"),
        (plots.critic_chart, "step 6 (KL, nats a token), KL, nats a token: 0.0625"),
        (plots.run_chart, "generate_sequences, from 1.10 s to 1.60 s"),
        (
            plots.seconds_chart,
            "step 1 (seconds), generate_sequences: 0.5, update_actor: 0.24, "
            "compute_log_prob: 0.1, sync_weights: 0.04, offload_params: 0.02, everything else: 0.1",
        ),
        (plots.sync_chart, "step 1 (ms), whole stage: 40, copies: 2, reading back: 10"),
        (
            plots.wake_up_chart,
            "from 20.0 ms to 80.0 ms, weights: 4.0 MiB, kv_cache: 0 B, params: 4.0 MiB, "
            "optim: 0 B, in all: 8.0 MiB, host: 8.0 MiB",
        ),
        (
            plots.processes_chart,
            "from 1.10 s to 1.61 s, rollout: 36.0 MiB, trainer: 0 B, in all: 36.0 MiB, "
            "host: 12.0 MiB",
        ),
    ],
)
def test_tips_hold_exact_values(figure: Any, tip: str, run: Run) -> None:
    found = tips(figure(run))
    assert tip in found
    if tip.startswith("step"):
        more = {plots.critic_chart: 12, plots.reward_chart: 7}  # evaluated before the first step
        assert len(found) == more.get(figure, 6)


def test_stages_of_the_whole_run_have_a_bar_each_time_but_one_where_they_are_too_near(
    run: Run, tmp_path: Path
) -> None:
    updates = [tip.startswith("update_actor, ") for tip in tips(plots.run_chart(run))]
    assert sum(updates) == 6
    spans = [("sleep", index / 100, index / 100 + 0.005) for index in range(100)] + [
        ("evaluate", 0.0, 100.0)
    ]
    found = tips(plots.run_chart(Run(spans=spans)))
    assert found == ["sleep, from 0.0 ms to 0.99 s", "evaluate, from 0.0 ms to 1 min 40 s"]


def test_sync_figures_come_from_the_receipt_or_the_stage(run: Run, tmp_path: Path) -> None:
    assert plots.sync_chart(run).note == ("Each sync wrote 4.0 MiB, copied at 2.10 GB/s (median).")
    old = plots.sync_chart(Run(rows=[train_row(1, sync={})]))
    assert "not recorded" in old.note and tips(old) == ["step 1 (ms), whole stage: 40"]


def test_thinned_levels_keep_the_peak_of_each_column_and_how_it_ends() -> None:
    fields: dict[str, Any] = {"seconds": 0.0, "op": "grow", "tag": "params", "backup_bytes": 0}
    bursts = [
        Event(time=second + part / 100, committed_bytes=part % 7, **fields)
        for second, part in itertools.product(range(10), range(1, 81))
    ]
    found = Run(events={"trainer": bursts}).levels(0.0, 10.0)
    thin = found.thinned(10)
    assert thin.times[:5] == [0.0, 0.8, 1.01, 1.8, 2.01] and thin.times[-1] == 10.0
    assert thin.held("params") == [6, 80 % 7] * 10 + [80 % 7]
    assert found.thinned(1000) is found


def test_the_zoom_is_the_last_step_of_the_ordinary_kind() -> None:
    spans = [
        ("build", 0.0, 1.0),
        ("step 1", 1.0, 2.0),
        ("step 2", 2.0, 3.5),
        ("offload_optim", 3.5, 3.6),
    ]
    assert Run(spans=spans).one_step() == ("step 2", 2.0, 3.5)
    assert Run(spans=[*spans, ("save_checkpoint", 3.0, 3.2)]).one_step() == ("step 1", 1.0, 2.0)
    assert Run(spans=spans[:1]).one_step() == ("incomplete", 0.0, 1.0)
    assert Run(spans=spans).stages(0.0, 3.5) == spans[:1]


@pytest.mark.parametrize(
    "first", ["offload_optim", "offload_critic", "empty_cache", "wake_weights"]
)
def test_the_wake_up_begins_with_its_first_stage_whatever_is_kept(first: str) -> None:
    spans = [
        ("update_actor", 0.0, 1.0),
        (first, 2.0, 2.5),
        ("wake_kv_cache", 3.0, 4.0),
        ("sleep", 5.0, 6.0),
    ]
    _, begin, end = Run(spans=spans).wake_up()
    assert begin == 2.0 and 4.0 <= end < 5.0


def test_devices_have_a_figure_where_there_are_several(tmp_path: Path) -> None:
    event = Event(
        time=1.0, seconds=0.0, op="grow", tag="params", committed_bytes=2**20, backup_bytes=0
    )
    events = {"trainer[0]": [event], "trainer[1]": [event], "rollout[1]": [event]}
    run = Run(events=events, spans=[("build", 0.0, 2.0)])
    found = tips(plots.devices_chart(run))
    assert any("device 0: 1.0 MiB, device 1: 2.0 MiB" in tip for tip in found)


def test_without_a_trace_memory_comes_from_the_rows(tmp_path: Path) -> None:
    found = tips(plots.phases_chart(Run(rows=[train_row(1), train_row(2)])))
    assert found[:2] == [f"step {step} (rollout, MiB), weights: 4, params: 0" for step in (1, 2)]
    assert found[2] == "step 1 (train, MiB), weights: 0, params: 4"


def _luminance(colour: str) -> float:
    parts = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one: str, other: str) -> float:
    dark, light = sorted([_luminance(one), _luminance(other)])
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_contrast_of_both_themes(theme: int) -> None:
    style = (FOLDER / "page.css").read_text()
    block = re.findall(r":root \{(.*?)\}", style, re.DOTALL)[theme]
    colours = dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6})", block))
    for text in ("ink", "soft", "link"):
        for ground in ("page", "card", "warn") if text == "ink" else ("page", "card"):
            assert _contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    for name in set(report_page.variables().values()) - {"ink", "grid", "edge", "pale"}:
        assert _contrast(colours[name], colours["page"]) >= 3, name


def test_tips_lie_where_their_values_are() -> None:
    def build(figure: Any) -> list[Tip]:
        figure.set_layout_engine(None)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, 10), ylim=(0, 4))
        return [Tip(axes=axes, left=5, right=10, low=0, high=1, text='a "<b>"')]

    svg = report_page.svg_of(Chart("x", "x", 1.0, build))
    width = 7.4 * 72
    assert f'<rect x="{width / 2:.2f}" y="54.00" width="{width / 2:.2f}" height="18.00">' in svg
    assert "<title>a &quot;&lt;b&gt;&quot;</title>" in svg


def peaks(stage: str, device: int | None, **processes: int) -> Row:
    return {
        "kind": "train",
        "step": 1,
        "peaks": {stage: {"device_bytes": device, "processes": processes}},
    }


def test_key_figures(run: Run, tmp_path: Path) -> None:
    figures = dict(report_page.key_figures(run))
    assert figures["steps"] == "6 of 6"
    assert figures["reward, first and last step"] == "0.100 → 0.600"
    assert figures["held-out exact match"] == "12 % → 75 %"
    assert figures["tokens a second, median"] == "400"
    assert figures["weight sync, median"] == "40.0 ms"
    assert figures["switch, median"] == "0.14 s, 14.0 % of the step"
    assert "switch, planned" not in figures
    decided = Run(plan={"switch": {"resident": [], "seconds": 0.012, "lines": []}})
    assert ("switch, planned", "12.0 ms") in report_page.key_figures(decided)
    assert figures["peak of all tags"] == "36.0 MiB"  # weights and KV cache
    assert figures["time in all"] == "7.00 s"
    assert report_page.key_figures(Run()) == [("steps", "0 of ?")]


def test_slowest_stages_come_first_with_their_share(run: Run) -> None:
    found = report_page.slowest_stages(run)
    times = ("0.50 s", "0.50 s", "3.00 s")
    assert found.rows[0] == ("generate_sequences", "rollout", "50.0 %", *times, "6")
    assert found.rows[1][:3] == ("update_actor", "train", "24.0 %")
    assert len(found.rows) == 13


def test_planned_and_measured(tmp_path: Path) -> None:
    stages = [
        {"stage": "update_actor", "device_bytes": {"trainer": 100 * MIB, "rollout": 2 * MIB}},
        {"stage": "sync_weights", "device_bytes": {"trainer": 98 * MIB}},
        {"stage": "never_ran", "device_bytes": {"trainer": 1}},
        {"stage": "before_an_update", "device_bytes": {"trainer": 100 * MIB}},
    ]
    first = peaks("before_an_update", 60 * MIB, trainer=60 * MIB)
    rows = [
        first,
        peaks(
            "update_actor",
            90 * MIB,
            **{"trainer[0]": 88 * MIB, "trainer[1]": 100 * MIB, "rollout[0]": 0},
        ),
        peaks("update_actor", 100 * MIB, **{"trainer[0]": 99 * MIB}),
        peaks("sync_weights", None, trainer=100 * MIB),
    ]
    plan = {"stages": stages, "gpu": "h100-80gb", "gpu_bytes": 80 * 2**30}
    found = report_page.planned_and_measured(Run(rows=rows, plan=plan))
    assert "h100-80gb (80.00 GiB)" in found.note
    assert found.rows == [
        ("update_actor", "102.0 MiB", "100.0 MiB", "+2.0 %", "✓"),
        ("– trainer", "100.0 MiB", "100.0 MiB", "+0.0 %", "✓"),
        ("– rollout", "2.0 MiB", "0 B", "–", "✗"),
        ("sync_weights", "98.0 MiB", "not measured", "–", ""),
        ("– trainer", "98.0 MiB", "100.0 MiB", "-2.0 %", "✗"),
    ]
    outside = {"assumed": 3 * 2**30, "measured": 2 * 2**30}
    found = report_page.planned_and_measured(Run(rows=rows, plan={**plan, "outside": outside}))
    last = ("outside of tags, at the start", "3.00 GiB", "2.00 GiB", "+50.0 %", "✓")
    assert found.rows[-1] == last
    assert report_page.planned_and_measured(Run(rows=rows)) is None
    alone = report_page.planned_and_measured(Run(rows=[first], plan=plan))
    assert alone.rows[0] == ("before_an_update", "100.0 MiB", "60.0 MiB", "+66.7 %", "✗")
    assert report_page.planned_and_measured(Run(plan=plan)) is None


def test_evaluations_keep_a_place_for_what_was_not_measured(tmp_path: Path) -> None:
    rows = [eval_row(0, 0.5), eval_row(5, 1.0, exact_match_2_digits=0.25)]
    found = report_page.evaluations(Run(rows=rows))
    assert list(found.head) == ["updates", "held-out", "2 digits", "problems"]
    assert found.rows == [("0", "0.500", "–", "16"), ("5", "1.000", "0.250", "16")]


def test_where_it_ran(tmp_path: Path) -> None:
    first = {"date": "today", "cpus": 2, "gpus": [GPU, GPU], "packages": {"torch": "2.11"}}
    found = report_page.environment(Run(environments=[first, {"gpus": []}]))
    cells = {row[0]: row[1:] for row in found.rows}
    assert cells["gpu"] == ("2 x H100, 81559 MiB", "none")
    assert cells["driver"] == ("580.1", "–")
    assert cells["torch"] == ("2.11", "–")
    assert list(found.head) == ["", "session 1", "session 2"]


def test_every_step_has_only_columns_that_are_there(tmp_path: Path) -> None:
    found = report_page.every_step(Run(rows=[train_row(step) for step in (1, 2, 3)]))
    assert (
        list(found.head)[:3] == ["step", "reward", "exact match"] and "value loss" not in found.head
    )
    assert found.rows[2][:3] == ("3", "0.3", "0.15")
