"""Figures: exact values under the pointer, colours of the theme, nothing drawn where there is nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from memsaver import Event
from recipes.report import learning, memory, timing
from recipes.report.chart import VARIABLES, Chart, Tip, draw_chart
from recipes.report.page import FOLDER
from recipes.report.reading import RunRecord, read_run
from tests.helpers.recipes.folders import make_run, train_row

ALL = [
    learning.reward_chart,
    learning.gap_chart,
    learning.critic_chart,
    timing.run_chart,
    timing.seconds_chart,
    timing.speed_chart,
    timing.sync_chart,
    memory.tags_chart,
    memory.processes_chart,
    memory.devices_chart,
    memory.step_chart,
    memory.wake_up_chart,
    memory.phases_chart,
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    return read_run(make_run(tmp_path_factory.mktemp("runs") / "run", value_loss=0.5, kl_to_reference=0.0625))


def tips(chart: Chart | None) -> list[str]:
    assert chart is not None
    return re.findall(r"<title>(.*?)</title>", chart.svg, re.DOTALL)


def test_an_empty_run_has_no_figure(tmp_path: Path) -> None:
    assert [figure.__name__ for figure in ALL if figure(RunRecord(path=tmp_path)) is not None] == []


def test_reward_tips_hold_step_and_evaluation(run: RunRecord) -> None:
    found = tips(learning.reward_chart(run))
    assert len(found) == 6
    assert found[0] == "step 1\nreward: 0.1\nexact match of samples: 0.05"
    assert found[-1] == "step 6\nreward: 0.6\nexact match of samples: 0.3\nheld-out exact match: 0.75"


def test_gap_and_critic_tips(run: RunRecord) -> None:
    assert tips(learning.gap_chart(run))[2] == "step 3\nmean gap: 1e-06\nlargest gap: 1e-05"
    assert tips(learning.critic_chart(run))[0] == "step 1\nloss of the critic: 0.5"
    assert "step 6\nKL to the reference, nats a token: 0.0625" in tips(learning.critic_chart(run))


def test_a_run_without_critic_has_no_critic_figure(tmp_path: Path) -> None:
    assert learning.critic_chart(RunRecord(path=tmp_path, rows=[train_row(1)])) is None


def test_stages_of_the_whole_run_have_a_bar_each_time(run: RunRecord) -> None:
    found = tips(timing.run_chart(run))
    assert len([tip for tip in found if tip.startswith("update_actor\n")]) == 6
    assert "generate_sequences\ntook 0.50 s\nfrom 1.10 s to 1.60 s" in found


def test_bars_too_near_to_tell_apart_are_one(tmp_path: Path) -> None:
    spans = [("sleep", index / 100, index / 100 + 0.005) for index in range(100)] + [("evaluate", 0.0, 100.0)]
    found = tips(timing.run_chart(RunRecord(path=tmp_path, spans=spans)))
    assert found[0].startswith("sleep\n100 times, 0.50 s in all") and len(found) == 2


def test_seconds_name_the_largest_stages_and_the_rest(run: RunRecord) -> None:
    first = tips(timing.seconds_chart(run))[0]
    assert first.startswith("step 1\ngenerate_sequences (s): 0.5\nupdate_actor (s): 0.24\ncompute_log_prob (s): 0.1")
    assert first.endswith("everything else (s): 0.1")


def test_sync_figures_come_from_the_receipt_or_the_stage(run: RunRecord, tmp_path: Path) -> None:
    chart = timing.sync_chart(run)
    assert "Each sync wrote 4.0 MiB." in chart.caption
    first = "step 1\nwhole stage (ms): 40\ncopies (ms): 2\nreading back (ms): 10\nMiB written: 4\nGB/s of the copies:"
    assert tips(chart)[0] == f"{first} 2.09715"
    old = timing.sync_chart(RunRecord(path=tmp_path, rows=[train_row(1, sync={})]))
    assert "not recorded" in old.caption and tips(old) == ["step 1\nwhole stage (ms): 40"]


def test_memory_tips_name_every_tag_and_the_host(run: RunRecord) -> None:
    found = tips(memory.wake_up_chart(run))
    sync = "weights: 4.0 MiB\nkv_cache: 0 B\nparams: 4.0 MiB\noptim: 0 B\nin all: 8.0 MiB\nhost: 8.0 MiB"
    assert f"from 20.0 ms to 80.0 ms\n{sync}" in found


def test_memory_by_process(run: RunRecord) -> None:
    assert any("rollout: 36.0 MiB\ntrainer: 0 B" in tip for tip in tips(memory.processes_chart(run)))


def test_devices_have_a_figure_where_there_are_several(tmp_path: Path) -> None:
    event = Event(time=1.0, seconds=0.0, op="grow", tag="params", committed_bytes=2**20, backup_bytes=0)
    events = {"trainer[0]": [event], "trainer[1]": [event], "rollout[1]": [event]}
    run = RunRecord(path=tmp_path, events=events, spans=[("build", 0.0, 2.0)])
    assert any("device 0: 1.0 MiB\ndevice 1: 2.0 MiB" in tip for tip in tips(memory.devices_chart(run)))


def test_without_a_trace_memory_comes_from_the_rows(run: RunRecord, tmp_path: Path) -> None:
    assert memory.phases_chart(run) is None
    found = tips(memory.phases_chart(RunRecord(path=tmp_path, rows=[train_row(1), train_row(2)])))
    assert found[:2] == [f"step {step}, rollout\nweights: 4.0 MiB\nparams: 0 B" for step in (1, 2)]
    assert found[2] == "step 1, train\nweights: 0 B\nparams: 4.0 MiB"


def _luminance(colour: str) -> float:
    parts = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
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
    for name in set(VARIABLES.values()) - {"ink", "grid", "edge", "pale"}:
        assert _contrast(colours[name], colours["page"]) >= 3, name


def test_tips_lie_where_their_values_are() -> None:
    def build(figure: Any) -> list[Tip]:
        figure.set_layout_engine(None)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, 10), ylim=(0, 4))
        return [Tip(axes=axes, left=5, right=10, low=0, high=1, text='a "<b>"')]

    svg = draw_chart("x", "x", "x", 1.0, build).svg
    width = 7.4 * 72
    assert f'<rect x="{width / 2:.2f}" y="54.00" width="{width / 2:.2f}" height="18.00">' in svg
    assert "<title>a &quot;&lt;b&gt;&quot;</title>" in svg
