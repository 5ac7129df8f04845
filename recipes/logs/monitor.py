"""Stages as they pass: timed, shown, written down, with the most memory of every process and
device; and a failure gets the name of its stage. A view shows a run while it goes: a live table in
a terminal, plain lines elsewhere.

In a stage each side's tags only come or only go. So a process's most is what its tags held before
or after, and torch's own peak; what is on the device besides (contexts, libraries) stays as it is.
Where one side's tags come while the other's go, they come into what has gone.
"""

from __future__ import annotations

import datetime
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.bar import Bar
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from memsaver.errors import format_bytes
from recipes.errors import LostWorker, RecipeError, RunError, ScorerError, one_line
from recipes.logs.history import (
    NOTABLE,
    Run,
    beside_the_task,
    format_seconds,
    kind_of,
    seconds_beside,
    spans_of_moves,
    switch_seconds,
)
from recipes.logs.run_folder import RunFolder
from rollout.types import KV_CACHE, WEIGHTS
from trainer_bridge.errors import ActorError, ActorTimeout, RankFailed

if TYPE_CHECKING:
    from memsaver import Usage
    from trainer_bridge.sync import SyncReceipt

TakeUsage = Callable[[], "Usage | None"]


class Peaks:
    """Collects bytes by stage: of each process, and of torch in it; of the fullest device; of tags.

    Processes are counted without contexts and libraries; "device_bytes" is None on the CPU.
    """

    def __init__(self) -> None:
        self.stages: dict[str, dict[str, Any]] = {}
        self._sources: dict[str, TakeUsage] = {}
        self._before: dict[str, dict[str, int]] = {}

    def watch(self, owner: str, take_usage: TakeUsage) -> None:
        """owner: "trainer" or "rollout", with its device's number in brackets if several."""
        self._sources[owner] = take_usage

    def passed(self, stage: str) -> None:
        """The stage has just ended. One that comes again in a step keeps the larger figures."""
        found: dict[str, Usage] = {}
        for owner, take in self._sources.items():
            if (usage := take()) is not None:
                found[owner] = usage
        tags: dict[str, int] = {}
        processes, torch = {}, {}
        gone, waits = Counter[str](), Counter[str]()
        for owner, usage in found.items():
            before = self._before.get(owner, usage.tags)
            most = _larger(before, usage.tags)
            self._before[owner] = usage.tags
            gone[_place(owner)] += sum(before.values()) - sum(usage.tags.values())
            waits[_place(owner)] += usage.torch_peak_bytes - usage.torch_bytes
            tags |= {f"{tag}{_place(owner)}": nbytes for tag, nbytes in most.items()}
            torch[owner] = usage.torch_peak_bytes
            # pages that only change their tag, out of the page pool, count once
            held = max(sum(before.values()), sum(usage.tags.values()))
            processes[owner] = held + usage.torch_peak_bytes
        entry = {
            "processes": processes,
            "torch": torch,
            "device_bytes": _device(found, +gone + waits),
            "tags": tags,
        }
        self.stages[stage] = _merged(self.stages[stage], entry) if stage in self.stages else entry

    def take(self) -> dict[str, dict[str, Any]]:
        """The stages since the last call."""
        stages, self.stages = self.stages, {}
        return stages


def _place(owner: str) -> str:
    return owner[owner.index("[") :] if "[" in owner else ""


def _device(found: Mapping[str, Usage], more: Mapping[str, int]) -> int | None:
    """Returns the fullest device's bytes: used now, plus what there was more of in the stage."""
    places: dict[str, int] = {}
    for owner, usage in found.items():
        if usage.device_used_bytes is not None:
            places[_place(owner)] = max(places.get(_place(owner), 0), usage.device_used_bytes)
    return max((used + more.get(place, 0) for place, used in places.items()), default=None)


def _larger(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {key: max(one.get(key, 0), other.get(key, 0)) for key in {**one, **other}}


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    devices = [entry["device_bytes"] for entry in (one, other) if entry["device_bytes"] is not None]
    larger = {name: _larger(one[name], other[name]) for name in ("processes", "torch", "tags")}
    return {**larger, "device_bytes": max(devices, default=None)}


class Monitor:
    """Between the loop on one side, run folder and view on the other."""

    def __init__(self, folder: RunFolder, view: View) -> None:
        self.folder = folder
        self.view = view
        # Of this step: seconds by stage, and committed bytes by phase and tag.
        self.seconds: dict[str, float] = {}
        self.memory: dict[str, dict[str, int]] = {}
        self.peaks = Peaks()
        self.sync: dict[str, float] = {}  # the newest one
        self._told_of_loss = False
        self._switches: list[tuple[float, float]] = []  # of this step, as what follows
        self._moves: list[tuple[float, float]] = []
        self._sources: dict[str, Any] = {}

    def watch(self, owner: str, side: Any) -> None:
        """Reads memory from `owner` (rollout, or trainer[0] and others), and its peaks.

        side: has `report`, `drain_events` and `take_usage`, as `Trainer` and `Engine`.
        """
        self._sources[owner] = side
        self.peaks.watch(owner, side.take_usage)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        self.seconds, self.memory = {}, {}
        self._switches, self._moves = [], []
        start = time.time()
        self.folder.place = f"in step {step}"
        yield
        self.folder.run.spans.append((f"step {step}", start, time.time()))

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times one stage; what fails in it is raised as a RunError that names it."""
        with self.phase(name):
            start = time.time()
            try:
                yield
            except BaseException:
                self._timed(name, start, time.time())
                raise
            self.passed(name, start, time.time())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Like `stage`, for work that reports its own stages to `passed`."""
        self.view.stage(name)
        try:
            yield
        except (RunError, RecipeError):
            raise
        except ScorerError as error:
            raise RunError(name, str(error), self.folder.how_to_go_on()) from error
        except Exception as error:
            stage, cause = str(getattr(error, "stage", name)), getattr(error, "cause", None)
            if not isinstance(cause, BaseException):
                cause = error
            kind = LostWorker if _lost_actor(cause) else RunError
            late = isinstance(cause, ActorTimeout)
            hint = " (if it was at work: raise cluster.call_timeout)" if late else ""
            raise kind(stage, f"{type(cause).__name__}: {one_line(cause)}{hint}") from error

    def passed(self, name: str, start: float, end: float, *details: Any) -> None:
        """A stage succeeded; also the wake-up cycle's `on_stage`."""
        self._timed(name, start, end)
        self.peaks.passed(name)

    def _timed(self, name: str, start: float, end: float) -> None:
        self.folder.run.spans.append((name, start, end))
        self.seconds[name] = self.seconds.get(name, 0.0) + end - start
        if kind_of(name) == "switch":
            self._switches.append((start, end))
        self.view.stage(name)

    def synced(self, receipt: SyncReceipt) -> None:
        """Note what the sync of this step moved, bytes of all targets, and its seconds; of merged
        adapters what rounding lost.
        """
        names = ["nbytes", "link_bytes", "seconds", "copy_seconds", "verify_seconds"]
        names += ["merge_error"] if receipt.merge_error is not None else []
        self.sync = {name: getattr(receipt, name) for name in names}
        if receipt.lossy and not self._told_of_loss:
            self._told_of_loss = True
            self.view.note(
                f"version {receipt.version}: rounding took {receipt.merge_error:.0%} of what the "
                "adapters add (sync.merge_error in metrics.jsonl), so the rollout lags behind the "
                "policy; where that stays, raise trainer.learning_rate or set model.dtype=float32"
            )

    def outside(self) -> int:
        """Returns bytes used of a device, by anyone, that lie neither on the trainer's tags nor on
        the engine's of weights and KV cache; of several devices, the most.
        """
        used, on_tags = Counter[str](), Counter[str]()
        for owner, side in self._sources.items():
            side_name, _, rank = owner.partition("[")
            usage = side.take_usage()
            used[rank] = max(used[rank], usage.device_used_bytes or 0)
            for tag, nbytes in usage.tags.items():
                if side_name == "trainer" or tag.startswith((WEIGHTS, KV_CACHE)):
                    on_tags[rank] += nbytes
        return max(used[rank] - on_tags[rank] for rank in used)

    @property
    def hidden_seconds(self) -> float:
        """Seconds of this step in which memory moved beside work, as far as memory was read."""
        return seconds_beside(self._moves, self._switches)

    def row(self, row: dict[str, Any]) -> None:
        self.folder.add_row(row)
        self.view.row(row)

    def read_memory(self, phase: str) -> None:
        """Takes every owner's report and events; the report stands in the step's row under `phase`.

        Of a tag that several devices have, that device's bytes that has most on it.
        """
        shown: dict[str, tuple[int, int]] = {}
        for owner, side in self._sources.items():
            events = side.drain_events()
            self.folder.run.add_events(owner, events)
            self._moves += spans_of_moves(events)
            for tag, entry in side.report(others=False).tags.items():
                sizes = entry.committed_bytes, entry.backup_bytes
                shown[tag] = max(shown.get(tag, (0, 0)), sizes)
        self.memory[phase] = {tag: committed for tag, (committed, _) in shown.items()}
        self.view.memory(shown)


def _lost_actor(cause: BaseException) -> bool:
    """One that was there before; also where a rank failed because of it."""
    if isinstance(cause, RankFailed):
        cause = cause.error
    return isinstance(cause, ActorError) and cause.method != "__init__"


BARS = "▁▂▃▄▅▆▇█"
OF_MODELS = {"kl_to_reference": "kl", "value_explained_variance": "critic explains"}


class View:
    """Is told by the monitor what happens, and keeps the rows; shows nothing of it itself."""

    def __init__(self, steps: int = 0) -> None:
        self.steps, self.run = steps, Run()

    def note(self, text: str) -> None: ...

    def stage(self, name: str) -> None: ...

    def row(self, row: Mapping[str, Any]) -> None:
        self.run.rows.append(dict(row))

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
    spread, dead = row.get("reward_std"), row.get("groups_without_signal")
    parts = [
        f"reward {row['reward']:.3f}" + (f" ± {spread:.3f}" if spread is not None else ""),
        *([f"{dead} groups without signal"] if dead else []),
        f"exact {row['exact_match']:.3f}",
        f"mismatch {row['mismatch_mean']:.1e} mean {row['mismatch_max']:.1e} max",
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
        super().__init__(steps)
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
        super().row(row)
        if row["kind"] == "train":
            left = time_left(self.run, self.steps)
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
                    train = self.run.train
                    head = f"after step {train[-1]['step']}/{self.steps}: " if train else ""
                    print(f"{head}in {self._stage}", flush=True)


class LiveView(View):
    """Step, stage, reward, mismatch and memory in one panel that redraws itself."""

    def __init__(self, title: str, steps: int, console: Console | None = None) -> None:
        super().__init__(steps)
        self.title = title
        self.stage_name, self.stage_started = "starting", time.time()
        self.tags: Mapping[str, tuple[int, int]] = {}
        self.live = Live(get_renderable=self.render, console=console, refresh_per_second=8)
        self.live.start()

    def note(self, text: str) -> None:
        self.live.console.print(Text(text))

    def stage(self, name: str) -> None:
        self.stage_name, self.stage_started = name, time.time()

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
