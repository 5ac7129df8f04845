"""The report's figures over steps, and SVG of them in the page's colours, with exact values."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from memsaver.errors import format_bytes
from recipes.watch.history import TAG_COLOURS, Row, Run, seconds_of_stages
from recipes.watch.plots import (
    EDGE,
    GRID,
    INK,
    MIB,
    OTHER_COLOURS,
    PALE,
    curve,
    gap_panel,
    held_out_names,
    legend_above,
    reward_panel,
    tidy,
)

WIDTH = 7.4  # inches; 72 units of the SVG each
_LINE_COLOURS = ("axes.labelcolor", "text.color", "xtick.labelcolor", "ytick.labelcolor")
_EDGE_COLOURS = ("axes.edgecolor", "xtick.color", "ytick.color")
_GROUNDS = ("figure.facecolor", "axes.facecolor", "savefig.facecolor")
_STYLE: dict[str, Any] = {
    **dict.fromkeys(_LINE_COLOURS, INK),
    **dict.fromkeys(_EDGE_COLOURS, EDGE),
    **dict.fromkeys(_GROUNDS, "none"),
    "svg.fonttype": "none",  # text stays text: it can be selected, and read aloud
    "font.size": 9,
    "legend.frameon": False,
}
VARIABLES = {INK: "ink", GRID: "grid", EDGE: "edge", PALE: "pale"}
VARIABLES |= {colour: tag.replace("_", "-") for tag, colour in TAG_COLOURS.items()}
VARIABLES |= {colour: f"other-{index}" for index, colour in enumerate(OTHER_COLOURS, 1)}


class Tip(NamedTuple):
    """Text for a part of a panel, in data coordinates; without `low` and `high` from end to end."""

    axes: Axes
    left: float
    right: float
    text: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A figure on the page. caption: what to look for. svg: complete, refers to nothing outside."""

    name: str
    title: str
    caption: str
    svg: str


def draw_chart(
    name: str, title: str, caption: str, height: float, build: Callable[[Figure], Sequence[Tip]]
) -> Chart:
    """`build` draws into an empty figure of WIDTH x `height` inches; it returns the tips."""
    style: Any = {**_STYLE, "svg.hashsalt": name}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(WIDTH, height), dpi=72, layout="constrained")
        tips = build(figure)
        buffer = io.StringIO()
        unsigned = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", metadata=unsigned)
    overlay = "".join(_rectangle(tip, 72 * height) for tip in tips)
    box = f"0 0 {72 * WIDTH:g} {72 * height:g}"
    head = f'<svg class="chart" viewBox="{box}" role="img" tabindex="0"'
    body = f'{_body(buffer.getvalue())}<g class="tips">{overlay}</g>'
    svg = f'{head} aria-label="{escape(title)}">{body}</svg>'
    return Chart(name=name, title=title, caption=caption, svg=svg)


def _body(svg: str) -> str:
    """Returns what is inside the outermost element, in the theme's colours, without ids."""
    inside = svg[svg.index(">", svg.index("<svg")) + 1 : svg.rindex("</svg>")]
    inside = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", inside, flags=re.DOTALL)
    inside = re.sub(r' id="[a-zA-Z0-9]+_\d+"', "", inside).replace("xlink:href", "href")
    inside = re.sub(r"(\.\d\d)\d+", r"\1", inside)  # hundredths of a point are fine enough
    inside = re.sub(r"\n\s*", "\n", inside)
    return re.sub("#[0-9a-f]{6}", lambda found: _variable(found[0]), inside)


def _variable(colour: str) -> str:
    return f"var(--{VARIABLES[colour]})" if colour in VARIABLES else colour


def _rectangle(tip: Tip, height: float) -> str:
    low, high = tip.axes.get_ylim() if tip.low is None or tip.high is None else (tip.low, tip.high)
    corners = tip.axes.transData.transform([(tip.left, low), (tip.right, high)])
    (left, right), (one, other) = sorted(corners[:, 0]), sorted(height - corners[:, 1])
    size = f'width="{max(right - left, 0.6):.2f}" height="{other - one:.2f}"'
    place = f'x="{left:.2f}" y="{one:.2f}" {size}'
    return f"<rect {place}><title>{escape(tip.text)}</title></rect>"


def reward_chart(run: Run) -> Chart | None:
    rows = run.rows_with("reward", "exact_match")
    held_out = held_out_names(run.evaluations)
    after = {row["step"]: row for row in run.evaluations}
    table = []
    for row in rows:
        evaluation = after.get(row["step"], {})
        table.append({**row, **{f"held out {key}": evaluation.get(key) for key in held_out}})
    names = {"reward": "reward", "exact_match": "exact match of samples"}
    names |= {f"held out {key}": name for key, name in held_out.items()}
    caption = (
        "Up is better. The smoothed reward should rise, and the held-out points with it: samples "
        "that improve alone are problems learnt by heart."
    )
    title = "Reward and evaluations"
    return _by_step(
        "reward", title, caption, 3.4, table, names, lambda axes: reward_panel(axes, run)
    )


def gap_chart(run: Run) -> Chart | None:
    rows = run.rows_with("gap_mean", "gap_max")
    names = {"gap_mean": "mean gap", "gap_max": "largest gap"}
    caption = (
        "How far the rollout's log-probabilities are from the trainer's for the same tokens. It "
        "should stay flat: below 1e-5 on the mean in float32, some 1e-2 in bfloat16. A jump means "
        "that the two no longer compute with the same weights."
    )
    title = "Log-probability gap, rollout against trainer"
    return _by_step("gap", title, caption, 2.4, rows, names, lambda axes: gap_panel(axes, run))


def critic_chart(run: Run) -> Chart | None:
    """Value loss and KL to the reference, a panel each; None where no row has any of them."""
    labels = {
        "value_loss": "loss of the critic",
        "kl_to_reference": "KL to the reference, nats a token",
    }
    found = {key: label for key, label in labels.items() if run.rows_with(key)}
    if not found:
        return None

    def build(figure: Figure) -> list[Tip]:
        panels = figure.subplots(len(found), 1, sharex=True, squeeze=False)[:, 0]
        tips = []
        for axes, (key, label), colour in zip(
            panels, found.items(), TAG_COLOURS.values(), strict=False
        ):
            curve(axes, run.rows_with(key), key, color=colour, linewidth=1.6)
            axes.set_title(label, loc="left")
            tidy(axes)
            tips += step_tips(axes, run.rows_with(key), {key: label})
        panels[-1].set_xlabel("step")
        return tips

    caption = (
        "The critic's loss should fall at first and then stay low. KL grows as the policy leaves "
        "the reference; growth that speeds up while the reward does not is drift."
    )
    return draw_chart("critic", "Critic and reference", caption, 0.5 + 1.7 * len(found), build)


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
        draw_bars(axes, table, dict(zip([*names, other], colours, strict=True)))
        axes.set(ylabel="seconds")
        legend_above(axes)

    caption = (
        "Steps should take about the same time; longer ones evaluated or saved a checkpoint. A "
        "stage that grows from step to step, most often generation with longer answers, is the "
        "one to look at."
    )
    labels = {name: f"{name} (s)" for name in [*names, other]}
    return _by_step("seconds", "Seconds of each step", caption, 2.8, table, labels, draw)


def speed_chart(run: Run) -> Chart | None:
    rows = run.rows_with("tokens_per_second")
    names = {
        "tokens_per_second": "tokens a second",
        "tokens": "tokens",
        "response_length": "mean length",
    }

    def draw(axes: Axes) -> None:
        curve(axes, rows, "tokens_per_second", color=TAG_COLOURS["weights"], linewidth=1.6)
        fastest = max(row["tokens_per_second"] for row in rows)
        axes.set(ylabel="tokens a second", ylim=(0, 1.08 * fastest))

    caption = (
        "Sampled tokens over the seconds of generate_sequences. A fall at equal lengths means a "
        "smaller batch or a busy device."
    )
    return _by_step("speed", "Generation", caption, 2.2, rows, names, draw)


def sync_chart(run: Run) -> Chart | None:
    """Milliseconds of each weight sync, from the rows' receipts, else from the stage's time."""
    rows = [row for row in run.rows_with("stages") if "sync_weights" in row["stages"]]
    table = [_sync_figures(row) for row in rows]
    names = {
        "sync_ms": "whole stage (ms)",
        "copy_ms": "copies (ms)",
        "verify_ms": "reading back (ms)",
    }

    def draw(axes: Axes) -> None:
        colours = (PALE, TAG_COLOURS["params"], TAG_COLOURS["kv_cache"])
        for (key, label), colour in zip(names.items(), colours, strict=True):
            if any(key in entry for entry in table):
                style: dict[str, Any] = {"linewidth": 1.6, "label": label.removesuffix(" (ms)")}
                curve(axes, table, key, color=colour, **style)
        axes.set(ylabel="ms")
        axes.set_ylim(bottom=0)
        legend_above(axes)

    sizes = {format_bytes(int(row["sync"]["nbytes"])) for row in rows if row.get("sync")}
    moved = f"Each sync wrote {', '.join(sorted(sizes))}." if sizes else "Bytes were not recorded."
    caption = f"{moved} The first sync also plans and maps; later ones should be equally fast."
    told = {**names, "mib": "MiB written", "rate": "GB/s of the copies"}
    return _by_step("sync", "Weight sync", caption, 2.4, table, told, draw)


def _sync_figures(row: Row) -> Row:
    found = {"step": row["step"], "sync_ms": 1e3 * row["stages"]["sync_weights"]}
    if sync := row.get("sync"):
        found |= {"copy_ms": 1e3 * sync["copy_seconds"], "verify_ms": 1e3 * sync["verify_seconds"]}
        found["mib"] = sync["nbytes"] / MIB
        if sync["copy_seconds"] and sync["nbytes"]:
            found["rate"] = sync["nbytes"] / sync["copy_seconds"] / 1e9
    return found


def _by_step(
    name: str,
    title: str,
    caption: str,
    height: float,
    rows: Sequence[Row],
    names: Mapping[str, str],
    draw: Callable[[Axes], None],
) -> Chart | None:
    """One panel over steps, with a tip a row; None where there is no row."""

    def build(figure: Figure) -> list[Tip]:
        axes = figure.subplots()
        draw(axes)
        axes.set(xlabel="step")
        tidy(axes)
        return step_tips(axes, rows, names)

    return draw_chart(name, title, caption, height, build) if rows else None


def step_tips(axes: Axes, rows: Sequence[Row], names: Mapping[str, str]) -> list[Tip]:
    """One tip a row: its step, and the value of every key of `names` under the name given there."""
    tips = []
    for row, (left, right) in zip(rows, between([row["step"] for row in rows]), strict=True):
        known = {key: label for key, label in names.items() if row.get(key) is not None}
        lines = [f"step {row['step']}"]
        lines += [f"{label}: {row[key]:.6g}" for key, label in known.items()]
        tips.append(Tip(axes, left, right, "\n".join(lines)))
    return tips


def between(values: Sequence[float]) -> list[tuple[float, float]]:
    """The part of the axis that is nearest to each value: half way to its neighbours on both sides.

    >>> between([1, 2, 4])
    [(0.5, 1.5), (1.5, 3.0), (3.0, 5.0)]
    """
    if len(values) < 2:
        return [(value - 0.5, value + 0.5) for value in values]
    middles = [(one + other) / 2 for one, other in itertools.pairwise(values)]
    edges = [2 * values[0] - middles[0], *middles, 2 * values[-1] - middles[-1]]
    return list(itertools.pairwise(edges))


def draw_bars(axes: Axes, table: Sequence[Row], colours: Mapping[str, str]) -> None:
    """A bar a step, made of the values under each of the names, one above the other."""
    steps, base = [entry["step"] for entry in table], [0.0] * len(table)
    for name, colour in colours.items():
        heights = [entry[name] for entry in table]
        axes.bar(steps, heights, 0.9, base, color=colour, label=name, linewidth=0, zorder=2)
        base = [low + height for low, height in zip(base, heights, strict=True)]
