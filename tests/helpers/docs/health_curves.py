"""The picture of docs/how-to/healthy-run.md: a healthy run of recipe `tiny` beside two sick ones.

`python -m tests.helpers.docs.health_curves` runs all three on a CPU, some minutes, and draws
docs/images/health.png.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from recipes.logs.metric_rows import Row, of_kind, whole_rows
from recipes.logs.pictures import STYLE, save_picture
from recipes.run import start_run
from tests.helpers.docs.pages import ROOT
from tests.helpers.recipes.tiny_runs import without_pictures

PICTURE = ROOT / "docs" / "images" / "health.png"
RUNS = {
    "healthy": [],
    "learning rate ten times as high": ["trainer.learning_rate=0.05"],
    "max_tokens too small": ["sampling.max_tokens=1", "task.parameters.partial_credit=0"],
}
"""Overrides of recipe `tiny` by name of the curve."""

QUIET = ["device=cpu", "eval.every=0", "samples=0", "checkpoint.every=0"]
QUIET += ["checkpoint.export_every=null"]
FIGURES = ("reward", "entropy", "cut_off", "groups_without_signal")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, without_pictures():
        runs = {
            name: start_run("tiny", [*QUIET, *keys], Path(folder) / str(index))
            for index, (name, keys) in enumerate(RUNS.items())
        }
        rows = {
            name: of_kind([*whole_rows(run / "metrics.jsonl")], "train")
            for name, run in runs.items()
        }
    draw(rows)


@matplotlib.rc_context(STYLE)
def draw(rows: Mapping[str, Sequence[Row]]) -> None:
    """Draw one panel for each figure, with a curve for each run."""
    figure = Figure(figsize=(7.4, 4.2), layout="constrained")
    for axes, key in zip(figure.subplots(2, 2, sharex=True).flat, FIGURES, strict=True):
        for name, steps in rows.items():
            axes.plot([row["step"] for row in steps], [row[key] for row in steps], label=name)
        axes.set_title(key, loc="left", family="monospace")
        axes.set_ylim(bottom=0)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(rows))
    save_picture(figure, PICTURE)


if __name__ == "__main__":
    main()
