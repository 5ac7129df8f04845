"""Delivery of a run's rows and samples to its trackers, with a thread for each tracker.

trackers.jsonl in the run's folder has each tracker's name of the run, with which a resumed run
continues, and the newest row that an earlier session offered to the tracker. A step that is
repeated after a resume keeps its first figures in the trackers. A slow or failing tracker costs
the run nothing but a note.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from memsaver.system.files import replace_text
from recipes.errors import RecipeError, counted, typed
from recipes.logs.metric_rows import METRICS, Row, json_lines, position_of, whole_rows
from recipes.logs.trackers import Tracker, figures_of, make_tracker

RUNS = "trackers.jsonl"
MOST_WAITING = 1000  # rows for one tracker; further ones are left out
FAILURES = (Exception, SystemExit)  # of a tracker's library
GRACE = 30.0  # seconds in which the end of a run waits for its trackers

NOWHERE: Row = {"kind": "train", "step": -1}
"""Place before all rows."""


class Delivery:
    """Thread that delivers rows to one tracker, in order.

    Args:
        name: Name of the tracker, as in the recipe.
        tracker: The tracker, which has been started; the thread closes it.
        newest: Newest row that the tracker has had in earlier sessions; kind and step count.
    """

    def __init__(self, name: str, tracker: Tracker, newest: Row) -> None:
        self.name, self._tracker, self.newest = name, tracker, newest
        self._waiting = queue.SimpleQueue[tuple[Row, Sequence[Row]] | None]()
        # The run's thread writes `newest` and `_offered`, the tracker's thread `_delivered`, so
        # neither needs a lock. A queue hands the rows over. `join` compares the two counts after
        # the tracker's thread has ended, or has been given up.
        self._offered = 0
        self._delivered = 0
        # A daemon, so that a tracker which hangs does not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def offer(self, row: Row, samples: Sequence[Row]) -> None:
        """Deliver a row soon, unless the tracker keeps figures and has had the row."""
        if self._tracker.keeps and position_of(row) <= position_of(self.newest):
            return
        self.newest = row
        self._offered += 1
        if self._waiting.qsize() < MOST_WAITING:
            self._waiting.put((row, samples))

    def close(self) -> None:
        """Begin to end, after the rows that wait."""
        self._waiting.put(None)

    def join(self, deadline: float) -> None:
        """Wait for the end until `time.monotonic()` is `deadline`; tell how many rows are lost."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._tell(f"does not answer for {GRACE:.0f} s")
        if missing := self._offered - self._delivered:
            self._tell(f"not delivered at the end: {counted(missing, 'row')}")

    def _tell(self, text: str) -> None:
        # Either thread calls this. A display with a live bar shows what is printed above the bar.
        with contextlib.suppress(OSError, ValueError):  # Nobody reads standard output any more.
            print(f"tracker {self.name}: {text}", flush=True)

    def _work(self) -> None:
        failing = False
        while (item := self._waiting.get()) is not None:
            try:
                self._deliver(*item)
            except FAILURES as error:
                if not failing:
                    self._tell(f"{typed(error)}; the run continues without such rows")
                failing = True
            else:
                self._delivered += 1
                failing = False
        try:
            self._tracker.close()
        except FAILURES as error:
            self._tell(f"close: {typed(error)}")

    def _deliver(self, row: Row, samples: Sequence[Row]) -> None:
        self._tracker.log(figures_of(row), row["step"])
        if samples:
            self._tracker.table(samples, row["step"])


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
        self._runs, self._file = dict[str, Row](), Path()

    def start(self, folder: Path, config: Mapping[str, Any]) -> None:
        """Start all trackers for the run in `folder`, new or before it is cut back for a resume.

        Raises:
            RecipeError: A tracker refuses.
        """
        runs: dict[str, Row] = {}
        for entry in whole_rows(folder / RUNS):
            runs[entry["tracker"]] = runs.get(entry["tracker"], NOWHERE) | entry
        last = [NOWHERE, *whole_rows(folder / METRICS)][-1]
        for name, tracker in self._trackers.items():
            before = runs.get(name)
            try:
                run_id = tracker.start(folder.name, folder, config, (before or {}).get("run_id"))
            except FAILURES as error:
                rule = f"cannot start: {typed(error)}; correct that, or drop it from trackers"
                raise RecipeError(f"trackers={name}: {rule}") from error
            newest = max(before, last, key=position_of) if before else NOWHERE
            runs[name] = {"tracker": name, "run_id": run_id}
            self._deliveries.append(Delivery(name, tracker, newest))
        self._runs, self._file = runs, folder / RUNS
        self.record()

    def record(self) -> None:
        """Record the newest rows that were offered, before rows are cut back for a restart."""
        for delivery in self._deliveries:
            self._runs[delivery.name] |= {key: delivery.newest[key] for key in NOWHERE}
        if self._runs:
            replace_text(self._file, json_lines(self._runs.values()))

    def add(self, row: Row, samples: Sequence[Row] = ()) -> None:
        """Deliver a row with its samples to each tracker."""
        for delivery in self._deliveries:
            delivery.offer(row, samples)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for delivery in self._deliveries:
            delivery.close()
        deadline = time.monotonic() + GRACE  # for all of them together
        for delivery in self._deliveries:
            delivery.join(deadline)
