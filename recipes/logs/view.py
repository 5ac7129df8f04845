"""Display of a run: a line for each row, and a bar with the current stage."""

import datetime
import re
import threading
import time
from collections.abc import Mapping
from typing import Any

from rich import progress
from rich.console import Console
from rich.table import Column
from rich.text import Text

from recipes.errors import counted
from recipes.logs.metric_rows import QUALITY, switch_seconds

NOTABLE = 1e-3  # seconds of overlapped moves that are shown
QUIET = 60.0  # seconds of a stage after which a log says that it still runs
COUNTED = {"groups_without_signal": ("group", "without signal"), "faults": ("fault", "of rewards")}
OF_MODELS = {"kl_to_reference": "kl", "value_explained_variance": "critic explains"}


def describe(row: Mapping[str, Any]) -> str:
    """Return one line about a row of metrics.jsonl, with figures separated by bars."""
    if row["kind"] == "eval":
        names = [name for name in row if re.fullmatch(QUALITY, name)]
        shares = ", ".join(f"{name} {row[name]:.3f}" for name in names)
        problems = counted(row["problems"], "held-out problem")
        return f"{shares} on {problems} after {counted(row['step'], 'update')}"
    spread = row.get("reward_std")
    parts = [
        f"reward {_decimal(row)}" + (f" ± {spread:.3f}" if spread is not None else ""),
        *(f"{counted(row[key], noun)} {of}" for key, (noun, of) in COUNTED.items() if row.get(key)),
        *([f"{row['overflows']:.2g} overflows per update"] if row.get("overflows") else []),
        f"correct {_decimal(row, 'correct')}",
        *([] if "loss" in row else ["no update of the policy"]),
        *_mismatch(row),
        *(f"{short} {row[key]:.2g}" for key, short in OF_MODELS.items() if key in row),
        f"length {row['response_length']:.1f}",
        f"{row['tokens_per_second']:.0f} tok/s",
        f"{row['step_seconds']:.1f} s",
        f"switch {switch_seconds(row):.3f} s",
    ]
    if (hidden := row.get("hidden_seconds", 0.0)) >= NOTABLE:
        parts[-1] += f" and {hidden:.3f} s overlapped"
    return " | ".join(parts)


def _mismatch(row: Mapping[str, Any]) -> list[str]:
    """Return the log-prob mismatch, unless none is measured, and the share of rejected answers."""
    parts = []
    if "mismatch_mean" in row:
        parts.append(f"mismatch {row['mismatch_mean']:.1e} mean {row['mismatch_max']:.1e} max")
    if rejected := row.get("answers_rejected"):
        parts.append(f"{rejected:.0%} rejected")
    return parts


def _decimal(row: Mapping[str, Any], key: str = "reward") -> str:
    """Return a figure; a dash if the row lacks it, because no answer has a reward."""
    return "-" if row.get(key) is None else f"{row[key]:.3f}"


class View:
    """Display of a run that shows nothing; base class of the other displays."""

    def note(self, text: str) -> None:
        """Show a line."""

    def stage(self, name: str) -> None:
        """Show the stage that runs."""

    def row(self, row: Mapping[str, Any]) -> None:
        """Show a row of metrics.jsonl."""

    def close(self) -> None:
        """End the live display; `note` still works."""


class ProgressView(View):
    """Display with a line for each row and, in a terminal, a bar with the current stage.

    Elsewhere, a stage that lasts is reported every `quiet` seconds.
    """

    def __init__(self, steps: int, console: Console | None = None, quiet: float = QUIET) -> None:
        console = console or Console()
        self._steps = steps
        # The run's thread writes these two, and the reporting thread reads them without a lock: a
        # line may name the stage before, with the seconds of the new one, and does no harm.
        self._running, self._since = "starting", time.monotonic()
        self._closed = threading.Event()
        self._reporting = threading.Thread(target=self._report_stage, args=(quiet,), daemon=True)
        self._progress = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=10),
            progress.MofNCompleteColumn(),
            progress.TimeRemainingColumn(),
            # In a narrow terminal, only this last column wraps.
            progress.TextColumn("{task.fields[newest]}", markup=False, table_column=Column()),
            console=console,
            disable=not console.is_interactive,
            speed_estimate_period=3600.0,  # seconds; a step may take many minutes
        )
        self._task = self._progress.add_task("starting", total=steps, newest="")
        self._progress.start()
        if not console.is_interactive:
            self._reporting.start()

    def note(self, text: str) -> None:
        self._progress.console.print(Text(text), soft_wrap=True)

    def stage(self, name: str) -> None:
        self._running, self._since = name, time.monotonic()
        self._progress.update(self._task, description=name)

    def _report_stage(self, quiet: float) -> None:
        while not self._closed.wait(quiet):
            if (seconds := time.monotonic() - self._since) >= quiet:
                self.note(f"{self._running}: {seconds:.0f} s so far")

    def row(self, row: Mapping[str, Any]) -> None:
        if row["kind"] == "eval":
            self.note(f"eval: {describe(row)}")
            return
        newest = f"reward {_decimal(row)}, {row['step_seconds']:.1f} s, "
        newest += f"{row['tokens_per_second']:.0f} tok/s"
        self._progress.update(self._task, completed=row["step"], newest=newest)
        left = self._progress.tasks[0].time_remaining
        eta = "" if left is None else f" | ETA {datetime.timedelta(seconds=round(left))}"
        self.note(f"step {row['step']}/{self._steps}: {describe(row)}{eta}")

    def close(self) -> None:
        self._closed.set()
        if self._reporting.is_alive():
            self._reporting.join()
        self._progress.stop()
