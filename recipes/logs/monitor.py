"""Monitor of a run: times and memory of every stage, recorded and shown as it runs."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from memsaver.system.clock import steady_time
from recipes.errors import LostWorker, RecipeError, RunError, ScorerError, one_line, typed
from recipes.logs.metric_rows import BULKY, Row, kind_of
from recipes.logs.peaks import Peaks
from recipes.logs.recorded_samples import records_of
from recipes.logs.run_folder import RunFolder
from recipes.logs.stage_trace import Span, StageTrace
from recipes.logs.view import View
from recipes.loops.sampling import Samples
from recipes.loops.sink import Sink
from recipes.rewards import Scored
from rollout.tag_names import KV_CACHE, WEIGHTS
from trainer_bridge.errors import ActorDied, ActorError, ActorTimeout, RankFailed
from trainer_bridge.sync import SyncReceipt

MOVING = ("pause", "resume", "save", "prefetch")  # operations of a saver that move memory


class Monitor(Sink):
    """Recorder of a loop's stages and memory, which feeds the run's folder and its view.

    Attributes:
        folder: Folder of the run.
        view: Display of the run.
        seconds: Seconds of this step by stage.
        memory: Committed bytes of this step by phase and tag.
        peaks: Peak bytes by stage.
        trace: Stages and memory of the newest steps.
        sync: Bytes and seconds of the newest weight sync.
        samples: Largest number of answers of a row that are recorded.
        track: Passes a row and its samples to the trackers.
    """

    def __init__(
        self,
        folder: RunFolder,
        view: View,
        samples: int = 0,
        track: Callable[[Row, list[Row]], None] = lambda row, samples: None,
    ) -> None:
        self.folder = folder
        self.view = view
        self.samples = samples
        self.track = track
        self._answers: list[tuple[Any, Sequence[Any]]] = []  # of the next row
        self.seconds: dict[str, float] = {}
        self.memory: dict[str, dict[str, int]] = {}
        self.peaks = Peaks()
        self.trace = StageTrace()
        self.sync: dict[str, Any] = {}
        self._told = set[str]()  # warnings that a run shows once
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
    def part(self, name: str) -> Iterator[None]:
        self.seconds, self.memory = {}, {}
        self._moves, self._switches = [], []
        start = steady_time()
        self.folder.place = f"in {name}"
        try:
            yield
        finally:
            self.trace.spans.append(Span(name, start, steady_time()))

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time one stage and turn its failure into a RunError that names it."""
        with self.phase(name):
            start = steady_time()
            try:
                yield
            finally:
                self._timed(name, start, steady_time())
            self.peaks.passed(name)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Turn a failure of work that times its own stages into a RunError that names the stage."""
        self.view.stage(name)
        try:
            yield
        except (RunError, RecipeError):
            raise
        except ScorerError as error:
            raise RunError(name, str(error), self.folder.checkpoints.how_to_continue()) from error
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
        self.trace.spans.append(Span(name, start, end))
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
        if receipt.lossy:
            correction = "the loss is corrected for it (section correction)"
            if not corrected:
                correction = "the loss is not corrected for it, set correction.mode=auto"
            self._warn(
                f"version {receipt.version}: rounding took {receipt.merge_lost:.0%} of the "
                "adapters' move (sync.merge_lost in metrics.jsonl), so the rollout lags behind the "
                f"policy; {correction}; if that persists, raise trainer.learning_rate or set "
                "model.dtype=float32",
                about="loss",
            )

    def _warn(self, text: str, about: str) -> None:
        """Show the first of the lines about something."""
        if about not in self._told:
            self._told.add(about)
            self.view.note(text)

    def replaced(self, number: int, error: ActorDied) -> None:
        """Record that an engine is lost and started again, as replacement `number` of the run."""
        self.folder.add_restart(replacement=number, cause=str(error))
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

    def answered(self, samples: Samples, scores: Sequence[Scored]) -> None:
        """Take answers of the next row, which records some of them, with their scores."""
        if self.samples:
            self._answers.append((samples, scores))

    def row(self, row: Row) -> None:
        """Record a row with the samples of its answers; show it and pass it to the trackers.

        The row of a step gets the step's seconds and memory.
        """
        if row["kind"] == "train":
            row = row | self._of_step()
        samples = records_of(self._answers, row, self.samples)
        self._answers = []
        self.folder.add_row(row, samples)
        self.view.row(row)
        self.track(row, samples)
        if unequal := row.get("unequal_tokens"):
            self._warn(
                f"step {row['step']}: {unequal} tokens have other log-probabilities "
                "in the trainer than in the rollout, and the run continues; find the cause: "
                f"memsaver trace-mismatch {self.folder.path}",
                about="mismatch",
            )

    def _of_step(self) -> Row:
        """Return the seconds of the step's stages, and its memory."""
        # Copies: trackers read the row later, in threads of their own.
        figures: Row = {"stages": dict(self.seconds), "hidden_seconds": self.hidden_seconds}
        memory = {"memory": dict(self.memory), "peaks": self.peaks.take()}
        return {**figures, "sync": self.sync, **memory}

    def silent(self, step: int, steps: int) -> None:
        """Say what to look at when no step has had signal for a while."""
        self.view.note(
            f"step {step}: for {steps} steps, all answers to a prompt have had the same reward; "
            f"look at memsaver samples {self.folder.path}, the reward functions, "
            "task.extract, sampling.max_tokens and sampling.temperature"
        )

    def note(self, text: str) -> None:
        self.view.note(text)

    def read_memory(self, phase: str) -> None:
        """Collect the events of all owners and record the bytes of their tags under `phase`.

        For a tag on several devices, the bytes of the fullest device count.
        """
        tags: dict[str, int] = {}
        for owner, side in self._sources.items():
            events = side.drain_events()
            self.trace.events[owner].extend(events)
            for event in events:
                if event.op in MOVING:
                    self._moves.append((event.time - event.seconds, event.time))
            for tag, entry in side.report(others=False).tags.items():
                tags[tag] = max(tags.get(tag, 0), entry.committed_bytes)
        self.memory[phase] = tags

    def close(self) -> None:
        """Write trace and pictures and end the view; note in it what cannot be written."""
        self.view.stage("writing files")
        write_trace = partial(self.trace.write, self.folder.path / "trace.json")
        for name, write in (("trace", write_trace), ("pictures", self.write_pictures)):
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

        write_pictures(self.folder.rows(apart_from=BULKY), self.trace, self.folder.path)


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
