"""The two pictures of a run, and their panels. Imported only where they are drawn, because it needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes

from memsaver.common.files import replaced
from recipes.watch.history import (
    Levels,
    Span,
    format_seconds,
    kind_of,
    levels,
    one_step,
    smooth,
    stages_between,
    wake_up,
)
from recipes.watch.live import beside_the_task

if TYPE_CHECKING:
    from memsaver import Event

matplotlib.rcParams["text.parse_math"] = False  # a dollar in a stage's name is a dollar
MIB = 2**20
INK, GRID, EDGE = "#222222", "#e3e3e3", "#bbbbbb"
TAG_COLOURS = {
    "weights": "#3b6fb6",
    "kv_cache": "#f0a73a",
    "cuda_graph": "#7bb662",
    "params": "#8566ab",
    "optim": "#c95d63",
    "critic": "#2c7f78",
    "critic_optim": "#e08fa5",
    "reference": "#6b6f76",
}
OTHER_COLOURS = ("#5aa7a7", "#b58863", "#8a8f98", "#d18ad0")
BAND_COLOURS = {"rollout": "#eaf2fb", "train": "#fbeeee", "switch": "#f4f4f4"}
PALE = "#9db8d9"  # beside its smoothed curve

Row = Mapping[str, Any]


def draw_reward(rows: Sequence[Row], file: Path) -> None:
    """Reward and exact match above, log-probability gap below, over steps."""
    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(9, 7), sharex=True, height_ratios=(2, 1))
    reward_panel(top, rows)
    gap_panel(bottom, rows)
    bottom.set(xlabel="step", title="Log-probability gap, rollout against trainer")
    for axes in (top, bottom):
        tidy(axes)
    _save(figure, file)


def reward_panel(axes: Axes, rows: Sequence[Row]) -> None:
    """Reward and exact match of the training rows, and every kind of evaluation."""
    train = [row for row in rows if row["kind"] == "train"]
    steps, rewards = [row["step"] for row in train], [row["reward"] for row in train]
    axes.plot(steps, rewards, color=PALE, linewidth=1.2, label="reward, mean of the step")
    axes.plot(steps, smooth(rewards), color=TAG_COLOURS["weights"], linewidth=2.2, label="reward, smoothed")
    exact, green = [row["exact_match"] for row in train], TAG_COLOURS["cuda_graph"]
    axes.plot(steps, exact, color=green, linewidth=1.4, linestyle="--", label="exact match of samples")
    evaluations_panel(axes, [row for row in rows if row["kind"] == "eval"])
    axes.set(ylabel="reward", ylim=(-0.03, 1.03))
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, fontsize=9, frameon=False)


def evaluations_panel(axes: Axes, rows: Sequence[Row]) -> None:
    """A curve for the held-out problems and one for each other set, over the rows that have it."""
    curves = {"exact_match": "held-out exact match, greedy"} if rows else {}
    for row in rows:
        curves |= {key: f"held-out exact match, {name}, greedy" for key, name in beside_the_task(row).items()}
    colours = (TAG_COLOURS["optim"], *OTHER_COLOURS * len(curves))
    for (key, label), colour in zip(curves.items(), colours, strict=False):
        points = [(row["step"], row[key]) for row in rows if key in row]
        axes.plot(*zip(*points, strict=True), "o-", color=colour, linewidth=1.8, markersize=5, label=label)


def gap_panel(axes: Axes, rows: Sequence[Row]) -> None:
    """Of the training rows: mean and largest log-probability gap, KL divergence from a reference; logarithmic."""
    train = [row for row in rows if row["kind"] == "train"]
    steps = [row["step"] for row in train]
    if train:
        for key, label, tag in (("gap_mean", "mean", "params"), ("gap_max", "max", "kv_cache")):
            axes.semilogy(steps, [max(row[key], 1e-9) for row in train], color=TAG_COLOURS[tag], label=label)
        if away := [row for row in train if row.get("kl_to_reference", 0) > 0]:
            distance = [row["kl_to_reference"] for row in away]
            style: dict[str, Any] = {"color": OTHER_COLOURS[2], "linestyle": "--", "label": "KL from the reference"}
            axes.semilogy([row["step"] for row in away], distance, **style)
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, fontsize=9, frameon=False)
    axes.set(ylabel="nats a token")


def draw_memory(spans: Sequence[Span], events: Mapping[str, Sequence[Event]], file: Path) -> None:
    """Bytes per tag over real seconds: the whole session, one step with its stages, and the wake-up inside it.

    events: by owner; of several devices the first one's are drawn.
    """
    start = min(begin for _, begin, _ in spans)
    end = max(finish for _, _, finish in spans)
    shown = {owner: group for owner, group in events.items() if owner.partition("[")[2] in ("", "0]")}
    origin = min([start, *(event.time - event.seconds for group in shown.values() for event in group)])
    panels = [("Memory on the device by tag, whole session", origin, end)]
    first, last, step = one_step(spans)
    panels.append((f"One step ({step}) and its stages", first, last))
    if found := wake_up(spans, first, last):
        panels.append((f"The wake-up of {step}, stage by stage", *found))
    heights = [1.0, 1.3, 1.3][: len(panels)]
    figure, rows = pyplot.subplots(len(panels), 1, figsize=(12, 1.2 + 3.2 * len(panels)), height_ratios=heights)
    for axes, (title, left, right) in zip(rows, panels, strict=True):
        headroom = 1.15 if axes is rows[0] else 1.5  # room for stage names
        stack_panel(axes, levels(shown, left, right), origin, MIB, headroom)
        axes.set(title=title, ylabel="MiB")
        if axes is not rows[0]:
            _bands(axes, stages_between(spans, left, right), origin)
        tidy(axes)
    rows[-1].set_xlabel("seconds since the run began")
    handles, labels = rows[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=len(labels), fontsize=9, frameon=False)
    _save(figure, file, top=0.96)


def stack_panel(axes: Axes, found: Levels, origin: float, unit: int, headroom: float) -> None:
    """Committed bytes of every key, stacked, as steps; the dashed line is what the host keeps for paused tags."""
    times = [time - origin for time in found.times]
    base = [0.0] * len(times)
    spare = iter(OTHER_COLOURS * (1 + len(found.held)))
    for name, held in found.held.items():
        upper = [low + nbytes / unit for low, nbytes in zip(base, held, strict=True)]
        colour = TAG_COLOURS.get(name) or next(spare)
        axes.fill_between(times, base, upper, step="post", color=colour, alpha=0.9, linewidth=0, label=name, zorder=2)
        base = upper
    kept = [nbytes / unit for nbytes in found.kept]
    style: dict[str, Any] = {"color": INK, "linestyle": "--", "linewidth": 1.1, "zorder": 3}
    axes.step(times, kept, where="post", label="host backup", **style)
    axes.set_xlim(times[0], times[-1])
    axes.set_ylim(0, headroom * max([*base, *kept, 1e-3]))


def _bands(axes: Axes, spans: Sequence[Span], origin: float) -> None:
    """Shades the stages and names those wide enough to read."""
    left, right = axes.get_xlim()
    top = axes.get_ylim()[1]
    for name, begin, finish in spans:
        axes.axvspan(begin - origin, finish - origin, color=BAND_COLOURS[kind_of(name)], zorder=0, linewidth=0)
        axes.axvline(begin - origin, color=EDGE, linewidth=0.6, zorder=1)
        if finish - begin > 0.012 * (right - left):
            middle = (begin + finish) / 2 - origin
            wide = finish - begin > 0.14 * (right - left)
            text = f"{name}\n{format_seconds(finish - begin)}" if wide else name
            place: dict[str, Any] = {"rotation": 0 if wide else 90, "ha": "center", "va": "top", "fontsize": 8.5}
            axes.text(middle, top * 0.985, text, color=INK, zorder=4, **place)


def tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=GRID, linewidth=0.7, zorder=0)
    axes.title.set_fontsize(11)


def _save(figure: Any, file: Path, top: float = 1.0) -> None:
    figure.tight_layout(rect=(0, 0, 1, top))
    try:
        with replaced(file) as partial:
            figure.savefig(partial, dpi=130, format="png")
    finally:
        pyplot.close(figure)
