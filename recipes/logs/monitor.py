"""Monitor of a run: seconds and memory of every stage, shown and written down as they come.

In a stage each side's tags only come or only go. So a process's peak is what its tags held before
or after, plus torch's own peak; the rest of the device's memory (contexts, libraries) stays as it
is. Where one side's tags come while the other's go, they come into the pages that were freed.
"""

from __future__ import annotations

import datetime
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich import progress
from rich.console import Console
from rich.table import Column
from rich.text import Text

from memsaver import Usage
from recipes.errors import LostWorker, RecipeError, RunError, ScorerError, one_line
from recipes.logs.run_folder import RunFolder, Span, kind_of, match_names, switch_seconds
from rollout.tag_names import KV_CACHE, WEIGHTS
from trainer_bridge.errors import ActorError, ActorTimeout, RankFailed
from trainer_bridge.sync import SyncReceipt

TakeUsage = Callable[[], Usage | None]
MOVING = ("pause", "resume", "save", "prefetch")  # operations of a saver that move memory
NOTABLE = 1e-3  # seconds of moves beside work that are worth a word
OF_MODELS = {"kl_to_reference": "kl", "value_explained_variance": "critic explains"}


class Peaks:
    """Peak bytes by stage: of each process, of torch in it, of each tag, of the fullest device.

    Processes are counted without contexts and libraries; "device_bytes" is None on the CPU.
    """

    def __init__(self) -> None:
        self.stages: dict[str, dict[str, Any]] = {}
        self._sources: dict[str, TakeUsage] = {}
        self._before: dict[str, dict[str, int]] = {}

    def watch(self, owner: str, take_usage: TakeUsage) -> None:
        """Read a process as `owner`: "trainer" or "rollout", with "[rank]" if there are several."""
        self._sources[owner] = take_usage

    def passed(self, stage: str) -> None:
        """Read all processes at a stage's end; a stage that ran before keeps the larger figures."""
        usages = {owner: take() for owner, take in self._sources.items()}
        found = {owner: usage for owner, usage in usages.items() if usage is not None}
        tags: dict[str, int] = {}
        processes, torch = {}, {}
        gone, waits = Counter[str](), Counter[str]()
        for owner, usage in found.items():
            before, place = self._before.get(owner, usage.tags), _place(owner)
            self._before[owner] = usage.tags
            gone[place] += sum(before.values()) - sum(usage.tags.values())
            waits[place] += usage.torch_peak_bytes - usage.torch_bytes
            most = _larger(before, usage.tags)
            tags |= {f"{tag}{place}": nbytes for tag, nbytes in most.items()}
            torch[owner] = usage.torch_peak_bytes
            # Pages that leave the page pool for a tag count once.
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
        """Return the stages since the last call."""
        stages, self.stages = self.stages, {}
        return stages


def _place(owner: str) -> str:
    return owner[owner.index("[") :] if "[" in owner else ""


def _device(found: Mapping[str, Usage], more: Mapping[str, int]) -> int | None:
    """Return the fullest device's bytes: used now, and what the stage held beyond that."""
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
    """Times the stages of a loop, collects memory, and passes both to the run's folder and view."""

    def __init__(self, folder: RunFolder, view: View) -> None:
        self.folder = folder
        self.view = view
        self.seconds: dict[str, float] = {}  # of this step, by stage
        self.memory: dict[str, dict[str, int]] = {}  # committed bytes by phase and tag
        self.peaks = Peaks()
        self.sync: dict[str, float] = {}  # of the newest weight sync
        self._told_of_loss = False
        self._moves: list[tuple[float, float]] = []  # of this step
        self._switches: list[tuple[float, float]] = []
        self._sources: dict[str, Any] = {}

    def watch(self, owner: str, side: Any) -> None:
        """Read memory and peaks of a trainer or engine as `owner`; see `Peaks.watch`.

        Args:
            side: Has `report`, `drain_events` and `take_usage`.
        """
        self._sources[owner] = side
        self.peaks.watch(owner, side.take_usage)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        self.seconds, self.memory = {}, {}
        self._moves, self._switches = [], []
        start = time.time()
        self.folder.place = f"in step {step}"
        try:
            yield
        finally:
            self.folder.run.spans.append(Span(f"step {step}", start, time.time()))

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time one stage; raise its failure as a RunError that names it."""
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
        """Do the same for work that reports its own stages to `passed`."""
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
        """Record a stage that succeeded; also the `on_stage` of `Cycle`."""
        self._timed(name, start, end)
        self.peaks.passed(name)

    def _timed(self, name: str, start: float, end: float) -> None:
        self.folder.run.spans.append(Span(name, start, end))
        self.seconds[name] = self.seconds.get(name, 0.0) + end - start
        if kind_of(name) == "switch":
            self._switches.append((start, end))
        self.view.stage(name)

    def synced(self, receipt: SyncReceipt) -> None:
        """Record bytes and seconds of this step's weight sync; warn once if rounding lost much."""
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
        """Return the bytes used of the fullest device, by anyone, that lie on no planned tag.

        Planned are the trainer's tags, and the engine's weights and KV cache.
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
        """Seconds of this step in which memory moved outside of the switch's stages."""
        return _covered([*self._moves, *self._switches]) - _covered(self._switches)

    def row(self, row: dict[str, Any]) -> None:
        self.folder.add_row(row)
        self.view.row(row)

    def read_memory(self, phase: str) -> None:
        """Take every owner's events, and its tags' bytes for the step's row, under `phase`.

        Of a tag on several devices, the fullest device's bytes count.
        """
        tags: dict[str, int] = {}
        for owner, side in self._sources.items():
            events = side.drain_events()
            self.folder.run.events.setdefault(owner, []).extend(events)
            for event in events:
                if event.op in MOVING:
                    self._moves.append((event.time - event.seconds, event.time))
            for tag, entry in side.report(others=False).tags.items():
                tags[tag] = max(tags.get(tag, 0), entry.committed_bytes)
        self.memory[phase] = tags

    def close(self) -> None:
        """Write trace and pictures and end the view; say what cannot be written, and why."""
        self.view.stage("writing trace and pictures")
        for what, write in (("trace", self.folder.write_trace), ("pictures", self.write_pictures)):
            try:
                write()
            except ImportError as error:
                self.view.note(f"no {what}: {error}; run: pip install 'memsaver[plots]'")
            except OSError as error:  # The run has perhaps failed of the same cause.
                self.view.note(f"no {what}: {one_line(error)}")
        self.view.close()

    def write_pictures(self) -> None:
        """Draw the run's pictures into its folder."""
        from recipes.logs.pictures import write_pictures

        write_pictures(self.folder.run, self.folder.path)


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the seconds that at least one of the spans covers."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def _lost_actor(cause: BaseException) -> bool:
    """Return whether an actor died after it had started, directly or behind a rank's error."""
    if isinstance(cause, RankFailed):
        cause = cause.error
    return isinstance(cause, ActorError) and cause.method != "__init__"


def describe(row: Mapping[str, Any]) -> str:
    """Return one line about a row of metrics.jsonl."""
    if row["kind"] == "eval":
        first, *others = match_names([row]).items()
        result = f"{row['exact_match']:.3f} of {row['problems']}"
        result += "".join(f", {name} {row[key]:.3f}" for key, name in others)
        return f"{first[1]} exact match {result} after {row['step']} updates"
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
        f"switch {switch_seconds(row):.3f} s",
    ]
    if (hidden := row.get("hidden_seconds", 0.0)) >= NOTABLE:
        parts[-1] += f" and {hidden:.3f} s beside work"
    return " | ".join(parts)


class View:
    """Show nothing: the view of a dry run, and the base of the others."""

    def note(self, text: str) -> None:
        """Show a line."""

    def stage(self, name: str) -> None:
        """Show the stage that runs."""

    def row(self, row: Mapping[str, Any]) -> None:
        """Show a row of metrics.jsonl."""

    def close(self) -> None:
        """End the view; only lines can follow."""


class ProgressView(View):
    """One line per row, and below them, in a terminal, a bar with the stage that runs."""

    def __init__(self, steps: int, console: Console | None = None) -> None:
        console = console or Console()
        self._steps = steps
        self._progress = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=10),
            progress.MofNCompleteColumn(),
            progress.TimeRemainingColumn(),
            # The last column wraps where a terminal is narrow, and all others stay whole.
            progress.TextColumn("{task.fields[newest]}", markup=False, table_column=Column()),
            console=console,
            disable=not console.is_interactive,
            speed_estimate_period=3600.0,  # A step may take many minutes.
        )
        self._task = self._progress.add_task("starting", total=steps, newest="")
        self._progress.start()

    def note(self, text: str) -> None:
        self._progress.console.print(Text(text), soft_wrap=True)

    def stage(self, name: str) -> None:
        self._progress.update(self._task, description=name)

    def row(self, row: Mapping[str, Any]) -> None:
        if row["kind"] == "eval":
            self.note(f"eval: {describe(row)}")
            return
        newest = f"reward {row['reward']:.3f}, {row['step_seconds']:.1f} s, "
        newest += f"{row['tokens_per_second']:.0f} tok/s"
        self._progress.update(self._task, completed=row["step"], newest=newest)
        left = self._progress.tasks[0].time_remaining
        eta = "" if left is None else f" | ETA {datetime.timedelta(seconds=round(left))}"
        self.note(f"step {row['step']}/{self._steps}: {describe(row)}{eta}")

    def close(self) -> None:
        self._progress.stop()
