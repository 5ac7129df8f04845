"""Monitor of a run: times and memory of every stage, recorded and shown as it runs.

Within a stage, the tags of a side either only come or only go. So the peak of a process is the
larger of its tags' bytes before and after the stage, plus torch's own peak. The rest of the
device's memory (contexts, libraries) does not change. If the tags of one side come while those of
the other go, they take the pages that become free.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich import progress
from rich.console import Console
from rich.table import Column
from rich.text import Text

from memsaver import Usage
from memsaver.system.clock import steady_time
from recipes.errors import LostWorker, RecipeError, RunError, ScorerError, one_line, typed
from recipes.logs.recorded_samples import records_of
from recipes.logs.run_folder import Row, RunFolder, Span, kind_of, qualities, switch_seconds
from rollout.tag_names import KV_CACHE, WEIGHTS
from trainer_bridge.errors import ActorDied, ActorError, ActorTimeout, RankFailed
from trainer_bridge.sync import SyncReceipt

TakeUsage = Callable[[], Usage | None]
MOVING = ("pause", "resume", "save", "prefetch")  # operations of a saver that move memory
NOTABLE = 1e-3  # seconds of overlapped moves that are shown
QUIET = 60.0  # seconds of a stage after which a log says that it still runs
COUNTED = {"groups_without_signal": "groups without signal", "faults": "faults of rewards"}
OF_MODELS = {"kl_to_reference": "kl", "value_explained_variance": "critic explains"}


class Peaks:
    """Peak bytes of each stage: of processes, of torch in them, of tags, and of the fullest device.

    Processes are counted without contexts and libraries. On a CPU, "device_bytes" is None. Devices
    without a trainer count as "rollout_device_bytes", which is absent without such devices.
    """

    def __init__(self) -> None:
        self.stages: dict[str, dict[str, Any]] = {}
        self._sources: dict[str, TakeUsage] = {}
        self._before: dict[str, dict[str, int]] = {}

    def watch(self, owner: str, take_usage: TakeUsage) -> None:
        """Register a process.

        `owner` is "trainer" or "rollout", followed by "[rank]" if there are several.
        """
        self._sources[owner] = take_usage

    def passed(self, stage: str) -> None:
        """Read all processes at the end of a stage; repeated stages keep the larger figures."""
        readings = {owner: take() for owner, take in self._sources.items()}
        usages = {owner: usage for owner, usage in readings.items() if usage is not None}
        tags: dict[str, int] = {}
        processes, torch = {}, {}
        freed, torch_extra = Counter[str](), Counter[str]()
        for owner, usage in usages.items():
            before, place = self._before.get(owner, usage.tags), _place(owner)
            self._before[owner] = usage.tags
            freed[place] += sum(before.values()) - sum(usage.tags.values())
            torch_extra[place] += usage.torch_peak_bytes - usage.torch_bytes
            larger = _larger(before, usage.tags)
            tags |= {f"{tag}{place}": nbytes for tag, nbytes in larger.items()}
            torch[owner] = usage.torch_peak_bytes
            # A page that moves from the page pool to a tag counts once.
            held = max(sum(before.values()), sum(usage.tags.values()))
            processes[owner] = held + usage.torch_peak_bytes
        more = +freed + torch_extra
        trained = {_place(owner) for owner in usages if owner.startswith("trainer")}
        apart = {owner: usage for owner, usage in usages.items() if _place(owner) not in trained}
        beside = {owner: usage for owner, usage in usages.items() if owner not in apart}
        entry: dict[str, Any] = {"processes": processes, "torch": torch, "tags": tags}
        entry["device_bytes"] = _device(beside or apart, more)
        if beside and apart:
            entry["rollout_device_bytes"] = _device(apart, more)
        self.stages[stage] = _merged(self.stages[stage], entry) if stage in self.stages else entry

    def take(self) -> dict[str, dict[str, Any]]:
        """Return and forget the stages since the last call."""
        stages, self.stages = self.stages, {}
        return stages


def _place(owner: str) -> str:
    return owner[owner.index("[") :] if "[" in owner else ""


def _device(usages: Mapping[str, Usage], more: Mapping[str, int]) -> int | None:
    """Return the fullest device's bytes: those used now plus those held earlier in the stage."""
    places: dict[str, int] = {}
    for owner, usage in usages.items():
        if usage.device_used_bytes is not None:
            places[_place(owner)] = max(places.get(_place(owner), 0), usage.device_used_bytes)
    return max((used + more.get(place, 0) for place, used in places.items()), default=None)


def _larger(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
    return {key: max(first.get(key, 0), second.get(key, 0)) for key in {**first, **second}}


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    larger: dict[str, Any] = {
        name: _larger(first[name], second[name]) for name in ("processes", "torch", "tags")
    }
    for name in first.keys() - larger:
        sizes = [entry[name] for entry in (first, second) if entry[name] is not None]
        larger[name] = max(sizes, default=None)
    return larger


class Monitor:
    """Recorder of a loop's stages and memory, which feeds the run's folder and its view.

    Attributes:
        folder: Folder of the run.
        view: Display of the run.
        seconds: Seconds of this step by stage.
        memory: Committed bytes of this step by phase and tag.
        peaks: Peak bytes by stage.
        sync: Bytes and seconds of the newest weight sync.
        samples: Largest number of answers of a row that are recorded.
        track: Passes a row and its samples to the trackers, and returns lines to show.
    """

    def __init__(
        self,
        folder: RunFolder,
        view: View,
        samples: int = 0,
        track: Callable[[Row, list[Row]], list[str]] = lambda row, samples: [],
    ) -> None:
        self.folder = folder
        self.view = view
        self.samples = samples
        self.track = track
        self._answers: list[tuple[Any, Sequence[Any]]] = []  # of the next row
        self.seconds: dict[str, float] = {}
        self.memory: dict[str, dict[str, int]] = {}
        self.peaks = Peaks()
        self.sync: dict[str, Any] = {}
        self._told_of_loss = self._told_of_unequal = False
        self._moves: list[tuple[float, float]] = []  # of this step
        self._switches: list[tuple[float, float]] = []
        self._sources: dict[str, Any] = {}

    def watch(self, owner: str, side: Any) -> None:
        """Register a trainer or an engine, whose memory and peaks are recorded.

        `side` has the methods `report`, `drain_events` and `take_usage`; `owner` is as in
        `Peaks.watch`.
        """
        self._sources[owner] = side
        self.peaks.watch(owner, side.take_usage)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        self.seconds, self.memory = {}, {}
        self._moves, self._switches = [], []
        start = steady_time()
        self.folder.place = f"in step {step}"
        try:
            yield
        finally:
            self.folder.run.spans.append(Span(f"step {step}", start, steady_time()))

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time one stage and turn its failure into a RunError that names it."""
        with self.phase(name):
            start = steady_time()
            try:
                yield
            except BaseException:
                self._timed(name, start, steady_time())
                raise
            self.passed(name, start, steady_time())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Turn a failure of work that times its own stages into a RunError that names the stage."""
        self.view.stage(name)
        try:
            yield
        except (RunError, RecipeError):
            raise
        except ScorerError as error:
            raise RunError(name, str(error), self.folder.how_to_continue()) from error
        except Exception as error:
            stage, cause = str(getattr(error, "stage", name)), getattr(error, "cause", None)
            if not isinstance(cause, BaseException):
                cause = error
            kind = LostWorker if _lost_actor(cause) else RunError
            late = isinstance(cause, ActorTimeout)
            hint = " (if it was still working: raise cluster.call_timeout)" if late else ""
            raise kind(stage, f"{typed(cause)}{hint}") from error

    def passed(self, name: str, start: float, end: float, *details: Any) -> None:
        """Record a stage that succeeded; `Cycle` calls this as its `on_stage`."""
        self._timed(name, start, end)
        self.peaks.passed(name)

    def _timed(self, name: str, start: float, end: float) -> None:
        self.folder.run.spans.append(Span(name, start, end))
        self.seconds[name] = self.seconds.get(name, 0.0) + end - start
        if kind_of(name) == "switch":
            self._switches.append((start, end))

    def synced(self, receipt: SyncReceipt, corrected: bool) -> None:
        """Record this step's weight sync; warn once if rounding took much of the adapters' move.

        `corrected` is whether the recipe corrects the loss for such a rollout.
        """
        names = ["nbytes", "link_bytes", "node_bytes", "seconds", "copy_seconds", "verify_seconds"]
        names += ["merge_lost"] if receipt.merge_lost is not None else []
        self.sync = {name: getattr(receipt, name) for name in names}
        self.sync["stages"] = receipt.stages
        if receipt.lossy and not self._told_of_loss:
            self._told_of_loss = True
            correction = "the loss is corrected for it (section correction)"
            if not corrected:
                correction = "the loss is not corrected for it, set correction.mode=auto"
            self.view.note(
                f"version {receipt.version}: rounding took {receipt.merge_lost:.0%} of the "
                "adapters' move (sync.merge_lost in metrics.jsonl), so the rollout lags behind the "
                f"policy; {correction}; if that persists, raise trainer.learning_rate or set "
                "model.dtype=float32"
            )

    def replaced(self, number: int, error: ActorDied) -> None:
        """Record that an engine is lost and started again, as replacement `number` of the run."""
        self.folder.add_replacement(number, str(error))
        self.view.note(f"replacement {number} of a lost engine: {one_line(error)}")

    def outside(self) -> int:
        """Return the bytes outside of the planned tags, on the device that has the most of them.

        Planned tags are the trainer's, and the engine's weights and KV cache. Bytes of other
        processes count as outside.
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
        """Return the seconds of this step in which memory moved outside of the switch's stages."""
        return _covered([*self._moves, *self._switches]) - _covered(self._switches)

    def answered(self, samples: Any, scores: Sequence[Any]) -> None:
        """Take answers of the next row, which records some of them, with their scores."""
        if self.samples:
            self._answers.append((samples, scores))

    def row(self, row: Row) -> None:
        """Record a row with the samples of its answers; show it and pass it to the trackers."""
        samples = records_of(self._answers, row, self.samples)
        self._answers = []
        self.folder.add_row(row, samples)
        self.view.row(row)
        for line in self.track(row, samples):
            self.view.note(line)
        if row.get("unequal_tokens") and not self._told_of_unequal:
            self._told_of_unequal = True
            self.view.note(
                f"step {row['step']}: {row['unequal_tokens']} tokens have other log-probabilities "
                "in the trainer than in the rollout, and the run continues; find the cause: "
                f"memsaver trace-mismatch {self.folder.path}"
            )

    def read_memory(self, phase: str) -> None:
        """Collect the events of all owners and record the bytes of their tags under `phase`.

        For a tag on several devices, the bytes of the fullest device count.
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
        """Write trace and pictures and end the view; note in it what cannot be written."""
        self.view.stage("writing files")
        for name, write in (("trace", self.folder.write_trace), ("pictures", self.write_pictures)):
            try:
                write()
            except ImportError as error:
                self.view.note(f"no {name}: {error}; run: pip install 'memsaver[plots]'")
            except OSError as error:  # The run may have failed for the same reason.
                self.view.note(f"no {name}: {one_line(error)}")
        self.view.close()

    def write_pictures(self) -> None:
        """Write the run's pictures into its folder."""
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
    """Return whether an actor died after its start, also if a rank's error wraps the cause."""
    if isinstance(cause, RankFailed):
        cause = cause.error
    return isinstance(cause, ActorError) and cause.method != "__init__"


def describe(row: Mapping[str, Any]) -> str:
    """Return one line about a row of metrics.jsonl, with figures separated by bars."""
    if row["kind"] == "eval":
        shares = ", ".join(f"{name} {value:.3f}" for name, value in qualities(row).items())
        return f"{shares} on {row['problems']} held-out problems after {row['step']} updates"
    spread = row.get("reward_std")
    parts = [
        f"reward {_decimal(row)}" + (f" ± {spread:.3f}" if spread is not None else ""),
        *(f"{row[key]} {words}" for key, words in COUNTED.items() if row.get(key)),
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
        self._figures(f"step {row['step']}/{self._steps}: {describe(row)}{eta}")

    def _figures(self, text: str) -> None:
        """Print figures separated by bars; in a terminal, break the line between figures only."""
        console = self._progress.console
        first, *figures = text.split(" | ")
        lines = [first]
        for figure in figures:
            if console.is_terminal and len(f"{lines[-1]} | {figure}") > console.width:
                lines.append(f"  {figure}")
            else:
                lines[-1] += f" | {figure}"
        self.note("\n".join(lines))

    def close(self) -> None:
        self._closed.set()
        if self._reporting.is_alive():
            self._reporting.join()
        self._progress.stop()
