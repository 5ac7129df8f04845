"""Delivery of a run's rows and samples to its trackers, with a thread for each tracker.

trackers.jsonl in the run's folder says which rows a tracker has. A resumed run delivers the rows
that a tracker lacks, and none twice, unless a kill came between a delivery and its record. A step
that is repeated after a resume keeps its first figures in the trackers. A tracker that fails costs
the run nothing but a note.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

from memsaver.system.files import replace_text
from recipes.errors import RecipeError, typed
from recipes.logs.metric_rows import Row, append_rows, json_lines, whole_rows
from recipes.logs.recorded_samples import read_samples
from recipes.logs.run_folder import RunFolder
from recipes.logs.trackers import Tracker, figures_of, make_tracker

LEDGER = "trackers.jsonl"
ATTEMPTS = 5  # to deliver a row, which is then left out
LONGEST_PAUSE = 60.0  # seconds between attempts
MOST_WAITING = 1000  # new rows for one tracker; the oldest are left out
FAILURES = (Exception, SystemExit)  # of a tracker's library
GRACE = 30.0  # seconds in which the end of a run waits for its trackers

Place = tuple[int, bool]
"""Step and kind of a row, in the order of rows: a step, then the evaluation after it."""


def place_of(row: Mapping[str, Any]) -> Place:
    return row["step"], row["kind"] == "eval"


class TrackerLedger:
    """Owner of trackers.jsonl: each tracker's newest row, and its name of the run."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / LEDGER
        self.run_ids: dict[str, str] = {}
        self.newest: dict[str, Place] = {}
        entries = whole_rows(self._file)
        for entry in entries:
            if "run_id" in entry:
                self.run_ids[entry["tracker"]] = entry["run_id"]
            else:
                self.newest[entry["tracker"]] = place_of(entry)
        if entries:  # A killed run may have left half a line.
            replace_text(self._file, json_lines(entries))

    def add(self, tracker: str, **entry: Any) -> None:
        append_rows(self._file, {"tracker": tracker, **entry})


class Delivery:
    """Thread that delivers rows to one tracker, in order, each once.

    Args:
        name: Name of the tracker, as in the recipe.
        tracker: The tracker, which has been started; the thread closes it.
        ledger: Record of the rows that the tracker has.
        tell: Takes lines for the user.
    """

    def __init__(
        self, name: str, tracker: Tracker, ledger: TrackerLedger, tell: Callable[[str], None]
    ) -> None:
        self._name, self._tracker, self._ledger, self._tell = name, tracker, ledger, tell
        self._newest = ledger.newest.get(name, (-1, False))
        self._waiting: deque[tuple[Row, deque[Callable[[], None]]]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._failures = 0  # since the last call that succeeded
        self._lost = 0
        self._most = MOST_WAITING
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def allow(self, rows: int) -> None:
        """Let this many rows of earlier sessions wait besides the new ones."""
        self._most = MOST_WAITING + rows

    def offer(self, row: Row, samples: Sequence[Row]) -> None:
        """Deliver a row soon, unless the tracker has it."""
        if self._tracker.keeps and place_of(row) <= self._newest:
            return
        self._newest, step = place_of(row), row["step"]
        calls: deque[Callable[[], None]] = deque()
        calls.append(partial(self._tracker.log, figures_of(row), step))
        if samples:
            calls.append(partial(self._tracker.table, samples, step))
        with self._changed:
            if len(self._waiting) == self._most:
                self._waiting.popleft()
                self._lost += 1
            self._waiting.append((row, calls))
            self._changed.notify()

    def close(self) -> None:
        """Begin to end: deliver what waits, until a call fails."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def join(self, deadline: float) -> None:
        """Wait for the end until `time.monotonic()` is `deadline`; tell how many rows are lost."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._tell(f"tracker {self._name}: does not answer for {GRACE:.0f} s")
        if missing := self._lost + len(self._waiting):
            rest = f"; --resume delivers the last {len(self._waiting)}" if self._waiting else ""
            self._tell(f"tracker {self._name}: {missing} rows were not delivered{rest}")

    def _work(self) -> None:
        while self._next() and self._deliver(*self._waiting[0]):
            pass
        try:
            self._tracker.close()
        except FAILURES as error:
            self._tell(f"tracker {self._name}: close: {typed(error)}")

    def _next(self) -> bool:
        """Wait for a row; return whether there is one."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            return bool(self._waiting)

    def _deliver(self, row: Row, calls: deque[Callable[[], None]]) -> bool:
        """Try to deliver a row; return whether to continue with further rows."""
        for attempt in itertools.count(1):
            try:
                while calls:
                    calls[0]()
                    calls.popleft()
            except FAILURES as error:
                self._failed(error)
                if self._closing:
                    return False
                if attempt < ATTEMPTS:
                    self._pause()
                    continue
                self._lost += 1
            else:
                if self._failures:
                    self._tell(f"tracker {self._name}: works again")
                self._failures = 0
            break
        with self._changed:
            if self._waiting and self._waiting[0][0] is row:
                self._waiting.popleft()
        if self._tracker.keeps:
            with contextlib.suppress(OSError):  # A full disk ends the run itself.
                self._ledger.add(self._name, kind=row["kind"], step=row["step"])
        return True

    def _failed(self, error: BaseException) -> None:
        self._failures += 1
        if self._failures == 1:
            self._tell(f"tracker {self._name}: {typed(error)}; the run continues, and tries again")

    def _pause(self) -> None:
        """Wait before another attempt, the longer the more attempts have failed."""
        with self._changed:
            seconds = min(LONGEST_PAUSE, 2.0 ** (self._failures - 1))
            self._changed.wait_for(lambda: self._closing, seconds)


class Trackers:
    """The trackers of a run; a context manager that closes them.

    Args:
        names: Names as in the key `trackers`.

    Raises:
        RecipeError: A name is wrong, or a library is missing.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._trackers = {name: make_tracker(name) for name in names}
        self._deliveries: list[Delivery] = []
        self._notes: queue.SimpleQueue[str] = queue.SimpleQueue()

    def start(self, folder: Path, config: Mapping[str, Any]) -> None:
        """Start all trackers for the run in `folder`, new or resumed.

        Raises:
            RecipeError: A tracker refuses.
        """
        ledger = TrackerLedger(folder)
        for name, tracker in self._trackers.items():
            before = ledger.run_ids.get(name)
            try:
                run_id = tracker.start(folder.name, folder, config, before)
                if run_id is not None and run_id != before:
                    ledger.add(name, run_id=run_id)
            except FAILURES as error:
                rule = f"cannot start: {typed(error)}; correct that, or drop it from trackers"
                raise RecipeError(f"trackers={name}: {rule}") from error
            self._deliveries.append(Delivery(name, tracker, ledger, self._notes.put))

    def add(self, row: Row, samples: Sequence[Row] = ()) -> list[str]:
        """Deliver a row with its samples; return lines for the user."""
        for delivery in self._deliveries:
            delivery.offer(row, samples)
        return self._told()

    def catch_up(self, folder: RunFolder) -> None:
        """Deliver the rows of a resumed run that trackers lack."""
        if self._deliveries and (rows := folder.rows()):
            samples: dict[Place, list[Row]] = {}
            for sample in read_samples(folder.path):
                samples.setdefault(place_of(sample), []).append(sample)
            for delivery in self._deliveries:
                delivery.allow(len(rows))
            for row in rows:
                for delivery in self._deliveries:
                    delivery.offer(row, samples.get(place_of(row), ()))

    def _told(self) -> list[str]:
        return [self._notes.get() for _ in range(self._notes.qsize())]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for delivery in self._deliveries:
            delivery.close()
        deadline = time.monotonic() + GRACE  # for all of them together
        for delivery in self._deliveries:
            delivery.join(deadline)
        for line in self._told():
            print(line, flush=True)
