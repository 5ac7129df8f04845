"""Pictures of benchmark results, for docs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot


def stacked_bars(path: Path, title: str, rows: Mapping[str, Mapping[str, float]], unit: str = "ms") -> None:
    """A bar for each row, the first on top, made of its parts, with their sum behind it."""
    figure, axes = pyplot.subplots(figsize=(9, 0.6 + 0.38 * len(rows)), layout="constrained")
    parts = list(dict.fromkeys(part for row in rows.values() for part in row))
    starts = dict.fromkeys(rows, 0.0)
    for part in parts:
        widths = [row.get(part, 0.0) for row in rows.values()]
        axes.barh(list(rows), widths, left=list(starts.values()), label=part)
        starts = {name: start + width for (name, start), width in zip(starts.items(), widths, strict=True)}
    for name, total in starts.items():
        axes.text(total, name, f" {total:.1f}", va="center", fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.set_title(title, fontsize=10)
    axes.margins(x=0.08)
    axes.legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
