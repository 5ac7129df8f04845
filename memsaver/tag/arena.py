"""One tag's memory on one device: an address range for life, and the extents behind it while the
tag is active.

A tag's states, and the methods that lead from one to the next. No other file assigns a tag's
fields.

| state | behind the addresses | leaves it by |
|---|---|---|
| active | the tag's own extents | `freeze` to frozen |
| frozen | the same; nobody allocates or changes them | `thaw` to active, `end_pause` to paused |
| paused | nothing | `end_resume` to active, `begin_prefetch` to prefetching, `alias` to aliased |
| prefetching | its own extents, frozen; content comes | `end_resume` to active, `lose` to paused |
| aliased | pages of another saver's tag, frozen | `end_pause` to paused |

`discards` counts the steps that made content undefined, or another tag's: the way to paused without
a copy, the way to aliased and back, an exchange, and a shrink that took memory from tensors.
"""

from __future__ import annotations

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

CONTENTS = ("discard", "host", "disk")
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

    The table of extents and blocks lives in the shim under this arena's ``slot``, where torch's
    allocator callbacks use it too. Methods change one thing each; `Transactions` composes them into
    all-or-nothing operations.
    """

    def __init__(self, tag: str, content: str, backend: Backend, reserve_bytes: int) -> None:
        self.tag = tag
        self.content = content
        self.backend = backend
        give_back_forgotten()
        self.reservation = Reservation(backend, reserve_bytes)
        place = backend.phys, self.reservation.address, reserve_bytes, backend.unit
        self.slot: int = shim.library().ms_arena_new(*place)
        if self.slot < 0 and gc.collect():  # savers that only cycles keep have slots, too
            self.slot = shim.library().ms_arena_new(*place)
        if self.slot < 0:
            self.reservation.close()
            raise MemoryError(
                "all 256 slots for tags of this process are taken; close savers that are not used"
            )
        self._state = "active"
        self.committed_when_paused = 0
        self.missing = 0  # bytes at the end that the last resume had no memory for
        self.discards = 0
        self.whole = True  # resume with one extent: another tag is not to use it
        self.elastic = False  # never with one extent
        self.backup: Backup | None = None
        # what the owner calls the content, until the next pause
        self.version: Hashable | None = None
        self.clean_copy: CleanCopy | None = None
        self.open_regions: deque[None] = deque()  # any thread may leave one, and takes no lock
        self._settled_frees = 0
        self._aliased: list[AliasedPages] = []  # one at most; the finalizer's, too
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
        """Pages of another saver's tag, behind this one's addresses in place of its own."""
        return next(iter(self._aliased), None)

    @property
    def backed(self) -> int:
        """Bytes, from the first on, with memory behind them, the tag's own or aliased."""
        aliased = self.aliased
        return self.stats.committed if aliased is None else aliased.nbytes

    @property
    def host_bytes(self) -> int:
        """Bytes of the host arena that its content, or a kept copy of it, lies in."""
        copy = self.clean_copy
        backup = copy.backup if self.backup is None and copy is not None else self.backup
        return 0 if backup is None else backup.host_bytes

    @property
    def unbacked(self) -> int:
        """Bytes, up to the end of the last tensor, without memory behind them."""
        return max(0, self.stats.top - self.backed)

    @property
    def paused(self) -> bool:
        return self._state == "paused"

    def _step(self, name: str) -> None:
        self._state = _NEXT[self._state, name]

    def require_own(self, what: str) -> None:
        """Raises ``LeaseError`` while the tag's pages are aliased."""
        if (aliased := self.aliased) is not None:
            raise LeaseError(
                f"{what}: the pages of tag {self.tag!r} are aliased, "
                f"they are those of another saver's tag {aliased.ticket.tag!r}; "
                f"pause({self.tag!r}) gives them back (nothing was changed)"
            )

    def empty(self, nbytes: int) -> torch.Tensor | None:
        """uint8 tensor ``[nbytes]``, freed with its storage; ``None``: failed (see ``cause``)."""
        self.settle_frees()
        address = shim.library().ms_alloc(self.slot, nbytes)
        if not address:
            return None
        tensor, owner = self.backend.view(address, nbytes)
        # so the tensor keeps the arena alive, too
        Finalizer(owner, self._free, address)
        return tensor

    def _free(self, address: int) -> None:
        shim.library().ms_free(self.slot, address)

    def cause(self) -> shim.Cause:
        """Tells why the last allocation failed (code 0: none did); clears it."""
        return shim.cause(self.slot, clear=True)

    def unused(self) -> list[shim.Extent]:
        """Extents, or their ends, that a trim would give back."""
        top = self.stats.top
        return [extent for extent in shim.extents(self.slot) if extent.offset + extent.nbytes > top]

    def settle_frees(self) -> None:
        """Wait for work that may use what was freed, on any stream: others get it from here on."""
        if (frees := self.stats.frees) != self._settled_frees:
            self.backend.synchronize()
            self._settled_frees = frees

    def trim(self) -> int:
        """Give back the unused tail; its bytes. If paused: not to be put back any more."""
        stats = self.stats
        if self.paused:
            self.committed_when_paused = min(
                self.committed_when_paused, self.backend.round_up(stats.top)
            )
            return 0
        if stats.committed - stats.top < self.backend.granularity:
            return 0
        self.backend.synchronize()
        trimmed: int = shim.library().ms_trim(self.slot)
        return trimmed

    def require_no_region(self, what: str) -> None:
        """Raises ``StateError`` while a region of the tag is open."""
        if self.open_regions:
            raise StateError(
                f"cannot {what} {self.tag!r}: a region of it is open; leave the region first"
            )

    def enter(self) -> None:
        """A region of the tag is open from here on."""
        self.open_regions.append(None)

    def leave(self) -> None:
        self.open_regions.pop()

    def freeze(self) -> None:
        """Makes allocations fail from here on, and extents stay as they are; frees still work."""
        self._step("freeze")
        shim.library().ms_set_state(self.slot, shim.PAUSED)

    def thaw(self) -> None:
        """Undo `freeze`. Aliased pages stay frozen: nothing is to grow behind them."""
        self._step("thaw")
        if self.aliased is None:
            shim.library().ms_set_state(self.slot, shim.ACTIVE)

    def end_pause(self, own: Sequence[shim.Extent], backup: Backup | None, whole: bool) -> None:
        """Nothing is behind the tag any more.

        Args:
            own: the extents of the tag until now.
            backup: where its content is kept.
            whole: the next resume asks for one extent, unless the tag is elastic.
        """
        self._step("end_pause")
        if self.aliased is not None:
            self.end_alias()  # what it had of its own, it has still
            self.discards += 1
            return
        self.discards += backup is None
        self.backup, self.version = backup, None
        self.whole = whole and not self.elastic
        self.committed_when_paused = sum(extent.nbytes for extent in own) + self.missing
        self.missing = 0

    def end_resume(self, missing: int = 0) -> None:
        """Memory and content are there again, but for ``missing`` bytes at the end."""
        self.backup, self.missing = None, missing
        self._step("end_resume")
        shim.library().ms_set_state(self.slot, shim.ACTIVE)

    def begin_prefetch(self) -> None:
        """Memory is there again, and content on its way; frees still work, allocations do not."""
        self._step("begin_prefetch")

    def lose(self) -> None:
        """The prefetch has failed, and its memory is gone; the content is still kept."""
        self._step("lose")

    def in_pieces(self, elastic: bool = False) -> None:
        """The next resume may take several extents. elastic: all later ones, too."""
        self.whole = False
        self.elastic |= elastic

    def mark_clean(self, version: Hashable) -> None:
        self.version = version

    def bytes_at(self, offset: int, nbytes: int) -> torch.Tensor:
        """uint8 ``[nbytes]`` where they are."""
        return self.backend.view(self.address + offset, nbytes)[0]

    def keep_clean_copy(
        self, backup: Backup, version: Hashable, ranges: Sequence[tuple[int, int]]
    ) -> CleanCopy:
        """Keep a backup of content called ``version``, for the next pause; begins its digest."""
        self.version = version
        self.clean_copy = CleanCopy(backup, version, fingerprint(ranges, self.bytes_at))
        self.clean_copy.digest.start()
        return self.clean_copy

    def finish_copy(self) -> None:
        """Waits for a copy that was begun while the tag is used."""
        if self.clean_copy is not None:
            self.clean_copy.finish()

    def forget_clean_copy(self) -> None:
        copy, self.clean_copy = self.clean_copy, None
        if copy is not None:
            with contextlib.suppress(BackendError):  # of no interest any more
                copy.finish()

    def trade_content(self, other: Arena) -> None:
        """Two tags have exchanged their extents: what is known of the content goes along.

        CleanCopy copies do not: they are numbered and checked by the place that the content has
        left.
        """
        self.version, other.version = other.version, self.version
        for arena in (self, other):
            arena.forget_clean_copy()
            arena.discards += 1

    def unmap(self, undo: contextlib.ExitStack) -> list[shim.Extent]:
        """Take all extents from behind the tag, in one call; they keep their content until they are
        released.

        Returns those that are the tag's own.
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
        """Map another saver's pages behind the tag, which is paused and stays frozen."""
        self._map_aliased(aliased, undo)
        self._aliased.append(aliased)
        self._step("alias")
        self.discards += 1

    def _map_aliased(self, aliased: AliasedPages, undo: contextlib.ExitStack) -> None:
        self.map(aliased.extents, 0, undo, aliased.ticket.writable)

    def end_alias(self) -> None:
        """Tell the owner of aliased pages, which are unmapped by now."""
        self._aliased.pop().end()

    def put(self, extents: Sequence[shim.Extent], undo: contextlib.ExitStack) -> None:
        """Map extents, one after the other, from the tag's first byte on; the tag has none."""
        shim.set_extents(self.slot, self.map(extents, 0, undo))
        undo.callback(shim.set_extents, self.slot, [])

    def extend(self, extents: Sequence[shim.Extent], undo: contextlib.ExitStack) -> None:
        """Map extents, one after the other, behind what the tag has.

        The tag is frozen meanwhile.
        """
        shim.extend(self.slot, self.map(extents, self.stats.committed, undo))
        self.missing = 0

    def map(
        self,
        extents: Sequence[shim.Extent],
        first: int,
        undo: contextlib.ExitStack,
        writable: bool = True,
    ) -> list[shim.Extent]:
        """Put extents behind the addresses from byte ``first`` on; as the shim's table has them."""
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
        """Give back the extents after the first ``keep`` bytes, also where tensors lie.

        No peer has imported them.
        """
        before = self.unbacked
        shim.library().ms_shrink(self.slot, keep)
        self.discards += self.unbacked > before
        self.missing = 0

    def close(self) -> None:
        """Give all memory back.

        Addresses of living tensors stay reserved, so that nothing reuses them.
        """
        shim.library().ms_set_state(self.slot, shim.PAUSED)
        if self.aliased is not None:
            self.unmap(contextlib.ExitStack())
            self.end_alias()
        decommit(self._parts)
        if not self.stats.blocks:
            self._finalizer()  # else when the last tensor dies


class ArenaParts(NamedTuple):
    """An arena's own; ``aliased`` has one entry at most."""

    backend: Backend
    reservation: Reservation
    slot: int
    aliased: list[AliasedPages]


_forgotten: deque[ArenaParts] = deque()  # not given back yet


def decommit(parts: ArenaParts) -> None:
    """Gives an arena's extents to the driver."""
    if committed := shim.stats(parts.slot).committed:
        parts.backend.unmap(parts.reservation.address, committed)
    extents = shim.extents(parts.slot)
    shim.set_extents(parts.slot, [])
    for extent in extents:
        parts.backend.release(extent.handle, extent.nbytes)


@held()
def forget(parts: ArenaParts) -> None:
    """Undo of an arena that nobody refers to: now, or later where a graph capture forbids to wait,
    or where a region's tensors live on.
    """
    _forgotten.append(parts)
    give_back_forgotten()


def give_back_forgotten() -> None:
    """Gives back those arenas that nobody refers to and no tensor lies on any more."""
    _retry(list(_forgotten))


@held()
def _retry(items: Sequence[ArenaParts]) -> None:
    for item in items:
        if _may_end(item):
            # finalizers run in any thread: another one took it
            with contextlib.suppress(ValueError):
                _forgotten.remove(item)
                _undo(item)
    if _forgotten and _retry_on_host not in gc.callbacks:
        gc.callbacks.append(_retry_on_host)


def _retry_on_host(phase: str, info: object) -> None:
    """Tries again, on the host, when garbage is collected.

    GPUs are left out: waiting for one would break a graph that another thread captures.
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
        return  # nothing of it came along
    item.backend.synchronize(copies=False)  # kernels that use it may be queued on any stream
    while item.aliased:
        item.aliased.pop().drop(item.backend, item.reservation.address)
    decommit(item)
    if shim.library().ms_arena_free(item.slot) == 0:
        item.reservation.close()
