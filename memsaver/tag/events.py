"""Record what a saver has done: its operations for the timeline, these and its driver calls for the
log; check that its tables agree.

Driver calls are recorded in the shim, so those that torch's allocator makes without Python are
among them. Loggers, at level DEBUG: ``memsaver`` has a line for each operation on a tag,
``memsaver.driver`` one for each driver call.
"""

from __future__ import annotations

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
from memsaver.tag.arena import Arena


class _Tables(NamedTuple):
    """Read one after the other: regions may grow meanwhile."""

    kept: list[shim.Extent]
    of_tags: list[tuple[list[shim.Extent], int]]
    """Extents, and committed bytes."""
    made: int


def _read(arenas: Sequence[Arena], pool: PagePool, backend: Backend) -> _Tables:
    of_tags = [(shim.extents(arena.slot), arena.stats.committed) for arena in arenas]
    return _Tables(pool.extents, of_tags, backend.committed_bytes)


def check_tables(arenas: Iterable[Arena], pool: PagePool, backend: Backend) -> None:
    """Raise ``AssertionError`` where the tables of extents, tags and page pool keep disagreeing."""
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
    found, aliased = [*tables.kept], set[int]()
    for arena, (extents, committed) in zip(arenas, tables.of_tags, strict=True):
        end = 0
        for extent in extents:
            assert extent.offset == end, f"{arena.tag}: extents have a hole at {end}"
            end += extent.nbytes
        assert end == committed, f"{arena.tag}: {end} bytes of extents, {committed} committed"
        assert not (arena.paused and end), f"{arena.tag} is paused with {end} bytes committed"
        found += extents
        if arena.aliased is not None:
            _check_aliased(arena)
            aliased |= {extent.id for extent in arena.aliased.extents}
    total = sum(extent.nbytes for extent in found)
    assert total == tables.made, f"{total} bytes known, {tables.made} made"
    assert len(found) == len({extent.id for extent in found}), "an extent is in two places"
    assert aliased.isdisjoint(extent.id for extent in found), (
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
        """Record one operation on one tag, which has ended."""
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
        """Record one operation on these tags, an equal share of its time each."""
        for arena in arenas:
            self.record(op, arena, seconds / len(arenas))

    def drain(self) -> list[Event]:
        """Return the operations since the last call, oldest first."""
        # threads record meanwhile: what they add stays for the next call
        return [self._events.popleft() for _ in range(len(self._events))]

    @contextmanager
    def logged(self) -> Iterator[None]:
        """Send an operation's driver calls to the log, whether it fails or not."""
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
