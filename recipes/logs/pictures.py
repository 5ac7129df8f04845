"""Pictures of a run, drawn by matplotlib: as PNG in its folder, as SVG in its report.

Areas differ by color and hatch, curves by color and line style, so they can be told apart in gray
prints and without color vision. A function returns None if the run has nothing to draw.
"""

import base64
import io
import math
from collections.abc import Iterable, Sequence
from itertools import chain, cycle
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.ticker import MaxNLocator

from memsaver import Event
from memsaver.system.files import replacing
from recipes.logs.curves import Panel, panels_of
from recipes.logs.metric_rows import Row, kind_of
from recipes.logs.stage_trace import StageTrace
from rollout.tag_names import TAGS as ROLLOUT_TAGS
from trainer_bridge.tag_names import TRAINER_TAGS

MIB, GIB = 2**20, 2**30
WIDTH = 5.6  # inches; text of 9 points stays legible on a page as narrow as a phone
LANE = 0.2  # inches
PANEL = (4.6, 2.5)  # inches
LABEL = 48  # characters of a curve's name
# Palette of Okabe and Ito, "Color Universal Design" (2008).
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442", "#999999")
HATCHES = ("", "//", "..", "xx", "\\\\", "oo", "--")
DASHES: Any = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))  # 40 pairs with the eight colors
TAGS = (*ROLLOUT_TAGS, *TRAINER_TAGS)
KINDS = ("rollout", "train", "switch")
STYLE: Any = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.prop_cycle": cycler(color=COLORS * 5) + cycler(linestyle=DASHES * 8),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9,
    "grid.color": "#dddddd",
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
}


def looks(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return color and hatch of each name's area; names of tags always look the same."""
    names = set(names)
    ordered = [*TAGS, *sorted(names - set(TAGS))]
    return {
        name: {"facecolor": color, "hatch": hatch, "edgecolor": "#222222"}
        for name, color, hatch in zip(ordered, cycle(COLORS), cycle(HATCHES), strict=False)
        if name in names
    }


def write_pictures(rows: Sequence[Row], trace: StageTrace, folder: Path) -> None:
    """Write reward.png and memory.png if the run has data for them."""
    for name, figure in (("reward", draw_curves(panels_of(rows))), ("memory", draw_memory(trace))):
        if figure is not None:
            save_picture(figure, folder / f"{name}.png")


def save_picture(figure: Figure, file: Path, **style: Any) -> None:
    """Write a picture atomically, in the format of the file's suffix or as PNG."""
    with replacing(file) as partial, matplotlib.rc_context(STYLE):
        figure.savefig(partial, dpi=130, format=file.suffix[1:] or "png", **style)


def data_uri(picture: Figure | bytes | None) -> str:
    """Return a figure (as SVG) or a PNG as a data URI for an HTML page."""
    if isinstance(picture, Figure):
        buffer = io.BytesIO()
        with matplotlib.rc_context(STYLE):
            picture.savefig(buffer, format="svg")
        return f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return f"data:image/png;base64,{base64.b64encode(picture).decode()}" if picture else ""


@matplotlib.rc_context(STYLE)
def draw_curves(panels: Sequence[Panel]) -> Figure | None:
    """Draw panels in two columns with their titles; a single panel alone, without its title."""
    if not panels:
        return None
    columns = min(2, len(panels))
    lines = math.ceil(len(panels) / columns)
    height = PANEL[1] + LANE * max(len(panel.curves) for panel in panels)  # Legends take LANE.
    figure = Figure(figsize=(PANEL[0] * columns, height * lines), layout="constrained")
    for number, panel in enumerate(panels, 1):
        legend = _draw_panel(figure.add_subplot(lines, columns, number), panel)
        if len(panels) > 1:
            legend.set_title(panel.title)
            legend.get_title().set_fontweight("bold")
    return figure


def _draw_panel(axes: Axes, panel: Panel) -> Legend:
    """Draw the curves of a panel; a logarithmic axis has no place for values of 0 and less."""
    points = list(chain.from_iterable(panel.curves.values()))
    scale = panel.scale if any(value > 0 for _, value in points) else "linear"
    for name, curve in panel.curves.items():
        shown = [point for point in curve if point[1] > 0 or scale == "linear"]
        marker = "o" if name.endswith("held-out") or len(shown) == 1 else None
        label = name if len(name) <= LABEL else f"… {name[-LABEL:]}"
        label = f" {label}" if label.startswith("_") else label  # matplotlib hides such a label.
        axes.plot(*(zip(*shown, strict=True) if shown else ([], [])), label=label, marker=marker)
    axes.set(xlabel="step", ylabel=panel.axis, yscale=scale)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return _legend(axes, columns=2 if max(map(len, panel.curves)) <= LABEL / 2 else 1)


@matplotlib.rc_context(STYLE)
def draw_memory(trace: StageTrace) -> Figure | None:
    """Draw the stages of one step, and the bytes of each tag on the first device below them."""
    step = trace.one_step()
    if step is None:
        return None
    spans = [span for span in trace.spans if not span.is_step]
    spans = [span for span in spans if step.begin <= span.begin and span.end <= step.end]
    lanes = list(dict.fromkeys(span.name for span in spans))
    heights = (0.5 + LANE * len(lanes), 2.6)
    figure = Figure(figsize=(WIDTH, sum(heights) + 0.4), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=heights)
    for kind, look in looks(KINDS).items():
        own_spans = [span for span in spans if kind_of(span.name) == kind]
        rows = [lanes.index(span.name) for span in own_spans]
        lengths = [span.end - span.begin for span in own_spans]
        starts = [span.begin - step.begin for span in own_spans]
        above.barh(rows, lengths, left=starts, label=kind, linewidth=0.5, **look)
    above.set_yticks(range(len(lanes)), lanes)
    above.invert_yaxis()
    above.set(ylabel="stage")
    below.set(xlabel=f"seconds since {step.name} began")
    _legend(above, columns=3)
    first = [owner for owner in trace.events if owner.partition("[")[2] in ("", "0]")]
    events = chain.from_iterable(trace.events[owner] for owner in first)
    _draw_tags(below, sorted(events, key=lambda event: event.time), step.begin, step.end)
    return figure


def _draw_tags(axes: Axes, events: Sequence[Event], begin: float, end: float) -> None:
    """Draw the committed bytes of each tag as a stack, and backups on the host as a dashed line."""
    times = [begin, *(event.time for event in events if begin < event.time < end), end]
    committed, backup = {}, np.zeros(len(times))
    tags = looks(event.tag for event in events)
    for tag in tags:
        own_events = [event for event in events if event.tag == tag]
        newest = np.searchsorted([event.time for event in own_events], times, side="right")
        committed[tag] = np.array([0, *(event.committed_bytes for event in own_events)])[newest]
        backup += np.array([0, *(event.backup_bytes for event in own_events)])[newest]
    largest = max([*sum(committed.values(), np.zeros(len(times))), *backup])
    unit, name = (GIB, "GiB") if largest >= 4 * GIB else (MIB, "MiB")
    seconds = [time - begin for time in times]
    base = np.zeros(len(times))
    for tag, held in committed.items():
        top = base + held / unit
        axes.fill_between(seconds, base, top, step="post", label=tag, linewidth=0, **tags[tag])
        base = top
    axes.step(seconds, backup / unit, "k--", where="post", label="kept on the host")
    axes.set(ylabel=name, xlim=(0, end - begin))
    axes.set_ylim(bottom=0)
    _legend(axes, columns=3)


def _legend(axes: Axes, columns: int) -> Legend:
    place: Any = {"loc": "lower left", "bbox_to_anchor": (0, 1), "alignment": "left"}
    return axes.legend(ncols=columns, columnspacing=1.2, **place)
