"""Figures of time: when each stage ran, how long steps took, generation and weight sync."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from memsaver.errors import format_bytes
from recipes.watch.history import Span, format_seconds, is_step, kind_of
from recipes.watch.plots import GRID, OTHER_COLOURS, PALE, TAG_COLOURS, tidy
from recipes.watch.report.chart import Chart, Tip, draw_chart
from recipes.watch.report.learning import step_tips
from recipes.watch.report.reading import RunRecord

KINDS = {"rollout": TAG_COLOURS["weights"], "train": TAG_COLOURS["optim"], "switch": OTHER_COLOURS[2]}
LANE = 0.19  # inches
_COLUMNS = 300  # bars of a lane that are nearer than this part of the time are drawn as one


def run_chart(run: RunRecord) -> Chart | None:
    stages = [span for span in run.spans if not is_step(span[0])]
    if not stages:
        return None
    lanes = lane_names(stages)

    def build(figure: Figure) -> list[Tip]:
        axes = figure.subplots()
        tips = draw_lanes(axes, stages, 0.0, run.end)
        axes.set(xlabel="seconds since the run began")
        for time in run.breaks:
            axes.axvline(time, color=TAG_COLOURS["optim"], linestyle=":", linewidth=1.4)
        return tips

    resumed = " Dotted lines: the run was resumed there." if run.breaks else ""
    caption = (
        "One lane a stage, one bar each time it ran: blue the rollout generates, red the trainer computes, grey memory "
        f"changes hands. Long grey bars are time lost to switching; gaps are time that no stage accounts for.{resumed}"
    )
    return draw_chart("timeline", "Stages of the whole run", caption, 0.7 + LANE * len(lanes), build)


def lane_names(stages: Sequence[Span]) -> list[str]:
    """Stages in the order in which each first began."""
    return list(dict.fromkeys(name for name, _, _ in sorted(stages, key=lambda span: span[1])))


def draw_lanes(axes: Axes, stages: Sequence[Span], origin: float, end: float) -> list[Tip]:
    """A lane for every stage, from the top down; returns a tip for each bar."""
    lanes, tips = lane_names(stages), []
    smallest = (end - origin) / _COLUMNS
    for row, name in enumerate(lanes):
        bars = _merged([(begin, finish) for other, begin, finish in stages if other == name], smallest)
        places = [(begin - origin, max(finish - begin, smallest / 2)) for begin, finish, _, _ in bars]
        axes.broken_barh(places, (row - 0.38, 0.76), color=KINDS[kind_of(name)], linewidth=0, zorder=2)
        for (begin, width), (_, finish, count, spent) in zip(places, bars, strict=True):
            times = f"from {format_seconds(begin)} to {format_seconds(finish - origin)}"
            took = f"took {format_seconds(spent)}" if count == 1 else f"{count} times, {format_seconds(spent)} in all"
            text = f"{name}\n{took}\n{times}"
            tips.append(Tip(axes=axes, left=begin, right=begin + width, low=row - 0.5, high=row + 0.5, text=text))
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set(xlim=(0, end - origin), ylim=(len(lanes) - 0.5, -0.5))
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", color=GRID, linewidth=0.7, zorder=0)
    return tips


def _merged(bars: Sequence[tuple[float, float]], slack: float) -> list[tuple[float, float, int, float]]:
    """(begin, end, how many, seconds in all); bars that begin within `slack` after the last one join it."""
    out: list[tuple[float, float, int, float]] = []
    for begin, finish in sorted(bars):
        if out and begin - out[-1][1] < slack:
            first, last, count, spent = out[-1]
            out[-1] = (first, max(last, finish), count + 1, spent + finish - begin)
        else:
            out.append((begin, finish, 1, finish - begin))
    return out


def seconds_chart(run: RunRecord, largest: int = 5) -> Chart | None:
    """Seconds of each step, stacked: the stages that took most, then all others together."""
    rows = run.rows_with("stages", "step_seconds")
    if not rows:
        return None
    totals: dict[str, float] = {}
    for row in rows:
        for name, seconds in row["stages"].items():
            totals[name] = totals.get(name, 0.0) + seconds
    names = sorted(totals, key=lambda name: -totals[name])[:largest]
    other = "everything else"
    table = [{"step": row["step"], **{name: row["stages"].get(name, 0.0) for name in names}} for row in rows]
    for entry, row in zip(table, rows, strict=True):
        entry[other] = max(row["step_seconds"] - sum(entry[name] for name in names), 0.0)

    def build(figure: Figure) -> list[Tip]:
        axes = figure.subplots()
        base = [0.0] * len(table)
        colours = [*TAG_COLOURS.values(), OTHER_COLOURS[2]]
        for name, colour in zip([*names, other], colours[: len(names)] + colours[-1:], strict=True):
            heights = [entry[name] for entry in table]
            axes.bar(
                [entry["step"] for entry in table], heights, 0.9, base, color=colour, label=name, linewidth=0, zorder=2
            )
            base = [low + height for low, height in zip(base, heights, strict=True)]
        axes.set(xlabel="step", ylabel="seconds")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False)
        tidy(axes)
        labels = {name: f"{name} (s)" for name in [*names, other]}
        return step_tips(axes, table, labels)

    caption = (
        "Steps should take about the same time; longer ones evaluated or saved a checkpoint. A stage that grows from "
        "step to step, most often generation with longer answers, is the one to look at."
    )
    return draw_chart("seconds", "Seconds of each step", caption, 2.8, build)


def speed_chart(run: RunRecord) -> Chart | None:
    rows = run.rows_with("tokens_per_second")
    if not rows:
        return None

    def build(figure: Figure) -> list[Tip]:
        axes = figure.subplots()
        values = [row["tokens_per_second"] for row in rows]
        axes.plot([row["step"] for row in rows], values, color=TAG_COLOURS["weights"], linewidth=1.6)
        axes.set(xlabel="step", ylabel="tokens a second", ylim=(0, 1.08 * max(values)))
        tidy(axes)
        return step_tips(
            axes, rows, {"tokens_per_second": "tokens a second", "tokens": "tokens", "response_length": "mean length"}
        )

    caption = (
        "Sampled tokens over the seconds of generate_sequences. A fall at equal lengths means a smaller batch or a "
        "busy device."
    )
    return draw_chart("speed", "Generation", caption, 2.2, build)


def sync_chart(run: RunRecord) -> Chart | None:
    """Milliseconds of each weight sync, from the receipts in the rows, or else from the stage's time."""
    rows = [row for row in run.rows_with("stages") if "sync_weights" in row["stages"]]
    if not rows:
        return None
    keys = {"sync_ms": "whole stage (ms)", "copy_ms": "copies (ms)", "verify_ms": "reading back (ms)"}
    table = [_sync_figures(row) for row in rows]

    def build(figure: Figure) -> list[Tip]:
        axes = figure.subplots()
        for (key, label), colour in zip(
            keys.items(), (PALE, TAG_COLOURS["params"], TAG_COLOURS["kv_cache"]), strict=True
        ):
            points = [(entry["step"], entry[key]) for entry in table if key in entry]
            if points:
                axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.6, label=label.removesuffix(" (ms)"))
        axes.set(xlabel="step", ylabel="ms")
        axes.set_ylim(bottom=0)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False)
        tidy(axes)
        return step_tips(axes, table, {**keys, "mib": "MiB written", "rate": "GB/s of the copies"})

    sizes = {format_bytes(int(row["sync"]["nbytes"])) for row in rows if row.get("sync")}
    moved = f"Each sync wrote {', '.join(sorted(sizes))}. " if sizes else "Bytes were not recorded. "
    caption = f"{moved}The first sync also plans and maps; later ones should be equally fast."
    return draw_chart("sync", "Weight sync", caption, 2.4, build)


def _sync_figures(row: dict) -> dict:
    found = {"step": row["step"], "sync_ms": 1e3 * row["stages"]["sync_weights"]}
    if sync := row.get("sync"):
        found |= {"copy_ms": 1e3 * sync["copy_seconds"], "verify_ms": 1e3 * sync["verify_seconds"]}
        found["mib"] = sync["nbytes"] / 2**20
        if sync["copy_seconds"] and sync["nbytes"]:
            found["rate"] = sync["nbytes"] / sync["copy_seconds"] / 1e9
    return found
