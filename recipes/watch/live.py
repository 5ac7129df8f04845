"""What a run shows while it goes: a live table in a terminal, plain lines elsewhere."""

from __future__ import annotations

import datetime
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from memsaver.errors import format_bytes

OTHER_KINDS = "exact_match_"  # and the kind's name: keys of an evaluation's row
BARS = "▁▂▃▄▅▆▇█"
OF_MODELS = {"kl_to_reference": "kl", "value_explained_variance": "critic explains"}


class View(Protocol):
    """Shows what the monitor tells it."""

    def note(self, text: str) -> None: ...

    def stage(self, name: str) -> None: ...

    def row(self, row: Mapping[str, Any]) -> None: ...

    def memory(self, tags: Mapping[str, tuple[int, int]]) -> None:
        """Bytes by tag: (on the device, kept on the host)."""

    def close(self) -> None: ...


def make_view(title: str, steps: int) -> View:
    """The live table where standard output is a terminal, else log lines."""
    return LiveView(title, steps) if sys.stdout.isatty() else LogView(steps)


def sparkline(values: list[float], width: int = 48) -> str:
    """One character a value, the lowest of the range first; the last `width` values.

    >>> sparkline([0.0, 0.5, 1.0])
    '▁▅█'
    """
    shown = values[-width:]
    if not shown:
        return ""
    low, high = min(0.0, *shown), max(1.0, *shown)
    return "".join(BARS[round((value - low) / (high - low) * (len(BARS) - 1) + 1e-9)] for value in shown)


def beside_the_task(row: Mapping[str, Any]) -> dict[str, str]:
    """Keys of an evaluation's other exact matches, and what to call them: exact_match_2_digits -> "2 digits".

    A kind of which no problem at all was trained on is called so; rows of older runs do not tell.
    """
    kinds = {key: key.removeprefix(OTHER_KINDS) for key in row if key.startswith(OTHER_KINDS)}
    trained = row.get("trained_beside", kinds.values())
    return {key: kind.replace("_", " ") + ("" if kind in trained else " (untrained)") for key, kind in kinds.items()}


def describe(row: Mapping[str, Any]) -> str:
    """One line for a row of metrics.jsonl."""
    if row["kind"] == "eval":
        beside = "".join(f", {name} {row[key]:.3f}" for key, name in beside_the_task(row).items())
        return f"held-out exact match {row['exact_match']:.3f} of {row['problems']}{beside} after {row['step']} updates"
    parts = [
        f"reward {row['reward']:.3f}",
        f"exact {row['exact_match']:.3f}",
        f"gap {row['gap_mean']:.1e} mean {row['gap_max']:.1e} max",
        *(f"{short} {row[key]:.2g}" for key, short in OF_MODELS.items() if key in row),
        f"length {row['response_length']:.1f}",
        f"{row['tokens_per_second']:.0f} tok/s",
        f"{row['step_seconds']:.1f} s",
    ]
    return " | ".join(parts)


class Pace:
    """How long the rest of a run takes, by its last steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._seconds: deque[float] = deque(maxlen=10)

    def left(self, row: Mapping[str, Any]) -> str:
        """After the step of this row; evaluations and checkpoints come on top."""
        self._seconds.append(row["step_seconds"])
        seconds = statistics.fmean(self._seconds) * (self.steps - row["step"])
        return f"ETA {datetime.timedelta(seconds=round(seconds))}"


class LogView:
    """One line a step, for files, pipes and jobs; and where a stage takes long, that it goes on."""

    def __init__(self, steps: int, quiet_seconds: float = 30.0) -> None:
        """quiet_seconds: without a line, before a line tells the stage."""
        self.steps = steps
        self._pace = Pace(steps)
        self._quiet_seconds = quiet_seconds
        self._step, self._stage = 0, "starting"
        self._printed = threading.Condition()
        self._closed = False
        self._watch = threading.Thread(target=self._tell_stage_when_quiet, daemon=True)
        self._watch.start()

    def note(self, text: str) -> None:
        with self._printed:
            print(text, flush=True)
            self._printed.notify()

    def stage(self, name: str) -> None:
        self._stage = name

    def row(self, row: Mapping[str, Any]) -> None:
        if row["kind"] != "train":
            self.note(f"eval: {describe(row)}")
            return
        self._step = row["step"]
        self.note(f"step {row['step']}/{self.steps}: {describe(row)} | {self._pace.left(row)}")

    def memory(self, tags: Mapping[str, tuple[int, int]]) -> None:
        """In metrics.jsonl and trace.json."""

    def close(self) -> None:
        with self._printed:
            self._closed = True
            self._printed.notify()
        self._watch.join()

    def _tell_stage_when_quiet(self) -> None:
        with self._printed:
            while not self._closed:
                if not self._printed.wait(self._quiet_seconds):
                    head = f"after step {self._step}/{self.steps}: " if self._step else ""
                    print(f"{head}in {self._stage}", flush=True)


class LiveView:
    """Step, stage, reward, gap and memory in one panel that redraws itself."""

    def __init__(self, title: str, steps: int, console: Console | None = None) -> None:
        self.title, self.steps = title, steps
        self.step = 0
        self.stage_name, self.stage_started = "starting", time.time()
        self.rewards: list[float] = []
        self.last: Mapping[str, Any] | None = None
        self._pace, self.left = Pace(steps), ""
        self.evaluation: Mapping[str, Any] | None = None
        self.tags: Mapping[str, tuple[int, int]] = {}
        self.live = Live(get_renderable=self.render, console=console, refresh_per_second=8)
        self.live.start()

    def note(self, text: str) -> None:
        self.live.console.print(Text(text))

    def stage(self, name: str) -> None:
        self.stage_name, self.stage_started = name, time.time()

    def row(self, row: Mapping[str, Any]) -> None:
        if row["kind"] == "eval":
            self.evaluation = row
            return
        self.step, self.last, self.left = row["step"], row, self._pace.left(row)
        self.rewards.append(row["reward"])

    def memory(self, tags: Mapping[str, tuple[int, int]]) -> None:
        self.tags = dict(tags)

    def close(self) -> None:
        self.live.stop()

    def render(self) -> RenderableType:
        facts = Table.grid(padding=(0, 2))
        facts.add_column(style="dim")
        facts.add_column()
        facts.add_row("step", f"{self.step}/{self.steps}  {self.left}")
        facts.add_row("stage", Text(f"{self.stage_name}  {time.time() - self.stage_started:.1f} s"))
        if self.last is not None:
            facts.add_row("reward", Text(f"{sparkline(self.rewards)} {self.last['reward']:.3f}", style="green"))
            facts.add_row("last step", Text(describe(self.last)))
        if self.evaluation is not None:
            facts.add_row("evaluation", Text(describe(self.evaluation)))
        return Panel(Group(facts, Text(), self._memory_table()), title=Text(self.title), border_style="blue")

    def _memory_table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for justify in ("left", "left", "right", "right"):
            table.add_column(justify=justify)  # type: ignore[arg-type]
        largest = max([1, *(committed for committed, _ in self.tags.values())])
        table.add_row(Text("memory", style="dim"), "", Text("device", style="dim"), Text("host", style="dim"))
        for tag, (committed, kept) in self.tags.items():
            bar = Text("█" * round(24 * committed / largest), style="cyan")
            table.add_row(
                Text(tag),
                bar if committed else Text("paused", style="yellow"),
                format_bytes(committed),
                format_bytes(kept) if kept else "-",
            )
        return table
