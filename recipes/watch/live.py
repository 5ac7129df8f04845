"""Shows a run while it goes: a live table in a terminal, plain lines elsewhere."""

from __future__ import annotations

import datetime
import statistics
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from rich.bar import Bar
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from memsaver.errors import format_bytes
from recipes.watch.history import (
    NOTABLE,
    Run,
    beside_the_task,
    format_seconds,
    switch_seconds,
)

BARS = "▁▂▃▄▅▆▇█"
OF_MODELS = {"kl_to_reference": "kl", "value_explained_variance": "critic explains"}


class View:
    """Is told by the monitor what happens; shows nothing of it itself."""

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
    low, high = min([0.0, *shown]), max([1.0, *shown])
    heights = [(value - low) / (high - low) * (len(BARS) - 1) for value in shown]
    return "".join(BARS[round(height + 1e-9)] for height in heights)


def describe(row: Mapping[str, Any]) -> str:
    """One line for a row of metrics.jsonl."""
    if row["kind"] == "eval":
        others = [f", {name} {row[key]:.3f}" for key, name in beside_the_task(row).items()]
        result = f"{row['exact_match']:.3f} of {row['problems']}{''.join(others)}"
        return f"held-out exact match {result} after {row['step']} updates"
    parts = [
        f"reward {row['reward']:.3f}",
        f"exact {row['exact_match']:.3f}",
        f"gap {row['gap_mean']:.1e} mean {row['gap_max']:.1e} max",
        *(f"{short} {row[key]:.2g}" for key, short in OF_MODELS.items() if key in row),
        f"length {row['response_length']:.1f}",
        f"{row['tokens_per_second']:.0f} tok/s",
        f"{row['step_seconds']:.1f} s",
        f"switch {format_seconds(switch_seconds(row))}",
    ]
    if (hidden := row.get("hidden_seconds", 0.0)) >= NOTABLE:
        parts[-1] += f" and {format_seconds(hidden)} beside work"
    return " | ".join(parts)


def time_left(run: Run, steps: int) -> str:
    """Reckons the time left by the last ten steps; evaluations and checkpoints come on top."""
    last = run.train[-10:]
    seconds = statistics.fmean(row["step_seconds"] for row in last) * (steps - last[-1]["step"])
    return f"ETA {datetime.timedelta(seconds=round(seconds))}"


class LogView(View):
    """One line a step, for files, pipes and jobs; and where a stage takes long, that it goes on."""

    def __init__(self, steps: int, quiet_seconds: float = 30.0) -> None:
        """quiet_seconds: without a line, before a line tells the stage."""
        self.steps = steps
        self._run = Run()
        self._quiet_seconds = quiet_seconds
        self._stage = "starting"
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
        self._run.rows.append(dict(row))
        if row["kind"] == "train":
            left = time_left(self._run, self.steps)
            self.note(f"step {row['step']}/{self.steps}: {describe(row)} | {left}")
        else:
            self.note(f"eval: {describe(row)}")

    def close(self) -> None:
        with self._printed:
            self._closed = True
            self._printed.notify()
        self._watch.join()

    def _tell_stage_when_quiet(self) -> None:
        with self._printed:
            while not self._closed:
                if not self._printed.wait(self._quiet_seconds):
                    train = self._run.train
                    head = f"after step {train[-1]['step']}/{self.steps}: " if train else ""
                    print(f"{head}in {self._stage}", flush=True)


class LiveView(View):
    """Step, stage, reward, gap and memory in one panel that redraws itself."""

    def __init__(self, title: str, steps: int, console: Console | None = None) -> None:
        self.title, self.steps = title, steps
        self.run = Run()
        self.stage_name, self.stage_started = "starting", time.time()
        self.tags: Mapping[str, tuple[int, int]] = {}
        self.live = Live(get_renderable=self.render, console=console, refresh_per_second=8)
        self.live.start()

    def note(self, text: str) -> None:
        self.live.console.print(Text(text))

    def stage(self, name: str) -> None:
        self.stage_name, self.stage_started = name, time.time()

    def row(self, row: Mapping[str, Any]) -> None:
        self.run.rows.append(dict(row))

    def memory(self, tags: Mapping[str, tuple[int, int]]) -> None:
        self.tags = dict(tags)

    def close(self) -> None:
        self.live.stop()

    def render(self) -> RenderableType:
        train, evaluations = self.run.train, self.run.evaluations
        step, left = (train[-1]["step"], time_left(self.run, self.steps)) if train else (0, "")
        facts = Table.grid(Column(style="dim"), Column(), padding=(0, 2))
        facts.add_row("step", f"{step}/{self.steps}  {left}")
        facts.add_row("stage", Text(f"{self.stage_name}  {time.time() - self.stage_started:.1f} s"))
        if train:
            rewards = [row["reward"] for row in train]
            facts.add_row("reward", Text(f"{sparkline(rewards)} {rewards[-1]:.3f}", style="green"))
            facts.add_row("last step", Text(describe(train[-1])))
        if evaluations:
            facts.add_row("evaluation", Text(describe(evaluations[-1])))
        content = Group(facts, Text(), self._memory_table())
        return Panel(content, title=Text(self.title), border_style="blue")

    def _memory_table(self) -> Table:
        right = (Column(justify="right"), Column(justify="right"))
        table = Table.grid(Column(), Column(), *right, padding=(0, 2))
        largest = max([1, *(committed for committed, _ in self.tags.values())])
        table.add_row(*(Text(name, style="dim") for name in ("memory", "", "device", "host")))
        for tag, (committed, kept) in self.tags.items():
            bar = Bar(largest, 0, committed, width=24, color="cyan")
            table.add_row(
                Text(tag),
                bar if committed else Text("paused", style="yellow"),
                format_bytes(committed),
                format_bytes(kept) if kept else "-",
            )
        return table
