"""Recorder of a saver's operations and driver calls, and the check that its tables agree.

At level DEBUG, the logger ``memsaver`` gets one line per operation on a tag, and the logger
``memsaver.driver`` one line per driver call. The shim records driver calls, so they include the
calls that torch's allocator makes without Python.
"""

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from memsaver.errors import format_bytes
from memsaver.memory.backend import Backend
from memsaver.memory.page_pool import PagePool, imports
from memsaver.native import shim
from memsaver.report import Event
from memsaver.system.clock import steady_time
from memsaver.tag.arena import Arena
from memsaver.types import Operation


class _Tables(NamedTuple):
    """Tables, read one after the other: a region may grow between two readings."""

    pool: list[shim.Extent]
    tags: list[tuple[list[shim.Extent], int]]  # extents and committed bytes of each
    committed: int


def _read(arenas: Sequence[Arena], pool: PagePool, backend: Backend) -> _Tables:
    tags = [(shim.extents(arena.slot), arena.stats.committed) for arena in arenas]
    return _Tables(pool.extents, tags, backend.committed_bytes)


def check_tables(arenas: Iterable[Arena], pool: PagePool, backend: Backend) -> None:
    """Raise ``AssertionError`` if two readings of the tables show the same contradiction."""
    arenas = [*arenas]
    tables = _read(arenas, pool, backend)
    while True:
        try:
            return _check(arenas, tables)
        except AssertionError:
            if (again := _read(arenas, pool, backend)) == tables:
                raise
            tables = again


def _check(arenas: Sequence[Arena], tables: _Tables) -> None:
    known, aliased = [*tables.pool], set[int]()
    for arena, (extents, committed) in zip(arenas, tables.tags, strict=True):
        end = 0
        for extent in extents:
            assert extent.offset == end, f"{arena.tag}: extents have a hole at {end}"
            end += extent.nbytes
        assert end == committed, f"{arena.tag}: {end} bytes of extents, {committed} committed"
        assert not (arena.paused and end), f"{arena.tag} is paused with {end} bytes committed"
        known += extents
        if arena.aliased is not None:
            _check_aliased(arena)
            aliased |= {extent.id for extent in arena.aliased.extents}
    total = sum(extent.nbytes for extent in known)
    assert total == tables.committed, f"{total} bytes in tables, {tables.committed} committed"
    assert len(known) == len({extent.id for extent in known}), "an extent is in two places"
    assert aliased.isdisjoint(extent.id for extent in known), (
        "an extent is aliased from the saver itself"
    )


def _check_aliased(arena: Arena) -> None:
    aliased, stats = arena.aliased, arena.stats
    assert aliased is not None and not arena.paused, f"{arena.tag} is paused with aliased pages"
    assert not stats.committed, (
        f"{arena.tag} has aliased pages and {stats.committed} bytes of its own"
    )
    assert stats.state == shim.PAUSED, f"{arena.tag} could grow behind aliased pages"
    ends = [extent.offset + extent.nbytes for extent in aliased.extents]
    assert [0, *ends] == [*(extent.offset for extent in aliased.extents), aliased.nbytes], (
        f"{arena.tag}: a hole in aliased pages"
    )
    assert imports.pinned([extent.id for extent in aliased.extents]), (
        f"{arena.tag}: aliased extents are not held"
    )


_EVENTS_KEPT = 10_000  # about 5 MB; a limit, so that undrained events do not leak
_log = logging.getLogger("memsaver")
_driver_log = logging.getLogger("memsaver.driver")


class Recorder:
    """Recorder of one saver. The saver holds its lock around `drain` and `logged`."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._events: deque[Event] = deque(maxlen=_EVENTS_KEPT)
        self._logged = 0  # number of driver calls that the log has covered

    def record(self, op: Operation, arena: Arena, seconds: float) -> None:
        """Record an operation on one tag that has ended."""
        event = Event(
            time=steady_time(),
            seconds=seconds,
            op=op,
            tag=arena.tag,
            committed_bytes=arena.stats.committed,
            backup_bytes=arena.backup.host_bytes if arena.backup else 0,
        )
        self._events.append(event)
        if _log.isEnabledFor(logging.DEBUG):
            sizes = (
                f"{format_bytes(event.committed_bytes)}, {format_bytes(event.backup_bytes)} saved"
            )
            device = self._backend.device
            _log.debug("%s %r on %s: %s, %.3f ms", op, arena.tag, device, sizes, 1e3 * seconds)

    @contextmanager
    def timed(self, op: Operation, arenas: Sequence[Arena]) -> Iterator[None]:
        """Time the body and record it as one operation on these tags, unless it fails."""
        started = time.perf_counter()
        yield
        self.record_all(op, arenas, time.perf_counter() - started)

    def record_all(self, op: Operation, arenas: Sequence[Arena], seconds: float) -> None:
        """Record one operation on several tags, with an equal share of its time for each."""
        for arena in arenas:
            self.record(op, arena, seconds / len(arenas))

    def drain(self) -> list[Event]:
        """Return the operations since the last call, oldest first."""
        # Other threads may record in the meantime; the next call returns their events.
        return [self._events.popleft() for _ in range(len(self._events))]

    @contextmanager
    def logged(self) -> Iterator[None]:
        """Log the driver calls of the body, even if it fails."""
        try:
            yield
        finally:
            if _driver_log.isEnabledFor(logging.DEBUG):
                self._log_calls()

    def _log_calls(self) -> None:
        count, calls = shim.recent_calls(self._backend.phys, self._logged)
        if lost := count - self._logged - len(calls):
            _driver_log.debug("%d calls are not shown", lost)
        self._logged = count
        for call in calls:
            name = shim.Operation(call.operation).name.lower()
            size, outcome = format_bytes(call.nbytes), self._outcome(call)
            _driver_log.debug("%s %s, %.1f us%s", name, size, call.ns / 1e3, outcome)

    def _outcome(self, call: shim.Call) -> str:
        if call.error <= 0:
            return ": failed" if call.error else ""
        return f": failed with {self._backend.error_name(call.error)}"
