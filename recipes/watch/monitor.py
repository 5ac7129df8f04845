"""Stages as they pass: timed, shown, written down; and a failure gets the name of its stage."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from recipes.errors import LostWorker, RecipeError, RunError, one_line
from recipes.watch.history import kind_of, seconds_beside, spans_of_moves
from recipes.watch.live import View
from recipes.watch.peaks import Peaks
from recipes.watch.run_folder import RunFolder
from rollout.tags import KV_CACHE, WEIGHTS
from trainer_bridge.errors import ActorError, ActorTimeout, RankFailed

if TYPE_CHECKING:
    from memsaver import Event, Report, Usage
    from trainer_bridge.sync import SyncReceipt


class Watched(Protocol):
    """A side whose memory is read; see `Trainer` and `Engine`."""

    def report(self, *, others: bool) -> Report: ...

    def drain_events(self) -> list[Event]: ...

    def take_usage(self) -> Usage: ...


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
        self._switches: list[tuple[float, float]] = []  # of this step, as what follows
        self._moves: list[tuple[float, float]] = []
        self._sources: dict[str, Watched] = {}

    def watch(self, owner: str, side: Watched) -> None:
        """Reads memory from `owner` (rollout, or trainer[0] and others): its tags at `read_memory`,
        its peaks after every stage.
        """
        self._sources[owner] = side
        self.peaks.watch(owner, side.take_usage)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        self.seconds, self.memory = {}, {}
        self._switches, self._moves = [], []
        start = time.time()
        yield
        self.folder.add_span(f"step {step}", start, time.time())

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
        self.folder.add_span(name, start, end)
        self.seconds[name] = self.seconds.get(name, 0.0) + end - start
        if kind_of(name) == "switch":
            self._switches.append((start, end))
        self.view.stage(name)

    def synced(self, receipt: SyncReceipt) -> None:
        """Notes what the sync of this step moved: bytes of all targets, and seconds of the copies
        and of reading back.
        """
        names = ("nbytes", "link_bytes", "seconds", "copy_seconds", "verify_seconds")
        self.sync = {name: getattr(receipt, name) for name in names}

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
            self.folder.add_events(owner, events)
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
