"""From a matplotlib figure to SVG for the page: colours that follow its theme, and exact values under the pointer."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recipes.watch.plots import EDGE, GRID, INK, OTHER_COLOURS, PALE, TAG_COLOURS

WIDTH = 7.4  # inches; 72 units of the SVG each
_LINE_COLOURS = ("axes.labelcolor", "text.color", "xtick.labelcolor", "ytick.labelcolor")
_EDGE_COLOURS = ("axes.edgecolor", "xtick.color", "ytick.color")
_STYLE: dict[str, Any] = {
    **dict.fromkeys(_LINE_COLOURS, INK),
    **dict.fromkeys(_EDGE_COLOURS, EDGE),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"),
    "svg.fonttype": "none",  # text stays text: it can be selected, and read aloud
    "font.size": 9,
}
VARIABLES = {INK: "ink", GRID: "grid", EDGE: "edge", PALE: "pale"}
VARIABLES |= {colour: tag.replace("_", "-") for tag, colour in TAG_COLOURS.items()}
VARIABLES |= {colour: f"other-{index}" for index, colour in enumerate(OTHER_COLOURS, 1)}


@dataclass(frozen=True, kw_only=True)
class Tip:
    """Text for a part of a panel, in its data coordinates; without `low` and `high` from bottom to top."""

    axes: Axes
    left: float
    right: float
    text: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A figure on the page. caption: what to look for. svg: complete, no scripts, no address of anything outside."""

    name: str
    title: str
    caption: str
    svg: str


def draw_chart(name: str, title: str, caption: str, height: float, build: Callable[[Figure], Sequence[Tip]]) -> Chart:
    """`build` draws into an empty figure of WIDTH x `height` inches and returns what to show where."""
    style: Any = {**_STYLE, "svg.hashsalt": name}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(WIDTH, height), dpi=72, layout="constrained")
        tips = build(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    body = _themed(_body(buffer.getvalue()))
    overlay = "".join(_rectangle(tip, 72 * height) for tip in tips)
    head = f'<svg class="chart" viewBox="0 0 {72 * WIDTH:g} {72 * height:g}" role="img" tabindex="0"'
    svg = f'{head} aria-label="{escape(title)}">{body}<g class="tips">{overlay}</g></svg>'
    return Chart(name=name, title=title, caption=caption, svg=svg)


def _body(svg: str) -> str:
    """What is inside the outermost element, without names that nothing refers to: several charts share a page."""
    inside = svg[svg.index(">", svg.index("<svg")) + 1 : svg.rindex("</svg>")]
    inside = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", inside, flags=re.DOTALL)
    inside = re.sub(r' id="[a-zA-Z0-9]+_\d+"', "", inside).replace("xlink:href", "href")
    inside = re.sub(r"(\.\d\d)\d+", r"\1", inside)  # hundredths of a point are fine enough
    return re.sub(r"\n\s*", "\n", inside)


def _themed(svg: str) -> str:
    return re.sub("#[0-9a-f]{6}", lambda found: _variable(found[0]), svg)


def _variable(colour: str) -> str:
    return f"var(--{VARIABLES[colour]})" if colour in VARIABLES else colour


def _rectangle(tip: Tip, height: float) -> str:
    low, high = tip.axes.get_ylim() if tip.low is None or tip.high is None else (tip.low, tip.high)
    corners = tip.axes.transData.transform([(tip.left, low), (tip.right, high)])
    (left, right), (one, other) = sorted(corners[:, 0]), sorted(height - corners[:, 1])
    place = f'x="{left:.2f}" y="{one:.2f}" width="{max(right - left, 0.6):.2f}" height="{other - one:.2f}"'
    return f"<rect {place}><title>{escape(tip.text)}</title></rect>"


def between(values: Sequence[float]) -> list[tuple[float, float]]:
    """The part of the axis that is nearest to each value: half way to its neighbours on both sides.

    >>> between([1, 2, 4])
    [(0.5, 1.5), (1.5, 3.0), (3.0, 5.0)]
    """
    if len(values) < 2:
        return [(value - 0.5, value + 0.5) for value in values]
    middles = [(one + other) / 2 for one, other in itertools.pairwise(values)]
    first, last = values[0] - (middles[0] - values[0]), values[-1] + (values[-1] - middles[-1])
    edges = [first, *middles, last]
    return list(itertools.pairwise(edges))
