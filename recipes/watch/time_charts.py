"""The report's figures over seconds: stages, who held the memory; without a trace, over steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from memsaver.errors import format_bytes
from recipes.watch.charts import Chart, Tip, between, draw_bars, draw_chart
from recipes.watch.history import (
    MOVES,
    TAG_COLOURS,
    Key,
    Levels,
    Row,
    Run,
    Span,
    by_device,
    by_process,
    by_tag,
    format_seconds,
    in_order,
    kind_of,
)
from recipes.watch.plots import (
    GRID,
    MIB,
    OTHER_COLOURS,
    colours_of,
    legend_above,
    stack_panel,
    tidy,
)

GIB = 2**30
LANE = 0.19  # inches
COLUMNS = 240  # of the memory of a whole run, two moments each
BARS = 300  # bars of a lane that are nearer than this part of the time are drawn as one
KINDS = {
    "rollout": TAG_COLOURS["weights"],
    "train": TAG_COLOURS["optim"],
    "switch": OTHER_COLOURS[2],
    "moves": OTHER_COLOURS[1],
}


def run_chart(run: Run) -> Chart | None:
    stages = run.stages()
    if not stages:
        return None
    stages += run.moves()

    def build(figure: Figure) -> list[Tip]:
        axes = figure.subplots()
        tips = _draw_lanes(axes, stages, run.begin, run.end)
        axes.set(xlabel="seconds since the run began")
        for time in run.breaks:
            axes.axvline(time, color=TAG_COLOURS["optim"], linestyle=":", linewidth=1.4)
        return tips

    resumed = " Dotted lines: the run was resumed there." if run.breaks else ""
    caption = (
        "One lane a stage, one bar each time it ran: blue the rollout generates, red the trainer "
        "computes, grey memory changes hands. Long grey bars are time lost to switching; brown is "
        "memory on its way, hidden where it lies under no grey; gaps are time that no stage "
        f"accounts for.{resumed}"
    )
    height = 0.7 + LANE * len(_lane_names(stages))
    return draw_chart("timeline", "Stages of the whole run", caption, height, build)


def step_chart(run: Run) -> Chart | None:
    caption = (
        "The last step that neither evaluated nor saved. Above its stages, below the memory that "
        "they find and leave. Grey is switching: it should be short. Brown is memory on its way, "
        "hidden where it lies under no grey."
    )
    name, first, last = run.one_step()
    return _close_up(run, "one-step", f"One step ({name})", caption, first, last)


def wake_up_chart(run: Run) -> Chart | None:
    found = run.wake_up()
    if found is None:
        return None
    caption = (
        "From training to generating. The engine's weights come back while the trainer's "
        "parameters are still there and are synced into place; then these park and the KV cache "
        "takes their room. During the sync both are there: the moment to look at where a run does "
        "not fit."
    )
    name, first, last = found
    return _close_up(run, "wake-up", f"The wake-up of {name}", caption, first, last)


def tags_chart(run: Run) -> Chart | None:
    caption = (
        "What is on the device, tag by tag, and dashed what the host keeps meanwhile. Trainer "
        "(params, optim) and rollout (weights, kv_cache, cuda_graph) should take turns: their sum "
        "is the peak that must fit."
    )
    return _over_time(run, "by-tag", "Memory by tag", caption, by_tag)


def processes_chart(run: Run) -> Chart | None:
    caption = (
        "The same bytes by the process that holds them. Each should fall to what it keeps when "
        "the other works; one that never falls holds memory the other could use."
    )
    return _over_time(run, "by-process", "Memory by process", caption, by_process)


def devices_chart(run: Run) -> Chart | None:
    """None where the run had one device."""
    if len({by_device(owner, "") for owner in run.events}) < 2:
        return None
    caption = "Bytes of each device. They should be equally high; the highest decides what fits."
    return _over_time(run, "by-device", "Memory by device", caption, by_device)


def phases_chart(run: Run) -> Chart | None:
    """Draws bytes by tag that the rows report, at the hand-overs, where no trace was written."""
    rows = [row for row in run.rows_with("memory") if row["memory"]]
    if run.events or not rows:
        return None
    phases = list(dict.fromkeys(itertools.chain.from_iterable(row["memory"] for row in rows)))
    held = itertools.chain.from_iterable(row["memory"].values() for row in rows)
    tags = in_order(set(itertools.chain.from_iterable(held)))

    def build(figure: Figure) -> list[Tip]:
        tips = []
        panels = figure.subplots(len(phases), 1, sharex=True, squeeze=False)[:, 0]
        for axes, phase in zip(panels, phases, strict=True):
            tips += _draw_phase(axes, phase, tags, rows)
        legend_above(panels[0], 6, "right", columnspacing=1.2)
        panels[-1].set_xlabel("step")
        return tips

    caption = "From the rows, because there is no trace: bytes by tag when the rollout works and "
    caption += "when the trainer does."
    title, height = "Memory by tag and phase", 0.6 + 1.6 * len(phases)
    return draw_chart("by-phase", title, caption, height, build)


def _draw_phase(axes: Axes, phase: str, tags: list[str], rows: Sequence[Row]) -> list[Tip]:
    table, texts = [], []
    for row in [row for row in rows if phase in row["memory"]]:
        held = {tag: row["memory"][phase].get(tag, 0) for tag in tags}
        table.append({"step": row["step"], **{tag: nbytes / MIB for tag, nbytes in held.items()}})
        texts.append(f"step {row['step']}, {phase}\n{_sizes(held)}")
    draw_bars(axes, table, dict(zip(tags, colours_of(tags), strict=True)))
    axes.set_title(phase, loc="left")
    axes.set_ylabel("MiB")
    tidy(axes)
    places = between([entry["step"] for entry in table])
    return [Tip(axes, *place, text) for place, text in zip(places, texts, strict=True)]


def _sizes(held: Mapping[str, int]) -> str:
    return "\n".join(f"{name}: {format_bytes(nbytes)}" for name, nbytes in held.items())


def _over_time(run: Run, name: str, title: str, caption: str, key: Key) -> Chart | None:
    if not run.events:
        return None
    whole = run.levels(run.begin, run.end, key)
    drawn = whole.thinned(COLUMNS)
    if drawn is not whole:
        caption += " Where several changes fall into one column, the fullest moment is drawn."

    def build(figure: Figure) -> list[Tip]:
        axes = figure.subplots()
        tips = _draw_stack(axes, drawn, run.begin)
        axes.set(xlabel="seconds since the run began")
        return tips

    return draw_chart(name, title, caption, 2.7, build)


def _draw_stack(axes: Axes, found: Levels, origin: float) -> list[Tip]:
    """The stack and its legend above; returns a tip for the time between two changes."""
    unit, label = (GIB, "GiB") if found.peak >= 4 * GIB else (MIB, "MiB")
    stack_panel(axes, found, origin, unit, 1.08)
    axes.set(ylabel=label)
    legend_above(axes, 6, columnspacing=1.2)
    tidy(axes)
    tips = []
    for moment, following in itertools.pairwise(found.moments):
        left, right = moment.time - origin, following.time - origin
        if right > left:
            sizes = _sizes({**moment.held, "in all": moment.total, "host": moment.kept})
            text = f"from {format_seconds(left)} to {format_seconds(right)}\n{sizes}"
            tips.append(Tip(axes, left, right, text))
    return tips


def _close_up(
    run: Run, name: str, title: str, caption: str, first: float, last: float
) -> Chart | None:
    """Stages above and memory below, between two times; None where no stage lies there."""
    stages = run.stages(first, last)
    if not stages or last <= first:
        return None
    stages += run.moves(first, last)
    lanes = LANE * len(_lane_names(stages))
    heights = [lanes, 1.9] if run.events else [lanes]

    def build(figure: Figure) -> list[Tip]:
        panels = figure.subplots(
            len(heights), 1, sharex=True, squeeze=False, height_ratios=heights
        )[:, 0]
        tips = _draw_lanes(panels[0], stages, first, last)
        _name_durations(panels[0], stages)
        if run.events:
            tips += _draw_stack(panels[1], run.levels(first, last), first)
        in_seconds = last - first >= 1.0
        panels[-1].set_xlabel("seconds" if in_seconds else "ms")
        if not in_seconds:
            panels[-1].xaxis.set_major_formatter(lambda value, _: f"{1000 * value:g}")
        return tips

    return draw_chart(name, title, caption, lanes + (2.7 if run.events else 0.5), build)


def _name_durations(axes: Axes, stages: Iterable[Span]) -> None:
    """Each lane's seconds beside its name."""
    spent: dict[str, float] = {}
    for name, begin, finish in stages:
        spent[name] = spent.get(name, 0.0) + finish - begin
    labels = [label.get_text() for label in axes.get_yticklabels()]
    axes.set_yticks(
        range(len(labels)), [f"{label}  {format_seconds(spent[label])}" for label in labels]
    )


def _lane_names(stages: Iterable[Span]) -> list[str]:
    """Stages in the order in which each first began, what is none of them last."""
    ordered = sorted(stages, key=lambda span: (span[0] == MOVES, span[1]))
    return list(dict.fromkeys(name for name, _, _ in ordered))


def _draw_lanes(axes: Axes, stages: Sequence[Span], origin: float, last: float) -> list[Tip]:
    """A lane for every stage, from the top down; returns a tip for each bar."""
    lanes, tips = _lane_names(stages), []
    smallest = (last - origin) / BARS
    for row, name in enumerate(lanes):
        times = [(begin, finish) for other, begin, finish in stages if other == name]
        style: dict[str, Any] = {"color": KINDS[kind_of(name)], "linewidth": 0, "zorder": 2}
        for start, end, count, spent in _merged(times, smallest):
            begin, width = start - origin, max(end - start, smallest / 2)
            axes.broken_barh([(begin, width)], (row - 0.38, 0.76), **style)
            took = f"took {format_seconds(spent)}"
            if count > 1:
                took = f"{count} times, {format_seconds(spent)} in all"
            text = f"{name}\n{took}\nfrom {format_seconds(begin)} to {format_seconds(end - origin)}"
            tips.append(Tip(axes, begin, begin + width, text, row - 0.5, row + 0.5))
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set(xlim=(0, last - origin), ylim=(len(lanes) - 0.5, -0.5))
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", color=GRID, linewidth=0.7, zorder=0)
    return tips


def _merged(
    bars: Iterable[tuple[float, float]], slack: float
) -> list[tuple[float, float, int, float]]:
    """(begin, end, how many, seconds in all); bars less than `slack` apart are one."""
    out: list[tuple[float, float, int, float]] = []
    for begin, finish in sorted(bars):
        if out and begin - out[-1][1] < slack:
            first, last, count, spent = out[-1]
            out[-1] = (first, max(last, finish), count + 1, spent + finish - begin)
        else:
            out.append((begin, finish, 1, finish - begin))
    return out
