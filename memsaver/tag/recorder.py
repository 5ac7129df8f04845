"""Records what a saver has done: its operations for the timeline, its driver calls for statistics,
both for the log.

Driver calls are recorded in the shim, so those that torch's allocator makes without Python are
among them. Loggers, at level DEBUG: ``memsaver`` has a line for each operation on a tag,
``memsaver.driver`` one for each driver call.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from memsaver.errors import format_bytes
from memsaver.native import shim
from memsaver.report import CallStats, Event
from memsaver.tag.arena import Arena
from memsaver.vmm.backend import Backend

_EVENTS_KEPT = 10_000  # some 5 MB: those that nobody drains must not look like a leak
_log = logging.getLogger("memsaver")
_driver_log = logging.getLogger("memsaver.driver")


class Recorder:
    """Records for one saver, which holds its lock around every call that does not record."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._events: deque[Event] = deque(maxlen=_EVENTS_KEPT)
        self._seen = 0

    def record(self, op: str, arena: Arena, seconds: float) -> None:
        """Records one operation on one tag, which has ended."""
        arena.note_time(op, seconds)
        event = Event(
            time=time.time(),
            seconds=seconds,
            op=op,
            tag=arena.tag,
            committed_bytes=arena.stats.committed,
            backup_bytes=arena.backup.host_bytes if arena.backup else 0,
        )
        self._events.append(event)
        if _log.isEnabledFor(logging.DEBUG):
            held = (
                f"{format_bytes(event.committed_bytes)}, {format_bytes(event.backup_bytes)} saved"
            )
            _log.debug(
                "%s %r on %s: %s, %.3f ms", op, arena.tag, self._backend.device, held, 1e3 * seconds
            )

    @contextmanager
    def timed(self, op: str, arenas: Sequence[Arena]) -> Iterator[None]:
        """Record an operation on these tags, an equal share of its time each, unless it fails."""
        started = time.perf_counter()
        yield
        self.record_all(op, arenas, time.perf_counter() - started)

    def record_all(self, op: str, arenas: Sequence[Arena], seconds: float) -> None:
        """Records one operation on these tags, an equal share of its time each."""
        for arena in arenas:
            self.record(op, arena, seconds / len(arenas))

    def drain(self) -> list[Event]:
        """The operations since the last call, oldest first."""
        events = list(self._events)
        self._events.clear()
        return events

    def statistics(self) -> dict[str, CallStats]:
        """Driver calls so far by operation, those that were made at all."""
        sums = shim.calls(self._backend.phys)
        return {
            operation.name.lower(): CallStats(
                calls=item.calls, failed=item.failed, nbytes=item.nbytes, seconds=item.ns * 1e-9
            )
            for operation, item in sums.items()
            if item.calls
        }

    @contextmanager
    def logged(self) -> Iterator[None]:
        """Sends an operation's driver calls to the log, whether it fails or not."""
        try:
            yield
        finally:
            if _driver_log.isEnabledFor(logging.DEBUG):
                self._log_calls()

    def _log_calls(self) -> None:
        count, calls = shim.recent_calls(self._backend.phys, self._seen)
        if lost := count - self._seen - len(calls):
            _driver_log.debug("%d calls are not shown", lost)
        self._seen = count
        for call in calls:
            name = shim.Operation(call.operation).name.lower()
            size, outcome = format_bytes(call.nbytes), self._outcome(call)
            _driver_log.debug("%s %s, %.1f us%s", name, size, call.ns / 1e3, outcome)

    def _outcome(self, call: shim.Call) -> str:
        if call.error <= 0:
            return ": failed" if call.error else ""
        return f": failed with {self._backend.error_name(call.error)}"
