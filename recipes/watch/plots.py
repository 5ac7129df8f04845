"""The two pictures of a run, and panels that the report draws too; it needs matplotlib."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from memsaver.common.machine import replaced
from recipes.watch.history import (
    TAG_COLOURS,
    Levels,
    Run,
    Span,
    beside_the_task,
    format_seconds,
    kind_of,
)

matplotlib.rcParams["text.parse_math"] = False  # a dollar in a stage's name is a dollar
MIB = 2**20
INK, GRID, EDGE = "#222222", "#e3e3e3", "#bbbbbb"
OTHER_COLOURS = ("#5aa7a7", "#b58863", "#8a8f98", "#d18ad0")
BAND_COLOURS = {"rollout": "#eaf2fb", "train": "#fbeeee", "switch": "#f4f4f4"}
PALE = "#9db8d9"  # beside its smoothed curve


def draw_reward(run: Run, file: Path) -> None:
    """Reward and exact match above, log-probability gap below, over steps."""
    shape: dict[str, Any] = {"sharex": True, "height_ratios": (2, 1)}
    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(9, 7), **shape)
    reward_panel(top, run)
    gap_panel(bottom, run)
    bottom.set_title("Log-probability gap, rollout against trainer", loc="left")
    bottom.set_xlabel("step")
    for axes in (top, bottom):
        tidy(axes)
    figure.tight_layout()
    save_picture(figure, file)


def reward_panel(axes: Axes, run: Run) -> None:
    """Reward and exact match of the training rows, and every kind of evaluation."""
    train = run.rows_with("reward", "exact_match")
    rewards = [row["reward"] for row in train]
    smoothed = itertools.accumulate(rewards, lambda last, value: 0.7 * last + 0.3 * value)
    rows = [{**row, "smoothed": value} for row, value in zip(train, smoothed, strict=True)]
    blue, green = TAG_COLOURS["weights"], TAG_COLOURS["cuda_graph"]
    curve(axes, rows, "reward", color=PALE, linewidth=1.2, label="reward, mean of the step")
    curve(axes, rows, "smoothed", color=blue, linewidth=2.2, label="reward, smoothed")
    exact: dict[str, Any] = {"linestyle": "--", "label": "exact match of samples"}
    curve(axes, rows, "exact_match", color=green, linewidth=1.4, **exact)
    evaluations_panel(axes, run.evaluations)
    axes.set(ylabel="reward", ylim=(-0.03, 1.03))
    legend_above(axes, columns=2)


def evaluations_panel(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """A curve for the held-out problems and one for each other set, over the rows that have it."""
    colours = itertools.chain([TAG_COLOURS["optim"]], itertools.cycle(OTHER_COLOURS))
    for (key, name), colour in zip(held_out_names(rows).items(), colours, strict=False):
        style: dict[str, Any] = {"marker": "o", "markersize": 5, "linewidth": 1.8}
        curve(axes, rows, key, color=colour, label=f"{name}, greedy", **style)


def held_out_names(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Keys of these evaluations, and what their curves are called."""
    names = {"exact_match": "held-out exact match"} if rows else {}
    others = beside_the_task(*rows).items()
    return names | {key: f"held-out exact match, {name}" for key, name in others}


def gap_panel(axes: Axes, run: Run) -> None:
    """Mean and largest log-probability gap, KL divergence from a reference; logarithmic."""
    if rows := run.rows_with("gap_mean", "gap_max"):
        for key, label, tag in (("gap_mean", "mean", "params"), ("gap_max", "max", "kv_cache")):
            shown = [{**row, key: max(row[key], 1e-9)} for row in rows]
            curve(axes, shown, key, color=TAG_COLOURS[tag], label=label)
        if away := [row for row in rows if row.get("kl_to_reference", 0) > 0]:
            style: dict[str, Any] = {"linestyle": "--", "label": "KL from the reference"}
            curve(axes, away, "kl_to_reference", color=OTHER_COLOURS[2], **style)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")  # its own writes mathtext
        axes.yaxis.set_minor_formatter(NullFormatter())
        legend_above(axes, side="right")
    axes.set(ylabel="nats a token")


def curve(axes: Axes, rows: Sequence[Mapping[str, Any]], key: str, **style: Any) -> None:
    """A line over steps, through the rows that have the key."""
    found = [row for row in rows if row.get(key) is not None]
    axes.plot([row["step"] for row in found], [row[key] for row in found], **style)


def legend_above(axes: Axes, columns: int = 3, side: str = "left", **style: Any) -> None:
    """A legend above the panel, at its left or right end."""
    place: dict[str, Any] = {"loc": f"lower {side}", "bbox_to_anchor": (side == "right", 1)}
    axes.legend(ncols=columns, fontsize=9, frameon=False, **place, **style)


def draw_memory(run: Run, file: Path) -> None:
    """Bytes per tag over real seconds: the whole session, one step, and its wake-up.

    Of several devices the first one's bytes are drawn.
    """
    name, first, last = run.one_step()
    panels = [("Memory on the device by tag, whole session", run.begin, run.end)]
    panels.append((f"One step ({name}) and its stages", first, last))
    if found := run.wake_up():
        panels.append((f"The wake-up of {name}, stage by stage", *found[1:]))
    heights = [1.0, 1.3, 1.3][: len(panels)]
    size = (12, 1.2 + 3.2 * len(panels))
    figure, rows = pyplot.subplots(len(panels), 1, figsize=size, height_ratios=heights)
    first_of_devices = [owner for owner in run.events if owner.partition("[")[2] in ("", "0]")]
    shown = replace(run, events={owner: run.events[owner] for owner in first_of_devices})
    for axes, (title, left, right) in zip(rows, panels, strict=True):
        headroom = 1.15 if axes is rows[0] else 1.5  # room for stage names
        stack_panel(axes, shown.levels(left, right), run.begin, MIB, headroom)
        axes.set(title=title, ylabel="MiB")
        if axes is not rows[0]:
            _bands(axes, run.stages(left, right), run.begin)
        tidy(axes)
    rows[-1].set_xlabel("seconds since the run began")
    entries = rows[0].get_legend_handles_labels()
    columns = len(entries[1])
    figure.legend(*entries, loc="upper center", ncols=columns, fontsize=9, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.96))
    save_picture(figure, file)


def stack_panel(axes: Axes, found: Levels, origin: float, unit: int, headroom: float) -> None:
    """Committed bytes of every key, stacked, as steps; dashed, what the host keeps."""
    times = [time - origin for time in found.times]
    if found.names:
        sizes = np.array([found.held(name) for name in found.names]) / unit
        area: dict[str, Any] = {"step": "post", "alpha": 0.9, "linewidth": 0, "zorder": 2}
        colours = colours_of(found.names)
        axes.stackplot(times, sizes, labels=found.names, colors=colours, **area)
    kept = [moment.kept / unit for moment in found.moments]
    line: dict[str, Any] = {"linestyle": "--", "linewidth": 1.1, "zorder": 3}
    axes.step(times, kept, where="post", color=INK, label="host backup", **line)
    axes.set_xlim(times[0], times[-1])
    axes.set_ylim(0, headroom * max([found.peak / unit, *kept, 1e-3]))


def colours_of(names: Iterable[str]) -> list[str]:
    """Every tag's own colour; other names take turns."""
    spare = itertools.cycle(OTHER_COLOURS)
    return [TAG_COLOURS.get(name) or next(spare) for name in names]


def _bands(axes: Axes, spans: Sequence[Span], origin: float) -> None:
    """Shades the stages and names those wide enough to read."""
    left, right = axes.get_xlim()
    top = axes.get_ylim()[1]
    for name, begin, finish in spans:
        colour = BAND_COLOURS[kind_of(name)]
        axes.axvspan(begin - origin, finish - origin, color=colour, zorder=0, linewidth=0)
        axes.axvline(begin - origin, color=EDGE, linewidth=0.6, zorder=1)
        if finish - begin > 0.012 * (right - left):
            wide = finish - begin > 0.14 * (right - left)
            text = f"{name}\n{format_seconds(finish - begin)}" if wide else name
            place: dict[str, Any] = {"rotation": 0 if wide else 90, "ha": "center", "va": "top"}
            middle = (begin + finish) / 2 - origin
            axes.text(middle, top * 0.985, text, color=INK, zorder=4, fontsize=8.5, **place)


def tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=GRID, linewidth=0.7, zorder=0)
    axes.title.set_fontsize(11)


def save_picture(figure: Figure, file: Path, **style: Any) -> None:
    """Writes a picture, whole, in the format of the file's ending or PNG; closes the figure."""
    try:
        with replaced(file) as partial:
            figure.savefig(partial, dpi=130, format=file.suffix[1:] or "png", **style)
    finally:
        pyplot.close(figure)
