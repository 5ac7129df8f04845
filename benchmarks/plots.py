"""Pictures of benchmark results, for docs. The last steps of runs beside each other:
`python -m benchmarks.plots OUT.png TITLE NAME=metrics.jsonl ...`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

from recipes.logs.run_folder import kind_of


def stacked_bars(
    path: Path, title: str, rows: Mapping[str, Mapping[str, float]], unit: str = "ms"
) -> None:
    """A bar for each row, the first on top, made of its parts, with their sum behind it."""
    figure, axes = pyplot.subplots(figsize=(9, 0.9 + 0.38 * len(rows)), layout="constrained")
    parts = list(dict.fromkeys(part for row in rows.values() for part in row))
    starts = dict.fromkeys(rows, 0.0)
    for part in parts:
        widths = [row.get(part, 0.0) for row in rows.values()]
        axes.barh(list(rows), widths, left=list(starts.values()), label=part)
        starts = {
            name: start + width for (name, start), width in zip(starts.items(), widths, strict=True)
        }
    for name, total in starts.items():
        axes.text(total, name, f" {total:.1f}", va="center", fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.set_title(title, fontsize=10)
    axes.margins(x=0.08)
    figure.legend(fontsize=8, loc="outside lower center", ncols=5)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def last_step(metrics: Path) -> dict[str, float]:
    """Milliseconds of a run's last step, by stage; those in which memory changes hands are one."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    spent = {"memory changes hands": 0.0}
    for name, seconds in [row for row in rows if row["kind"] == "train"][-1]["stages"].items():
        part = "memory changes hands" if kind_of(name) == "switch" else name
        if seconds > 0.01 or part != name:
            spent[part] = spent.get(part, 0.0) + 1e3 * seconds
    return spent


def main(out: str, title: str, *named: str) -> None:
    runs = [each.partition("=") for each in named]
    stacked_bars(Path(out), title, {name: last_step(Path(file)) for name, _, file in runs})


if __name__ == "__main__":
    main(*sys.argv[1:])
