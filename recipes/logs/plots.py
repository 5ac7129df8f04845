"""The figures of a run, each drawn once by matplotlib: as SVG in the report, as PNG in its folder.

A function of a run returns None where the run has nothing to draw.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase
from matplotlib.ticker import NullFormatter

from memsaver.errors import format_bytes
from memsaver.system.machine import replaced
from recipes.logs.history import (
    MOVES,
    TAG_COLOURS,
    Key,
    Levels,
    Row,
    Run,
    Span,
    beside_the_task,
    by_device,
    by_process,
    by_tag,
    format_seconds,
    in_order,
    joined,
    kind_of,
    seconds_of_stages,
)

MIB, GIB = 2**20, 2**30
WIDTH = 7.4  # inches; 72 units of the SVG each
LANE = 0.19  # inches
COLUMNS = 240  # of the memory of a whole run, two moments each
BARS = 300  # bars of a lane that are nearer than this part of the time are drawn as one
INK, GRID, EDGE = "#222222", "#e3e3e3", "#bbbbbb"
PALE = "#9db8d9"  # beside its smoothed curve
OTHER_COLOURS = ("#5aa7a7", "#b58863", "#8a8f98", "#d18ad0")
KINDS = {
    "rollout": TAG_COLOURS["weights"],
    "train": TAG_COLOURS["optim"],
    "switch": OTHER_COLOURS[2],
    "moves": OTHER_COLOURS[1],
}
_IN_INK = ("axes.labelcolor", "text.color", "xtick.labelcolor", "ytick.labelcolor")
STYLE: Any = {
    **dict.fromkeys(_IN_INK, INK),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), EDGE),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 9,
    "grid.color": GRID,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text: it can be selected, and read aloud
    "text.parse_math": False,  # a dollar in a stage's name is a dollar
}


class Tip(NamedTuple):
    """Text for a part of a panel, in data coordinates; without `low` and `high` from end to end."""

    axes: Axes
    left: float
    right: float
    text: str
    low: float | None = None
    high: float | None = None


class Chart(NamedTuple):
    """height: inches. draw: into an empty figure, or a part of one. note: behind the caption, which
    the page has under `name`.
    """

    name: str
    title: str
    height: float
    draw: Callable[[FigureBase], list[Tip]]
    note: str = ""


def draw_reward(run: Run, file: Path) -> None:
    """Reward and exact match above, log-probability mismatch below, over steps."""
    _draw([reward_chart(run), mismatch_chart(run)], file)


def draw_memory(run: Run, file: Path) -> None:
    """Bytes per tag over real seconds: the whole session, one step, and its wake-up.

    Of several devices the first one's bytes are drawn.
    """
    first = [owner for owner in run.events if owner.partition("[")[2] in ("", "0]")]
    run = replace(run, events={owner: run.events[owner] for owner in first})
    _draw([tags_chart(run), step_chart(run), wake_up_chart(run)], file)


@matplotlib.rc_context(STYLE)
def _draw(found: Iterable[Chart | None], file: Path) -> None:
    """One picture of all these, one below the other."""
    charts = [chart for chart in found if chart is not None]
    heights = [chart.height + 0.3 for chart in charts]  # of the title
    figure = Figure(figsize=(WIDTH, sum(heights)), layout="constrained")
    parts = figure.subfigures(len(charts), 1, squeeze=False, height_ratios=heights)[:, 0]
    for part, chart in zip(parts, charts, strict=True):
        part.suptitle(chart.title, x=0.01, horizontalalignment="left", fontsize=11)
        chart.draw(part)
    save_picture(figure, file)


def save_picture(figure: Figure, file: Path, **style: Any) -> None:
    """Writes a picture, whole, in the format of the file's ending or PNG."""
    with replaced(file) as partial:
        figure.savefig(partial, dpi=130, format=file.suffix[1:] or "png", **style)


def colours_of(names: Iterable[str]) -> list[str]:
    """Every tag's own colour; other names take turns."""
    spare = itertools.cycle(OTHER_COLOURS)
    return [TAG_COLOURS.get(name) or next(spare) for name in names]


def reward_chart(run: Run) -> Chart | None:
    title = "Reward and evaluations"
    return _by_step("reward", title, 3.4, run.rows, lambda axes: _draw_reward(axes, run))


def _draw_reward(axes: Axes, run: Run) -> None:
    train = run.rows_with("reward", "exact_match")
    rewards = [row["reward"] for row in train]
    smoothed = itertools.accumulate(rewards, lambda last, value: 0.7 * last + 0.3 * value)
    rows = [{**row, "smoothed": value} for row, value in zip(train, smoothed, strict=True)]
    blue, green = TAG_COLOURS["weights"], TAG_COLOURS["cuda_graph"]
    _curve(axes, rows, "reward", color=PALE, linewidth=1.2, label="reward, mean of the step")
    _curve(axes, rows, "smoothed", color=blue, linewidth=2.2, label="reward, smoothed")
    exact: dict[str, Any] = {"linestyle": "--", "label": "exact match of samples"}
    _curve(axes, rows, "exact_match", color=green, linewidth=1.4, **exact)
    draw_evaluations(axes, run.evaluations)
    axes.set(ylabel="reward", ylim=(-0.03, 1.03))
    _legend_above(axes, 2)


def draw_evaluations(axes: Axes, rows: Sequence[Row]) -> None:
    """A curve for the held-out problems and one for each other set, over the rows that have it."""
    names = {"exact_match": "held-out exact match"} if rows else {}
    others = beside_the_task(*rows).items()
    names |= {key: f"held-out exact match, {name}" for key, name in others}
    colours = itertools.chain([TAG_COLOURS["optim"]], itertools.cycle(OTHER_COLOURS))
    for (key, name), colour in zip(names.items(), colours, strict=False):
        style: dict[str, Any] = {"marker": "o", "markersize": 5, "linewidth": 1.8}
        _curve(axes, rows, key, color=colour, label=f"{name}, greedy", **style)


def mismatch_chart(run: Run) -> Chart | None:
    """Mean and largest log-probability mismatch, KL divergence from a reference; logarithmic."""
    rows = run.rows_with("mismatch_mean", "mismatch_max")

    def draw(axes: Axes) -> None:
        for key, label, tag in (
            ("mismatch_mean", "mean", "params"),
            ("mismatch_max", "max", "kv_cache"),
        ):
            shown = [{**row, key: max(row[key], 1e-9)} for row in rows]
            _curve(axes, shown, key, color=TAG_COLOURS[tag], label=label)
        if away := [row for row in rows if row.get("kl_to_reference", 0) > 0]:
            style: dict[str, Any] = {"linestyle": "--", "label": "KL from the reference"}
            _curve(axes, away, "kl_to_reference", color=OTHER_COLOURS[2], **style)
        axes.set(yscale="log", ylabel="nats a token")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")  # its own writes mathtext
        axes.yaxis.set_minor_formatter(NullFormatter())
        _legend_above(axes)

    title = "Log-probability mismatch, rollout against trainer"
    return _by_step("gap", title, 2.4, rows, draw)


def critic_chart(run: Run) -> Chart | None:
    """Value loss and KL to the reference, a panel each; None where no row has any of them."""
    labels = {"value_loss": "loss of the critic", "kl_to_reference": "KL, nats a token"}
    found = {key: label for key, label in labels.items() if run.rows_with(key)}
    if not found:
        return None

    def draw(figure: FigureBase) -> list[Tip]:
        panels = figure.subplots(len(found), 1, sharex=True, squeeze=False)[:, 0]
        colours = TAG_COLOURS.values()
        for axes, (key, label), colour in zip(panels, found.items(), colours, strict=False):
            _curve(axes, run.rows_with(key), key, color=colour, linewidth=1.6, label=label)
            axes.set(ylabel=label)
        return _finish_steps(panels)

    return Chart("critic", "Critic and reference", 0.5 + 1.7 * len(found), draw)


def seconds_chart(run: Run, largest: int = 5) -> Chart | None:
    """Seconds of each step, stacked: the stages that took most, then all others together."""
    rows = run.rows_with("stages", "step_seconds")
    names = list(seconds_of_stages(rows))[:largest]
    other = "everything else"
    table = []
    for row in rows:
        shown = {name: row["stages"].get(name, 0.0) for name in names}
        rest = max(row["step_seconds"] - sum(shown.values()), 0.0)
        table.append({"step": row["step"], **shown, other: rest})

    def draw(axes: Axes) -> None:
        colours = [*list(TAG_COLOURS.values())[: len(names)], OTHER_COLOURS[2]]
        _draw_bars(axes, table, dict(zip([*names, other], colours, strict=True)))
        axes.set(ylabel="seconds")
        _legend_above(axes)

    return _by_step("seconds", "Seconds of each step", 2.8, rows, draw)


def speed_chart(run: Run) -> Chart | None:
    rows = run.rows_with("tokens_per_second")

    def draw(axes: Axes) -> None:
        style = {"color": TAG_COLOURS["weights"], "label": "sampled"}
        _curve(axes, rows, "tokens_per_second", linewidth=1.6, **style)
        fastest = max(row["tokens_per_second"] for row in rows)
        axes.set(ylabel="tokens a second", ylim=(0, 1.08 * fastest))

    return _by_step("speed", "Generation", 2.2, rows, draw)


def sync_chart(run: Run) -> Chart | None:
    """Milliseconds of each weight sync, from the rows' receipts, else from the stage's time."""
    rows = [row for row in run.rows_with("stages") if "sync_weights" in row["stages"]]
    receipts = [{"step": row["step"], **row["sync"]} for row in rows if row.get("sync")]
    copied = [found for found in receipts if found["copy_seconds"] and found["nbytes"]]

    def draw(axes: Axes) -> None:
        stage = [{"step": row["step"], "sync": row["stages"]["sync_weights"]} for row in rows]
        curves = [(stage, "sync", "whole stage", PALE)]
        if receipts:
            curves.append((receipts, "copy_seconds", "copies", TAG_COLOURS["params"]))
            curves.append((receipts, "verify_seconds", "reading back", TAG_COLOURS["kv_cache"]))
        for table, key, label, colour in curves:
            times = [{"step": entry["step"], key: 1e3 * entry[key]} for entry in table]
            _curve(axes, times, key, color=colour, linewidth=1.6, label=label)
        axes.set(ylabel="ms")
        axes.set_ylim(bottom=0)
        _legend_above(axes)

    sizes = {format_bytes(int(found["nbytes"])) for found in receipts}
    moved = f"Each sync wrote {', '.join(sorted(sizes))}" if sizes else "Bytes were not recorded"
    if copied:
        rate = statistics.median(found["nbytes"] / found["copy_seconds"] for found in copied)
        moved += f", copied at {rate / 1e9:.2f} GB/s (median)"
    return _by_step("sync", "Weight sync", 2.4, rows, draw, f"{moved}.")


def phases_chart(run: Run) -> Chart | None:
    """Draws bytes by tag that the rows report, at the hand-overs, where no trace was written."""
    rows = [row for row in run.rows_with("memory") if row["memory"]]
    if run.events or not rows:
        return None
    phases = list(dict.fromkeys(itertools.chain.from_iterable(row["memory"] for row in rows)))
    held = itertools.chain.from_iterable(row["memory"].values() for row in rows)
    tags = in_order(set(itertools.chain.from_iterable(held)))
    colours = dict(zip(tags, colours_of(tags), strict=True))

    def draw(figure: FigureBase) -> list[Tip]:
        panels = figure.subplots(len(phases), 1, sharex=True, squeeze=False)[:, 0]
        for axes, phase in zip(panels, phases, strict=True):
            table = []
            for row in [row for row in rows if phase in row["memory"]]:
                sizes = {tag: row["memory"][phase].get(tag, 0) / MIB for tag in tags}
                table.append({"step": row["step"], **sizes})
            _draw_bars(axes, table, colours)
            axes.set(ylabel=f"{phase}, MiB")
        _legend_above(panels[0], 6)
        return _finish_steps(panels)

    return Chart("by-phase", "Memory by tag and phase", 0.6 + 1.6 * len(phases), draw)


def _by_step(
    name: str,
    title: str,
    height: float,
    rows: Sequence[Row],
    draw: Callable[[Axes], None],
    note: str = "",
) -> Chart | None:
    """One panel over steps; None where there is no row."""

    def draw_panel(figure: FigureBase) -> list[Tip]:
        axes = figure.subplots()
        draw(axes)
        return _finish_steps([axes])

    return Chart(name, title, height, draw_panel, note) if rows else None


def _finish_steps(panels: Iterable[Axes]) -> list[Tip]:
    """A tip for each panel and step, with what the curves and bars are there."""
    tips = []
    for axes in panels:
        axes.set(xlabel="step")
        axes.label_outer()
        axes.grid(axis="y", linewidth=0.7, zorder=0)
        found: dict[int, list[str]] = {}
        points: list[tuple[Any, Any, Any]] = []
        for line in axes.lines:
            data: Any = line.get_xydata()
            points += [(line.get_label(), *point) for point in data]
        for bars in axes.containers:
            for bar in bars:
                points.append((bars.get_label(), bar.get_center()[0], bar.get_height()))
        for label, step, value in points:
            found.setdefault(round(step), []).append(f"{label}: {value:.6g}")
        for step, texts in found.items():
            text = "\n".join([f"step {step} ({axes.get_ylabel()})", *texts])
            tips.append(Tip(axes, step - 0.5, step + 0.5, text))
    return tips


def _curve(axes: Axes, rows: Sequence[Row], key: str, **style: Any) -> None:
    """A line over steps, through the rows that have the key."""
    found = [row for row in rows if row.get(key) is not None]
    axes.plot([row["step"] for row in found], [row[key] for row in found], **style)


def _draw_bars(axes: Axes, table: Sequence[Row], colours: Mapping[str, str]) -> None:
    """A bar a step, made of the values under each of the names, one above the other."""
    steps, base = [entry["step"] for entry in table], np.zeros(len(table))
    for name, colour in colours.items():
        heights = np.array([entry[name] for entry in table])
        axes.bar(steps, heights, 0.9, base, color=colour, label=name, linewidth=0, zorder=2)
        base += heights


def _legend_above(axes: Axes, columns: int = 3) -> None:
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "columnspacing": 1.2}
    axes.legend(ncols=columns, **place)


def run_chart(run: Run) -> Chart | None:
    stages = run.stages()
    if not stages:
        return None
    stages += run.moves()

    def draw(figure: FigureBase) -> list[Tip]:
        axes = figure.subplots()
        tips = _draw_lanes(axes, stages, run.begin, run.end)
        axes.set(xlabel="seconds since the run began")
        for time in run.breaks:
            axes.axvline(time, color=TAG_COLOURS["optim"], linestyle=":", linewidth=1.4)
        return tips

    note = "Dotted lines: the run was resumed there." if run.breaks else ""
    return Chart("timeline", "Stages of the whole run", 0.7 + _lanes(stages), draw, note)


def step_chart(run: Run) -> Chart | None:
    name, first, last = run.one_step()
    return _close_up(run, "one-step", f"One step ({name})", first, last)


def wake_up_chart(run: Run) -> Chart | None:
    found = run.wake_up()
    if found is None:
        return None
    name, first, last = found
    return _close_up(run, "wake-up", f"The wake-up of {name}", first, last)


def _close_up(run: Run, name: str, title: str, first: float, last: float) -> Chart | None:
    """Stages above and memory below, between two times; None where no stage lies there."""
    stages = run.stages(first, last)
    if not stages or last <= first:
        return None
    stages += run.moves(first, last)
    heights = [_lanes(stages), *([1.9] if run.events else [])]

    def draw(figure: FigureBase) -> list[Tip]:
        panels = figure.subplots(
            len(heights), 1, sharex=True, squeeze=False, height_ratios=heights
        )[:, 0]
        tips = _draw_lanes(panels[0], stages, first, last)
        if run.events:
            tips += _draw_levels(panels[1], run.levels(first, last), first)
        in_seconds = last - first >= 1.0
        panels[-1].set_xlabel("seconds" if in_seconds else "ms")
        if not in_seconds:
            panels[-1].xaxis.set_major_formatter(lambda value, _: f"{1000 * value:g}")
        return tips

    return Chart(name, title, heights[0] + (2.7 if run.events else 0.5), draw)


def tags_chart(run: Run) -> Chart | None:
    return _over_time(run, "by-tag", "Memory by tag", by_tag)


def processes_chart(run: Run) -> Chart | None:
    return _over_time(run, "by-process", "Memory by process", by_process)


def devices_chart(run: Run) -> Chart | None:
    """None where the run had one device."""
    if len({by_device(owner, "") for owner in run.events}) < 2:
        return None
    return _over_time(run, "by-device", "Memory by device", by_device)


def _over_time(run: Run, name: str, title: str, key: Key) -> Chart | None:
    if not run.events:
        return None
    whole = run.levels(run.begin, run.end, key)
    drawn = whole.thinned(COLUMNS)
    many = "Where several changes fall into one column, the fullest moment is drawn."

    def draw(figure: FigureBase) -> list[Tip]:
        axes = figure.subplots()
        axes.set(xlabel="seconds since the run began")
        return _draw_levels(axes, drawn, run.begin)

    return Chart(name, title, 2.7, draw, "" if drawn is whole else many)


def _draw_levels(axes: Axes, found: Levels, origin: float) -> list[Tip]:
    """Committed bytes of every name, stacked, as steps; dashed, what the host keeps; returns a tip
    for the time between two changes.
    """
    unit, label = (GIB, "GiB") if found.peak >= 4 * GIB else (MIB, "MiB")
    times = [time - origin for time in found.times]
    if found.names:
        sizes = np.array([found.held(name) for name in found.names]) / unit
        area: dict[str, Any] = {"step": "post", "alpha": 0.9, "linewidth": 0, "zorder": 2}
        colours = colours_of(found.names)
        axes.stackplot(times, sizes, labels=found.names, colors=colours, **area)
    kept = [moment.kept / unit for moment in found.moments]
    line: dict[str, Any] = {"linestyle": "--", "linewidth": 1.1, "zorder": 3}
    axes.step(times, kept, where="post", color=INK, label="host backup", **line)
    top = 1.08 * max([found.peak / unit, *kept, 1e-3])
    axes.set(xlim=(times[0], times[-1]), ylim=(0, top), ylabel=label)
    axes.grid(axis="y", linewidth=0.7, zorder=0)
    _legend_above(axes, 6)
    tips = []
    for moment, (left, right) in zip(found.moments, itertools.pairwise(times), strict=False):
        held = {**moment.held, "in all": moment.total, "host": moment.kept}
        lines = [f"from {format_seconds(left)} to {format_seconds(right)}"]
        lines += [f"{name}: {format_bytes(nbytes)}" for name, nbytes in held.items()]
        if right > left:
            tips.append(Tip(axes, left, right, "\n".join(lines)))
    return tips


def _lanes(stages: Iterable[Span]) -> float:
    """Inches."""
    return LANE * len({name for name, _, _ in stages})


def _draw_lanes(axes: Axes, stages: Sequence[Span], first: float, last: float) -> list[Tip]:
    """A lane for every stage, as each first began, what is none of them last; returns the bars'
    tips.
    """
    lanes: dict[str, list[tuple[float, float]]] = {}
    for name, begin, finish in sorted(stages, key=lambda span: (span[0] == MOVES, span[1])):
        lanes.setdefault(name, []).append((begin - first, finish - first))
    labels, tips = [], []
    slack = (last - first) / BARS
    for row, (name, times) in enumerate(lanes.items()):
        spent = sum(finish - begin for begin, finish in times)
        labels.append(f"{name}  {format_seconds(spent)}")
        bars = joined(times, slack)
        widths = [(begin, max(finish - begin, slack / 2)) for begin, finish in bars]
        style: dict[str, Any] = {"color": KINDS[kind_of(name)], "linewidth": 0, "zorder": 2}
        axes.broken_barh(widths, (row - 0.38, 0.76), **style)
        for (begin, width), (_, finish) in zip(widths, bars, strict=True):
            text = f"{name}\nfrom {format_seconds(begin)} to {format_seconds(finish)}"
            tips.append(Tip(axes, begin, begin + width, text, row - 0.5, row + 0.5))
    axes.set_yticks(range(len(lanes)), labels)
    axes.set(xlim=(0, last - first), ylim=(len(lanes) - 0.5, -0.5))
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x", linewidth=0.7, zorder=0)
    return tips
