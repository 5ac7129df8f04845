"""The memory of one tag on one device: a fixed address range and the extents behind it.

The table lists the states of a tag and the methods that change them. No other file assigns a tag's
fields.

| state | memory behind the addresses | next states |
|---|---|---|
| active | the tag's own extents | `freeze` to frozen |
| frozen | its own extents, which cannot change | `thaw` to active, `end_pause` to paused |
| paused | none | `end_resume` to active, `begin_prefetch` to prefetching, `alias` to aliased |
| prefetching | its own frozen extents, being filled | `end_resume` to active, `lose` to paused |
| aliased | pages of another saver's tag, frozen | `end_pause` to paused |

`discards` counts the steps that made content undefined or replaced it by another tag's: a pause
without a copy, the beginning and end of an alias, an exchange, and a shrink that took memory from
tensors.
"""

import contextlib
import gc
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from memsaver.content import Backup
from memsaver.content.on_host import CleanCopy, fingerprint
from memsaver.errors import BackendError, LeaseError, StateError
from memsaver.memory.backend import Backend, Reservation
from memsaver.native import shim
from memsaver.system.interrupts import Finalizer, held
from memsaver.tag.tickets import AliasedPages
from memsaver.types import Content

_NEXT = {
    ("active", "freeze"): "frozen",
    ("frozen", "thaw"): "active",
    ("frozen", "end_pause"): "paused",
    ("paused", "end_resume"): "active",
    ("paused", "begin_prefetch"): "prefetching",
    ("prefetching", "end_resume"): "active",
    ("prefetching", "lose"): "paused",
    ("paused", "alias"): "aliased",
    ("aliased", "freeze"): "aliased",
    ("aliased", "thaw"): "aliased",
    ("aliased", "end_pause"): "paused",
}


class Arena:
    """Owner of one reservation and of the extents mapped into its prefix ``[0, committed)``.

    The shim keeps the table of extents and blocks under this arena's ``slot``, because torch's
    allocator callbacks use it too. Each method makes one change; `Transactions` composes them into
    atomic operations.
    """

    def __init__(self, tag: str, content: Content, backend: Backend, reserve_bytes: int) -> None:
        self.tag = tag
        self.content = content
        self.backend = backend
        give_back_forgotten()
        self.reservation = Reservation(backend, reserve_bytes)
        place = backend.phys, self.reservation.address, reserve_bytes, backend.unit
        self.slot: int = shim.library().ms_arena_new(*place)
        # Savers that only reference cycles keep alive occupy slots, too.
        if self.slot < 0 and gc.collect():
            self.slot = shim.library().ms_arena_new(*place)
        if self.slot < 0:
            self.reservation.close()
            raise MemoryError(
                "all 256 slots for tags of this process are taken; close savers that are not used"
            )
        self._state = "active"
        self.committed_when_paused = 0
        self.missing = 0  # bytes at the end that a partial resume left without memory
        self.discards = 0
        self.whole = True  # resume with one extent, because no other tag will reuse it
        self.elastic = False  # never resume with one extent
        self.backup: Backup | None = None
        # The owner's name for the content, until the next pause.
        self.version: Hashable | None = None
        self.clean_copy: CleanCopy | None = None
        self.open_regions: deque[None] = deque()  # threads leave regions without a lock
        self._settled_frees = 0
        self._aliased: list[AliasedPages] = []  # at most one; shared with the finalizer
        self._parts = ArenaParts(backend, self.reservation, self.slot, self._aliased)
        self._finalizer = Finalizer(self, forget, self._parts)

    @property
    def stats(self) -> shim.Stats:
        return shim.stats(self.slot)

    @property
    def address(self) -> int:
        return self.reservation.address

    @property
    def aliased(self) -> AliasedPages | None:
        """Return the pages of another saver's tag that are mapped here, if any."""
        return next(iter(self._aliased), None)

    @property
    def backed(self) -> int:
        """Return how many leading bytes have memory behind them, own or aliased."""
        aliased = self.aliased
        return self.stats.committed if aliased is None else aliased.nbytes

    @property
    def host_bytes(self) -> int:
        """Return the host arena's bytes that hold the content or a clean copy of it."""
        copy = self.clean_copy
        backup = copy.backup if self.backup is None and copy is not None else self.backup
        return 0 if backup is None else backup.host_bytes

    @property
    def unbacked(self) -> int:
        """Return how many bytes, up to the end of the last tensor, have no memory."""
        return max(0, self.stats.top - self.backed)

    @property
    def paused(self) -> bool:
        return self._state == "paused"

    def _step(self, name: str) -> None:
        self._state = _NEXT[self._state, name]

    def require_own(self, operation: str) -> None:
        """Raise ``LeaseError`` while the tag's pages are aliased."""
        if (aliased := self.aliased) is not None:
            raise LeaseError(
                f"{operation}: tag {self.tag!r} aliases the pages of another saver's tag "
                f"{aliased.ticket.tag!r}; pause({self.tag!r}) returns them (nothing was changed)"
            )

    def empty(self, nbytes: int) -> torch.Tensor | None:
        """Allocate a uint8 tensor ``[nbytes]``, freed with its storage; on failure, see `cause`."""
        self.settle_frees()
        address = shim.library().ms_alloc(self.slot, nbytes)
        if not address:
            return None
        tensor, owner = self.backend.view(address, nbytes)
        # The bound method keeps the arena alive as long as the tensor.
        Finalizer(owner, self._free, address)
        return tensor

    def _free(self, address: int) -> None:
        shim.library().ms_free(self.slot, address)

    def cause(self) -> shim.Cause:
        """Return and clear the cause of the last failed allocation (code 0: none failed)."""
        return shim.cause(self.slot, clear=True)

    def unused(self) -> list[shim.Extent]:
        """Return the extents that a trim would release, wholly or in part."""
        top = self.stats.top
        return [extent for extent in shim.extents(self.slot) if extent.offset + extent.nbytes > top]

    def settle_frees(self) -> None:
        """Wait for work on any stream that may use freed blocks, before they are reused."""
        if (frees := self.stats.frees) != self._settled_frees:
            self.backend.synchronize()
            self._settled_frees = frees

    def trim(self) -> int:
        """Release the unused end of the tag, and return the number of bytes released.

        A paused tag releases nothing, but its next resume does not map the unused end.
        """
        stats = self.stats
        if self.paused:
            self.committed_when_paused = min(
                self.committed_when_paused, self.backend.round_up(stats.top)
            )
            return 0
        if stats.committed - stats.top < self.backend.granularity:
            return 0
        self.backend.synchronize()
        return shim.library().ms_trim(self.slot)

    def require_no_region(self, operation: str) -> None:
        """Raise ``StateError`` while a region of the tag is open."""
        if self.open_regions:
            raise StateError(
                f"cannot {operation} {self.tag!r}: a region of it is open; leave the region first"
            )

    def enter(self) -> None:
        self.open_regions.append(None)

    def leave(self) -> None:
        self.open_regions.pop()

    def freeze(self) -> None:
        """Block allocations and keep the extents unchanged; tensors can still be freed."""
        self._step("freeze")
        shim.library().ms_set_state(self.slot, shim.PAUSED)

    def thaw(self) -> None:
        """Undo `freeze`; an aliased tag stays frozen, because it must not grow."""
        self._step("thaw")
        if self.aliased is None:
            shim.library().ms_set_state(self.slot, shim.ACTIVE)

    def end_pause(self, own: Sequence[shim.Extent], backup: Backup | None, whole: bool) -> None:
        """Enter the paused state, after the tag's memory was unmapped.

        `own` are the tag's own extents before the pause. A `backup` of ``None`` means that the
        content was discarded. With `whole`, the next resume requests one extent, unless the tag is
        elastic.
        """
        self._step("end_pause")
        if self.aliased is not None:
            self.end_alias()  # the tag's own saved content stays
            self.discards += 1
            return
        self.discards += backup is None
        self.backup, self.version = backup, None
        self.whole = whole and not self.elastic
        self.committed_when_paused = sum(extent.nbytes for extent in own) + self.missing
        self.missing = 0

    def end_resume(self, missing: int = 0) -> None:
        """Enter the active state, after all but the last `missing` bytes were restored."""
        self.backup, self.missing = None, missing
        self._step("end_resume")
        shim.library().ms_set_state(self.slot, shim.ACTIVE)

    def begin_prefetch(self) -> None:
        """Enter the prefetching state, after the memory was mapped; allocations still fail."""
        self._step("begin_prefetch")

    def lose(self) -> None:
        """Return to the paused state after a failed prefetch; the saved content is kept."""
        self._step("lose")

    def bytes_at(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return a uint8 view ``[nbytes]`` of the tag's memory."""
        return self.backend.view(self.address + offset, nbytes)[0]

    def keep_clean_copy(
        self, backup: Backup, version: Hashable, ranges: Sequence[tuple[int, int]]
    ) -> CleanCopy:
        """Keep a backup as the clean copy of `version`, and begin to compute its digest."""
        self.version = version
        self.clean_copy = CleanCopy(backup, version, fingerprint(ranges, self.bytes_at))
        self.clean_copy.digest.start()
        return self.clean_copy

    def finish_copy(self) -> None:
        """Wait for a clean copy that is still being written."""
        if self.clean_copy is not None:
            self.clean_copy.finish()

    def forget_clean_copy(self) -> None:
        copy, self.clean_copy = self.clean_copy, None
        if copy is not None:
            with contextlib.suppress(BackendError):  # the copy is dropped in any case
                copy.finish()

    def exchange_versions(self, other: "Arena") -> None:
        """Exchange the content's versions with another tag, after the extents were exchanged.

        Clean copies are dropped, because they are identified by the content's former addresses.
        """
        self.version, other.version = other.version, self.version
        for arena in (self, other):
            arena.forget_clean_copy()
            arena.discards += 1

    def unmap(self, undo: contextlib.ExitStack) -> list[shim.Extent]:
        """Unmap all extents in one driver call, and return the tag's own extents.

        The extents keep their content until they are released.
        """
        extents, backed = shim.extents(self.slot), self.backed
        if backed:
            self.backend.unmap(self.address, backed)
            if self.aliased is None:
                undo.callback(self.put, extents, contextlib.ExitStack())
            else:
                undo.callback(self._map_aliased, self.aliased, contextlib.ExitStack())
        shim.set_extents(self.slot, [])
        return extents

    def alias(self, aliased: AliasedPages, undo: contextlib.ExitStack) -> None:
        """Map another saver's pages behind this paused tag, which stays frozen."""
        self._map_aliased(aliased, undo)
        self._aliased.append(aliased)
        self._step("alias")
        self.discards += 1

    def _map_aliased(self, aliased: AliasedPages, undo: contextlib.ExitStack) -> None:
        self.map(aliased.extents, 0, undo, aliased.ticket.writable)

    def end_alias(self) -> None:
        """End the lease of aliased pages, which are already unmapped."""
        self._aliased.pop().end()

    def put(self, extents: Sequence[shim.Extent], undo: contextlib.ExitStack) -> None:
        """Map extents consecutively from the tag's first byte; the tag has no extents."""
        shim.set_extents(self.slot, self.map(extents, 0, undo))
        undo.callback(shim.set_extents, self.slot, [])

    def extend(self, extents: Sequence[shim.Extent], undo: contextlib.ExitStack) -> None:
        """Map extents consecutively after the tag's present ones; the tag is frozen."""
        shim.extend(self.slot, self.map(extents, self.stats.committed, undo))
        self.missing = 0

    def map(
        self,
        extents: Sequence[shim.Extent],
        first: int,
        undo: contextlib.ExitStack,
        writable: bool = True,
    ) -> list[shim.Extent]:
        """Map extents consecutively from byte `first` on, and return them with their offsets."""
        placed, end = [], first
        for extent in extents:
            self.backend.map(self.address + end, extent.nbytes, extent.handle, writable)
            undo.callback(self.backend.unmap, self.address + end, extent.nbytes)
            placed.append(replace(extent, offset=end))
            end += extent.nbytes
        if end > first:
            self.backend.set_access(self.address + first, end - first)
        return placed

    def shrink(self, keep: int) -> None:
        """Release the extents after the first `keep` bytes, even under tensors.

        No peer may have imported them.
        """
        before = self.unbacked
        shim.library().ms_shrink(self.slot, keep)
        self.discards += self.unbacked > before
        self.missing = 0

    def close(self) -> None:
        """Release all memory; addresses stay reserved while tensors on them are alive."""
        self.forget_clean_copy()
        self.backup = None
        shim.library().ms_set_state(self.slot, shim.PAUSED)
        if self.aliased is not None:
            self.unmap(contextlib.ExitStack())
            self.end_alias()
        decommit(self._parts)
        if not self.stats.blocks:
            self._finalizer()  # otherwise it runs when the last tensor dies


class ArenaParts(NamedTuple):
    """Resources of an arena that outlive it until its finalizer has run."""

    backend: Backend
    reservation: Reservation
    slot: int
    aliased: list[AliasedPages]  # at most one


_forgotten: deque[ArenaParts] = deque()  # resources that wait for their release


def decommit(parts: ArenaParts) -> None:
    """Release an arena's extents to the driver."""
    if committed := shim.stats(parts.slot).committed:
        parts.backend.unmap(parts.reservation.address, committed)
    extents = shim.extents(parts.slot)
    shim.set_extents(parts.slot, [])
    for extent in extents:
        parts.backend.release(extent.handle, extent.nbytes)


@held()
def forget(parts: ArenaParts) -> None:
    """Release an unreferenced arena's resources, now or as soon as possible.

    The release waits while a graph capture forbids it, and while tensors of a region are alive.
    """
    _forgotten.append(parts)
    give_back_forgotten()


def give_back_forgotten() -> None:
    """Release the resources of unreferenced arenas that have no tensors any more."""
    _retry(list(_forgotten))


@held()
def _retry(items: Sequence[ArenaParts]) -> None:
    for item in items:
        if _may_end(item):
            # Finalizers run in any thread, so another thread may have removed the item.
            with contextlib.suppress(ValueError):
                _forgotten.remove(item)
                _undo(item)
    if _forgotten and _retry_on_host not in gc.callbacks:
        gc.callbacks.append(_retry_on_host)


def _retry_on_host(phase: str, info: object) -> None:
    """Retry the release of CPU arenas after each garbage collection.

    GPUs are left out, because waiting for a GPU would break a graph capture of another thread.
    """
    if phase == "stop":
        _retry([item for item in _forgotten if item.backend.device.type == "cpu"])
        if not _forgotten:
            with contextlib.suppress(ValueError):
                gc.callbacks.remove(_retry_on_host)


def _may_end(item: ArenaParts) -> bool:
    backend = item.backend
    if backend.forked:
        return True
    if backend.capturing or shim.stats(item.slot).blocks:
        return False
    return not backend.after_copies(give_back_forgotten)


def _undo(item: ArenaParts) -> None:
    if item.backend.forked:
        return  # the memory is the parent's
    item.backend.synchronize(copies=False)  # kernels on any stream may still use the memory
    while item.aliased:
        item.aliased.pop().drop(item.backend, item.reservation.address)
    decommit(item)
    if shim.library().ms_arena_free(item.slot) == 0:
        item.reservation.close()
