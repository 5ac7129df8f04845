"""The tags of one saver, in the order of their first use. Tells who holds how much, for reports and
where memory is short; records what a saver has done: its operations for the timeline, these and
its driver calls for the log.

Driver calls are recorded in the shim, so those that torch's allocator makes without Python are
among them. Loggers, at level DEBUG: ``memsaver`` has a line for each operation on a tag,
``memsaver.driver`` one for each driver call.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from memsaver.errors import BackendError, OutOfMemory, StateError, TagError, format_bytes
from memsaver.memory.backend import Backend, ShortOfMemory
from memsaver.memory.page_pool import PagePool, imports
from memsaver.memory.torch_allocator import TorchUse
from memsaver.native import shim
from memsaver.report import Event, Report, TagReport, Usage
from memsaver.tag.arena import CONTENTS, Arena
from memsaver.tag.saving import live_ranges


class Tags:
    """The saver holds its lock around what adds a tag; looking is safe at any time."""

    def __init__(self, backend: Backend, reserve_bytes: int) -> None:
        """reserve_bytes: of addresses for each tag, rounded up to pages."""
        self._backend = backend
        self.reserve_bytes = backend.round_up(reserve_bytes)
        self._arenas: dict[str, Arena] = {}

    def __iter__(self) -> Iterator[Arena]:
        return iter(tuple(self._arenas.values()))

    def get(self, tag: str) -> Arena:
        if tag not in self._arenas:
            known = ", ".join(map(repr, self._arenas)) or "none yet"
            raise TagError(f"unknown tag {tag!r}; known tags: {known}")
        return self._arenas[tag]

    def select(self, tags: Sequence[str]) -> list[Arena]:
        """Returns each once; no tag means all."""
        return [self.get(tag) for tag in dict.fromkeys(tags or tuple(self._arenas))]

    def open(self, tag: str, content: str | None) -> Arena:
        """The tag's arena, made on first use, to allocate on."""
        check_content(content)
        arena = self._arenas.get(tag)
        if arena is None:
            arena = self._arenas[tag] = Arena(
                tag, content or "discard", self._backend, self.reserve_bytes
            )
        if content is not None and content != arena.content:
            raise TagError(
                f"tag {tag!r} has content={arena.content!r}, not {content!r}; use another tag"
            )
        if arena.paused:
            raise StateError(f"tag {tag!r} is paused; call resume({tag!r}) before allocating on it")
        arena.require_own(f"cannot allocate on {tag!r}")
        arena.cause()  # forget an earlier failure
        return arena

    def forget(self, tag: str) -> None:
        del self._arenas[tag]

    def at(self, address: int) -> Arena:
        """The one whose addresses these are."""
        for arena in self:
            if 0 <= address - arena.address < arena.reservation.nbytes:
                return arena
        raise TagError(
            "the tensor is not in any tag of this saver; make it in a region, or with empty()"
        )


def check_content(content: str | None) -> None:
    if content is not None and content not in CONTENTS:
        raise ValueError(f"content={content!r} must be one of {', '.join(map(repr, CONTENTS))}")


_PAGE_POOL = "the page pool"


class Accounts:
    """Knows what a saver's tags and page pool hold; it holds its lock around every call but
    `usage`.
    """

    def __init__(self, backend: Backend, pool: PagePool, tags: Tags) -> None:
        self._backend, self._pool, self._tags = backend, pool, tags
        self._torch_use = TorchUse(backend.device)

    def report(self, leases: Callable[[str], Collection[int]], others: bool) -> Report:
        """leases: of a tag, those that map it. others: whether to ask who they are."""
        tags = {arena.tag: _report(arena, len(leases(arena.tag))) for arena in self._tags}
        return Report(
            device=str(self._backend.device),
            limit_bytes=self._backend.limit_bytes,
            committed_bytes=self._backend.committed_bytes,
            pool_bytes=self._pool.held_bytes,
            backup_bytes=sum(tag.backup_bytes for tag in tags.values()),
            tags=tags,
            others=self._backend.other_holders() if others else {},
        )

    def usage(self) -> Usage:
        now, peak, used = self._torch_use.take(
            tuple((arena.tag, arena.stats.blocks, arena.stats.frees) for arena in self._tags)
        )
        holders = self._holders()
        backups = [arena.backup for arena in self._tags]
        if not holders[_PAGE_POOL]:
            del holders[_PAGE_POOL]
        return Usage(
            tags=holders,
            torch_bytes=now,
            torch_peak_bytes=peak,
            device_used_bytes=used,
            host_bytes=sum(backup.host_bytes for backup in backups if backup),
        )

    def _holders(self) -> dict[str, int]:
        holders = {arena.tag: arena.stats.committed for arena in self._tags}
        return holders | {_PAGE_POOL: self._pool.held_bytes}

    @contextlib.contextmanager
    def explained(self, what: str, arenas: Sequence[Arena], needed: int = 0) -> Iterator[None]:
        """Turns ``ShortOfMemory`` into an error that says what was missing, and who holds it."""
        try:
            yield
        except ShortOfMemory as short:
            raise self.shortage(what, arenas, short.cause, needed) from None

    def shortage(
        self,
        what: str,
        arenas: Sequence[Arena],
        cause: shim.Cause,
        needed: int = 0,
        hint: str = "",
    ) -> Exception:
        """The exception for ``what``, which was short.

        needed: bytes; 0: those of the paused arenas, or what the failed call asked for. hint: what
        helps first.
        """
        away = sum(arena.committed_when_paused for arena in arenas if arena.paused)
        needed = needed or away or cause.requested
        if cause.code == shim.E_PAUSED:
            return StateError(f"{what}: the tag is paused; resume it first")
        if cause.code == shim.E_FORKED:
            return StateError(
                f"{what}: this is a forked child, where the saver is inert; make a saver of its own"
            )
        if cause.code == shim.E_RESERVATION:
            reserved, missing = self._tags.reserve_bytes, format_bytes(cause.missing)
            message = (
                f"{what} outgrows the {format_bytes(reserved)} of addresses reserved for each tag: "
                f"{missing} are missing. Pass a larger reserve_bytes; nothing was changed."
            )
            return OutOfMemory(message, cause.requested, cause.missing, {})
        if cause.code not in (shim.E_LIMIT, shim.E_DRIVER):
            return BackendError(f"{what} failed: no host memory for the tables")
        if cause.code == shim.E_LIMIT:
            limit = self._backend.limit_bytes or 0
            kept = self._pool.held_bytes  # would have served
            more = max(self._backend.committed_bytes - kept + needed - limit, cause.missing)
            why = f"{format_bytes(more)} are missing under the limit of {format_bytes(limit)}"
            advice = "Have another tag paused by its owner or raise limit_bytes"
        else:
            more = 0
            why = f"the driver refused with {self._backend.error_name(cause.driver)}"
            advice = "Have another tag paused by its owner, or end what holds the memory"
        holders = self._holders()
        if holders[_PAGE_POOL]:
            advice = f"trim() gives the page pool's memory back. {advice}"
        if hint:
            advice = f"{hint}. {advice}"
        everyone = {**holders, **self._backend.other_holders()}
        held = ", ".join(f"{name} {format_bytes(size)}" for name, size in everyone.items() if size)
        message = (
            f"{what} needs {format_bytes(needed)}: {why}. Held by: {held or 'nobody'}. "
            f"{advice}; nothing was changed."
        )
        return OutOfMemory(message, needed, more, everyone)


def _report(arena: Arena, leases: int) -> TagReport:
    stats, backup, aliased = arena.stats, arena.backup, arena.aliased
    return TagReport(
        state="paused" if arena.paused else "active",
        content=arena.content,
        reserved_bytes=stats.reserved,
        committed_bytes=stats.committed,
        aliased_bytes=0 if aliased is None else aliased.nbytes,
        live_bytes=sum(nbytes for _, nbytes in live_ranges(arena)),
        backup_bytes=backup.host_bytes if backup else 0,
        disk_bytes=backup.disk_bytes if backup else 0,
        extents=stats.extents,
        leases=leases,
        last_pause_seconds=arena.last_pause_seconds,
        last_resume_seconds=arena.last_resume_seconds,
    )


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
    """Raises ``AssertionError`` where the tables of extents, tags and page pool do not agree, and
    stay as they are.
    """
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
        # threads record meanwhile: what they add stays for the next call
        return [self._events.popleft() for _ in range(len(self._events))]

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
