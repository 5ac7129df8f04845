"""Tells who holds how much: for reports, and in the error when memory is short."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence

from memsaver.errors import BackendError, OutOfMemory, StateError, format_bytes
from memsaver.native import shim
from memsaver.report import Report, TagReport, Usage
from memsaver.tag.arena import Arena
from memsaver.tag.save import live_ranges
from memsaver.tag.table import Tags
from memsaver.vmm.backend import Backend, ShortOfMemory
from memsaver.vmm.page_pool import PagePool
from memsaver.vmm.torch_usage import TorchUse

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
        self, what: str, arenas: Sequence[Arena], cause: shim.Cause, needed: int = 0
    ) -> Exception:
        """The exception for ``what``, which was short.

        needed: bytes; 0: those of the paused arenas, or what the failed call asked for.
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
            more = self._backend.committed_bytes + needed - limit
            why = f"{format_bytes(more)} are missing under the limit of {format_bytes(limit)}"
            advice = "Pause another tag or raise limit_bytes"
        else:
            more = 0
            why = f"the driver refused with {self._backend.error_name(cause.driver)}"
            advice = "Pause another tag, or end what holds the memory"
        holders = self._holders()
        if holders[_PAGE_POOL]:
            advice = f"trim() gives the page pool's memory back. {advice}"
        everyone = {**holders, **self._backend.other_holders()}
        held = ", ".join(f"{name} {format_bytes(size)}" for name, size in everyone.items() if size)
        message = (
            f"{what} needs {format_bytes(needed)}: {why}. Held by: {held or 'nobody'}. "
            f"{advice}; nothing was changed."
        )
        return OutOfMemory(message, needed, more, everyone)


def _report(arena: Arena, leases: int) -> TagReport:
    stats, backup, borrowed = arena.stats, arena.backup, arena.borrowed
    return TagReport(
        state="paused" if arena.paused else "active",
        content=arena.content,
        reserved_bytes=stats.reserved,
        committed_bytes=stats.committed,
        borrowed_bytes=0 if borrowed is None else borrowed.nbytes,
        live_bytes=sum(nbytes for _, nbytes in live_ranges(arena)),
        backup_bytes=backup.host_bytes if backup else 0,
        disk_bytes=backup.disk_bytes if backup else 0,
        extents=stats.extents,
        leases=leases,
        last_pause_seconds=arena.last_pause_seconds,
        last_resume_seconds=arena.last_resume_seconds,
    )
