"""Figures of memory: by tag, process and device over time, one step, its wake-up, and steps without a trace."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from memsaver.errors import format_bytes
from recipes.watch.history import (
    Levels,
    by_process,
    by_tag,
    format_seconds,
    in_order,
    levels,
    one_step,
    stages_between,
    wake_up,
)
from recipes.watch.plots import OTHER_COLOURS, TAG_COLOURS, stack_panel, tidy
from recipes.watch.report.chart import Chart, Tip, between, draw_chart
from recipes.watch.report.reading import RunRecord
from recipes.watch.report.timing import LANE, draw_lanes, lane_names

MIB, GIB = 2**20, 2**30
_COLUMNS = 240  # of a whole run, two moments each
_NUMBER = re.compile(r"\[(\d+)\]$")  # of the device, behind the name of a side that has several


def by_device(owner: str, tag: str) -> str:
    """The device of a process: its number stands behind the name ("trainer[1]") where there are several."""
    found = _NUMBER.search(owner)
    return f"device {found[1]}" if found else "the device"


def tags_chart(run: RunRecord) -> Chart | None:
    caption = (
        "What is on the device, tag by tag, and dashed what the host keeps meanwhile. Trainer (params, optim) and "
        "rollout (weights, kv_cache, cuda_graph) should take turns: their sum is the peak that must fit."
    )
    return _over_time(run, "by-tag", "Memory by tag", caption, by_tag)


def processes_chart(run: RunRecord) -> Chart | None:
    caption = (
        "The same bytes by the process that holds them. Each should fall to what it keeps when the other works; one "
        "that never falls holds memory the other could use."
    )
    return _over_time(run, "by-process", "Memory by process", caption, by_process)


def devices_chart(run: RunRecord) -> Chart | None:
    """None where the run had one device."""
    if len({by_device(owner, "") for owner in run.events}) < 2:
        return None
    caption = "Bytes of each device. They should be equally high; the highest decides what fits."
    return _over_time(run, "by-device", "Memory by device", caption, by_device)


def _over_time(run: RunRecord, name: str, title: str, caption: str, key: Callable[[str, str], str]) -> Chart | None:
    if not run.events:
        return None
    whole = levels(run.events, 0.0, run.end, key)
    drawn = whole.thinned(_COLUMNS)
    if drawn is not whole:
        caption += " Where several changes fall into one column, the fullest moment is drawn."

    def build(figure: Figure) -> list[Tip]:
        axes = figure.subplots()
        tips = draw_stack(axes, drawn, 0.0)
        axes.set(xlabel="seconds since the run began")
        return tips

    return draw_chart(name, title, caption, 2.7, build)


def draw_stack(axes: Axes, found: Levels, origin: float) -> list[Tip]:
    """The stack and its legend above; returns a tip for the time between two changes."""
    peak = max([found.total(index) for index in range(len(found.times))])
    unit, label = (GIB, "GiB") if peak >= 4 * GIB else (MIB, "MiB")
    stack_panel(axes, found, origin, unit, 1.08)
    axes.set(ylabel=label)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=6, frameon=False, columnspacing=1.2)
    tidy(axes)
    tips = []
    for index, (begin, finish) in enumerate(itertools.pairwise(found.times)):
        if finish > begin:
            text = f"from {format_seconds(begin - origin)} to {format_seconds(finish - origin)}\n{_held(found, index)}"
            tips.append(Tip(axes=axes, left=begin - origin, right=finish - origin, text=text))
    return tips


def _held(found: Levels, index: int) -> str:
    lines = [f"{name}: {format_bytes(held[index])}" for name, held in found.held.items()]
    return "\n".join(
        [*lines, f"in all: {format_bytes(found.total(index))}", f"host: {format_bytes(found.kept[index])}"]
    )


def step_chart(run: RunRecord) -> Chart | None:
    if not run.spans:
        return None
    first, last, name = one_step(run.spans)
    caption = (
        "The last step that neither evaluated nor saved. Above its stages, below the memory that they find and leave. "
        "Grey is switching: it should be short, and memory should change only there."
    )
    return _close_up(run, "one-step", f"One step ({name})", caption, first, last)


def wake_up_chart(run: RunRecord) -> Chart | None:
    if not run.spans:
        return None
    first, last, name = one_step(run.spans)
    found = wake_up(run.spans, first, last)
    if found is None:
        return None
    caption = (
        "From training to generating. The engine's weights come back while the trainer's parameters are still there "
        "and are synced into place; then these park and the KV cache takes their room. During the sync both are there: "
        "the moment to look at where a run does not fit."
    )
    return _close_up(run, "wake-up", f"The wake-up of {name}", caption, *found)


def _close_up(run: RunRecord, name: str, title: str, caption: str, first: float, last: float) -> Chart | None:
    stages = stages_between(run.spans, first, last)
    if not stages or last <= first:
        return None
    lanes = LANE * len(lane_names(stages))
    height = lanes + 0.5 + (2.2 if run.events else 0.0)

    def build(figure: Figure) -> list[Tip]:
        panels = figure.subplots(
            2 if run.events else 1, 1, sharex=True, squeeze=False, height_ratios=[lanes, 1.9] if run.events else None
        )[:, 0]
        tips = draw_lanes(panels[0], stages, first, last)
        _name_durations(panels[0], run, first, last)
        if run.events:
            tips += draw_stack(panels[1], levels(run.events, first, last), first)
        in_seconds = last - first >= 1.0
        panels[-1].set_xlabel("seconds" if in_seconds else "ms")
        if not in_seconds:
            panels[-1].xaxis.set_major_formatter(lambda value, _: f"{1000 * value:g}")
        return tips

    return draw_chart(name, title, caption, height, build)


def _name_durations(axes: Axes, run: RunRecord, first: float, last: float) -> None:
    """Each lane's seconds beside its name."""
    spent: dict[str, float] = {}
    for name, begin, finish in stages_between(run.spans, first, last):
        spent[name] = spent.get(name, 0.0) + finish - begin
    labels = [label.get_text() for label in axes.get_yticklabels()]
    axes.set_yticks(range(len(labels)), [f"{label}  {format_seconds(spent[label])}" for label in labels])


def phases_chart(run: RunRecord) -> Chart | None:
    """Where no trace was written: bytes by tag that the rows report, at the hand-overs."""
    rows = [row for row in run.rows_with("memory") if row["memory"]]
    if run.events or not rows:
        return None
    phases = list(dict.fromkeys(phase for row in rows for phase in row["memory"]))
    tags = in_order({tag for row in rows for held in row["memory"].values() for tag in held})

    def build(figure: Figure) -> list[Tip]:
        tips = []
        panels = figure.subplots(len(phases), 1, sharex=True, squeeze=False)[:, 0]
        for axes, phase in zip(panels, phases, strict=True):
            tips += _draw_phase(axes, phase, tags, rows)
        panels[0].legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=6, frameon=False, columnspacing=1.2)
        panels[-1].set_xlabel("step")
        return tips

    caption = "From the rows, because there is no trace: bytes by tag when the rollout works and when the trainer does."
    return draw_chart("by-phase", "Memory by tag and phase", caption, 0.6 + 1.6 * len(phases), build)


def _draw_phase(axes: Axes, phase: str, tags: list[str], rows: list[dict]) -> list[Tip]:
    here = [(row["step"], row["memory"][phase]) for row in rows if phase in row["memory"]]
    steps, base = [step for step, _ in here], [0.0] * len(here)
    spare = iter(OTHER_COLOURS * (1 + len(tags)))
    for tag in tags:
        heights = [held.get(tag, 0) / MIB for _, held in here]
        axes.bar(steps, heights, 0.9, base, color=TAG_COLOURS.get(tag) or next(spare), label=tag, linewidth=0, zorder=2)
        base = [low + height for low, height in zip(base, heights, strict=True)]
    axes.set_title(phase, loc="left")
    axes.set_ylabel("MiB")
    tidy(axes)
    tips = []
    for (step, held), (left, right) in zip(here, between(steps), strict=True):
        lines = [f"{tag}: {format_bytes(held.get(tag, 0))}" for tag in tags]
        tips.append(Tip(axes=axes, left=left, right=right, text="\n".join([f"step {step}, {phase}", *lines])))
    return tips
