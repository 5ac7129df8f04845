"""Atomic operations on the memory of tags: pause, resume, swap, exchange, alias and resize."""

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from memsaver.content import Backup, HostBackup
from memsaver.errors import BackendError, LeaseError, StateError, format_bytes
from memsaver.memory.backend import Backend, ShortOfMemory
from memsaver.memory.page_pool import LARGEST, PagePool
from memsaver.native import shim
from memsaver.system.device_lock import device_lock, undone_under
from memsaver.system.interrupts import held
from memsaver.tag.arena import Arena
from memsaver.tag.prefetch import Prefetch
from memsaver.tag.refill import Refill, Swap
from memsaver.tag.saving import Saving
from memsaver.tag.tickets import AliasedPages, Peers, PoolTicket, Ticket
from memsaver.types import Content, Release, check_choice

LEASE_GRACE_SECONDS = 1.0

_log = logging.getLogger("memsaver")

Extents = Mapping[str, Sequence[shim.Extent]]
_Result = TypeVar("_Result")


class Transactions:
    """Atomic operations of one saver, which holds its lock around every call.

    An operation that raises has changed nothing, unless its docstring says otherwise. Nothing is
    unmapped while the device may use it. The device lock serializes mapping and unmapping on one
    GPU between processes. It is not held during copies or while waiting for another process.
    """

    def __init__(
        self, backend: Backend, pool: PagePool, disk_dir: Path, tags: Iterable[Arena], peers: Peers
    ) -> None:
        self.saving = Saving(backend, disk_dir, tags)
        self._peers = peers
        self._prefetches: list[Prefetch] = []
        self._backend = backend
        self._pool = pool
        self._device_lock = device_lock(backend.device_key)

    # ---------------------------------------------------------------- pause

    def check_release(self, release: Release, to: PoolTicket | None) -> None:
        check_choice("release", release, Release)
        if (release == "hand_over") != (to is not None):
            raise ValueError("release='hand_over' and to=other.pool_ticket() go together")
        if to is not None and to.device_key != self._backend.device_key:
            raise ValueError(
                f"memory of {self._backend.device_key} cannot go to a saver of {to.device_key}"
            )

    def _wait_unleased(self, arenas: Sequence[Arena]) -> None:
        self._peers.wait_free([arena.tag for arena in arenas], LEASE_GRACE_SECONDS)

    def pause(
        self,
        arenas: Sequence[Arena],
        content: Content | None,
        release: Release,
        to: PoolTicket | None,
        streams: Sequence[torch.cuda.Stream] | None,
    ) -> LeaseError | None:
        """Release the memory of active tags, with the arguments of `MemorySaver.pause`.

        The result is the error of a hand-over whose receiver fell silent. The tags are paused then,
        and the caller records the pause before it raises the error.
        """
        for arena in arenas:
            arena.require_no_region("pause")
        kept = [(arena, content or arena.content) for arena in arenas]
        saved = [(arena, where) for arena, where in kept if where != "discard"]
        if aliased := [arena.tag for arena, _ in saved if arena.aliased is not None]:
            raise ValueError(
                f"cannot save the content of {aliased}: these tags alias other savers' pages; "
                "pass content='discard'"
            )
        self._wait_unleased(arenas)
        if release != "retain":
            self._revoke(_flat(shim.extents(arena.slot) for arena in arenas), to)
        with undone_under(self._device_lock) as undo:
            for arena in arenas:
                arena.freeze()
                undo.callback(arena.thaw)
            self._drain(streams)
            if streams is not None:
                for arena in arenas:
                    arena.finish_copy()
            backups = {arena.tag: self.saving.save(arena, where) for arena, where in saved}
            with self._device_lock:
                extents = {arena.tag: arena.unmap(undo) for arena in arenas}
                if to is None:
                    undo.pop_all()  # no later step can fail
                    self._settle(arenas, extents, backups, whole=release == "driver")
                    self._put_away(extents, release)
                    return None
            lost = self._peers.hand_over(_flat(extents.values()), to)
            undo.pop_all()
        self._settle(arenas, extents, backups, whole=False)
        return lost

    def _put_away(self, extents: Extents, release: Release) -> None:
        """Release extents to the driver or the page pool, under the device lock."""
        for items in extents.values():
            if release == "driver":
                self._pool.give_back(items)
            elif self._pool.are_many(items):
                self._pool.keep_remade(items)
            else:
                self._pool.retain(items)

    def _settle(
        self, arenas: Sequence[Arena], extents: Extents, backups: Mapping[str, Backup], whole: bool
    ) -> None:
        for arena in arenas:
            arena.end_pause(extents[arena.tag], backups.get(arena.tag), whole)

    def _drain(self, streams: Sequence[torch.cuda.Stream] | None) -> None:
        if streams is None:
            self._backend.synchronize()
        for stream in streams or ():
            stream.synchronize()

    def _revoke(self, extents: Sequence[shim.Extent], to: PoolTicket | None = None) -> None:
        """Revoke all peers' imports of the extents, except the receiver's."""
        if ids := [extent.id for extent in extents if extent.shared]:
            self._peers.revoke(ids, None if to is None else to.pid)

    def swap(self, out: Arena, content: Content | None, into: Arena) -> None:
        """Pause one tag and resume another with its memory."""
        if not into.paused:
            raise StateError(f"swap: tag {into.tag!r} is not paused; pause it first")
        out.require_no_region("pause")
        if (content := content or out.content) == "disk":
            raise ValueError(
                "swap keeps content in host memory; pass content='host', or pause and resume"
            )
        self._with_room(partial(self._swap, out, content, into))

    def _swap(self, out: Arena, content: Content, into: Arena) -> None:
        self._wait_unleased([out])
        leaving = shim.extents(out.slot)
        with contextlib.ExitStack() as undo:
            out.freeze()
            undo.callback(out.thaw)
            self._drain(None)
            backup, fresh = (
                self.saving.prepare(out, content) if content == "host" else (None, False)
            )
            assert backup is None or isinstance(backup, HostBackup)
            undo.callback(out.forget_clean_copy)
            left = Swap(self._backend, self._pool, self._device_lock).run(out, backup, fresh, into)
            undo.pop_all()
        self._pool.retain(left)
        out.end_pause(leaving, backup, whole=False)
        into.end_resume()

    def exchange(self, one: Arena, other: Arena) -> None:
        """Exchange the extents, and with them the content, of two active tags."""
        if one is other:
            raise ValueError(f"exchange needs two tags, got {one.tag!r} twice")
        for arena in (one, other):
            arena.require_no_region("exchange")
        self._wait_unleased([one, other])
        with undone_under(self._device_lock) as undo:
            for arena in (one, other):
                arena.freeze()
                undo.callback(arena.thaw)
            if (first := one.stats.committed) != (second := other.stats.committed):
                raise ValueError(
                    "exchange needs tags of one size: "
                    f"{one.tag!r} has {first} bytes, {other.tag!r} {second}; "
                    "resize() or trim() the larger (nothing was changed)"
                )
            self._drain(None)
            with self._device_lock:
                from_one, from_other = one.unmap(undo), other.unmap(undo)
                one.put(from_other, undo)
                other.put(from_one, undo)
            undo.pop_all()
        one.exchange_versions(other)
        for arena in (one, other):
            arena.thaw()

    def check_alias(self, arena: Arena, ticket: Ticket) -> None:
        """Raise an error unless the tag may alias the ticket's tag."""
        operation = f"alias({arena.tag!r})"
        arena.require_own(operation)
        if not arena.paused:
            raise StateError(f"{operation}: the tag is active; pause it first")
        if ticket.device_key != (here := self._backend.device_key):
            raise ValueError(f"{operation}: the pages are on {ticket.device_key}, not on {here}")
        if self._peers.made(ticket):
            raise ValueError(
                f"{operation}: {ticket.tag!r} is a tag of the same saver; use exchange()"
            )

    def alias(self, arena: Arena, aliased: AliasedPages) -> None:
        """Map another saver's pages behind a paused tag."""
        self.check_alias(arena, aliased.ticket)  # again, because the lock was free in between
        needed = min(arena.committed_when_paused, self._backend.round_up(arena.stats.top))
        if not needed <= aliased.nbytes <= arena.reservation.nbytes:
            raise ValueError(
                f"alias({arena.tag!r}): the tag needs {format_bytes(needed)} and has addresses "
                f"for {format_bytes(arena.reservation.nbytes)}; "
                f"tag {aliased.ticket.tag!r} has {format_bytes(aliased.nbytes)}"
            )
        with self._device_lock, contextlib.ExitStack() as undo:
            arena.alias(aliased, undo)
            undo.pop_all()

    def trim(self, arenas: Sequence[Arena], pool: bool) -> int:
        """Release the unused ends of tags, and with `pool` the page pool; return the freed bytes.

        The driver gets the memory. Tags with an open region or a lease are skipped.
        """
        self._peers.recall([arena.tag for arena in arenas])
        arenas = [
            arena
            for arena in arenas
            if not arena.open_regions and not self._peers.holders(arena.tag)
        ]
        if arenas:
            self._backend.free_dead_blocks(arenas[0].slot)
        kept = self._pool.extents if pool else []
        self._revoke([*kept, *_flat(arena.unused() for arena in arenas)])
        with self._device_lock:
            return sum(arena.trim() for arena in arenas) + self._pool.drop(
                sum(extent.nbytes for extent in kept)
            )

    def release_retained(self, to: PoolTicket | None, most: int | None) -> None:
        """Hand up to `most` bytes of the page pool to another saver, and the rest to the driver."""
        if to is not None and self._pool.extents:
            self.check_release("hand_over", to)
            try:
                self._hand_over_retained(to, self._pool.held_bytes if most is None else most)
            except LeaseError as error:  # the driver gets the memory instead
                _log.info("%s", str(error))
        if self._pool.extents:
            self.trim([], pool=True)

    def _hand_over_retained(self, to: PoolTicket, most: int) -> None:
        with contextlib.ExitStack() as undo:
            if not (given := self._pool.take(most, undo)):
                return
            self._revoke(given, to)
            lost = self._peers.hand_over(given, to)
            undo.pop_all()
        if lost is not None:
            raise lost

    def close(self, arenas: Sequence[Arena]) -> None:
        """Release all memory for good."""
        for prefetch in tuple(self._prefetches):
            with contextlib.suppress(BackendError):  # the content is dropped in any case
                self.settle(prefetch)
        self._wait_unleased(arenas)
        self._peers.close()
        self._backend.synchronize()
        with self._device_lock:
            for arena in arenas:
                arena.close()
            self._pool.mark_shared([extent.id for extent in self._pool.extents], False)
            self._pool.drop(self._pool.held_bytes)

    # ---------------------------------------------------------------- resume

    def check_partial(self, arenas: Sequence[Arena]) -> None:
        """Raise a ValueError unless `resume` may map only a part of these tags."""
        if len(arenas) != 1 or (arenas[0].paused and arenas[0].backup is not None):
            raise ValueError("at_least takes one tag, whose content was discarded by its pause")

    def resume(
        self, arenas: Sequence[Arena], at_least: int | None = None, prefetch: Prefetch | None = None
    ) -> None:
        """Map memory behind paused tags and restore their content.

        If memory is short, retained and cached memory is released first. If it stays short, the
        only tag, which `check_partial` has accepted, may resume with `at_least` bytes or more;
        otherwise ``ShortOfMemory`` is raised and nothing has changed. A `prefetch` restores content
        from host memory in the background.
        """
        try:
            self._with_room(partial(self._resume, arenas, prefetch))
        except ShortOfMemory:
            if at_least is None or not self._resume_most(arenas, at_least):
                raise

    def settled(self, arena: Arena) -> Arena:
        """Wait for prefetches of the arena, and return it."""
        for prefetch in tuple(self._prefetches):
            if arena in prefetch.arenas:
                self.settle(prefetch)
        return arena

    def settle(self, prefetch: Prefetch) -> None:
        """Wait for a prefetch, which makes its tags active.

        Raises:
            BackendError: The prefetch failed, now or earlier. Its tags are paused as before.
        """
        if prefetch in self._prefetches:
            self._backend.require_own_process()
            failure = None
            try:
                prefetch.join()
            except Exception as error:
                failure = error
            self._end(prefetch, failure)
        if prefetch.failure is not None:
            raise prefetch.error() from prefetch.failure

    @held()
    def _end(self, prefetch: Prefetch, failure: Exception | None) -> None:
        if failure is None:
            prefetch.undo.pop_all()
            for arena in prefetch.arenas:
                arena.end_resume()
        else:
            # Kernels that were allowed to start early may still be running.
            self._backend.synchronize()
            with self._device_lock, prefetch.undo as undo:
                for arena in prefetch.arenas:
                    undo.callback(arena.lose)
        self._prefetches.remove(prefetch)
        prefetch.failure = failure

    def _resume_most(self, arenas: Sequence[Arena], at_least: int) -> bool:
        """Resume as much of a tag as fits; return False, unchanged, if that is too little."""
        (arena,) = arenas
        with self._device_lock, contextlib.ExitStack() as undo:
            extents = self._pool.obtain_most(arena.committed_when_paused, undo)
            got = sum(extent.nbytes for extent in extents)
            if got < at_least:
                return False
            arena.put(extents, undo)
            undo.pop_all()
        arena.end_resume(arena.committed_when_paused - got)
        return True

    def resize(self, arena: Arena, nbytes: int) -> None:
        """Grow or shrink the memory of an active tag to its first `nbytes`, rounded up to pages."""
        reserved, rounded = arena.reservation.nbytes, self._backend.round_up(nbytes)
        if nbytes < 0 or rounded > reserved:
            raise ValueError(
                f"{nbytes} bytes are outside the {reserved} reserved for {arena.tag!r}"
            )
        if (nbytes := rounded) < arena.stats.committed:
            self._wait_unleased([arena])
            self._revoke([e for e in shim.extents(arena.slot) if e.offset + e.nbytes > nbytes])
            self._backend.synchronize()
            with self._device_lock:
                arena.shrink(nbytes)
        else:
            self._with_room(partial(self._grow, arena, nbytes))

    def _grow(self, arena: Arena, nbytes: int) -> None:
        with self._device_lock, contextlib.ExitStack() as undo:
            undo.callback(arena.thaw)
            arena.freeze()  # no other thread can grow the tag now
            # A region of another thread may have grown the tag before the freeze.
            arena.extend(self._pool.obtain(max(0, nbytes - arena.stats.committed), undo), undo)
            undo.pop_all()
        arena.thaw()

    def commit_pieces(self, arena: Arena, nbytes: int) -> None:
        """Map memory for the tag's next `nbytes` in pieces, and make the tag elastic."""
        arena.whole, arena.elastic = False, True
        end = self._backend.round_up(arena.stats.top + nbytes)
        # Beyond the reserved addresses, the allocation itself fails and names the cause.
        if arena.stats.committed < end <= arena.reservation.nbytes:
            self.resize(arena, end)

    def empty(self, arena: Arena, nbytes: int) -> torch.Tensor:
        """Allocate a uint8 tensor on the tag; failures raise ``ShortOfMemory`` with their cause."""

        def attempt() -> torch.Tensor:
            if (tensor := arena.empty(nbytes)) is None:
                raise ShortOfMemory(arena.cause())
            return tensor

        return self._with_room(attempt)

    def _with_room(self, attempt: Callable[[], _Result]) -> _Result:
        """Run an atomic attempt; if memory is short, release spare memory and retry once.

        The device lock must be free, because peers unmap memory in the meantime.
        """
        try:
            return attempt()
        except ShortOfMemory as short:
            if not self.make_room(short.cause):
                raise
        return attempt()

    def make_room(self, cause: shim.Cause) -> bool:
        """Release torch's cached memory, and revoke peers' imports of retained memory.

        A peer that does not answer keeps its imports. If this cannot help against `cause`, nothing
        is released, and the result is False.
        """
        if self._backend.forked or cause.code not in (shim.E_LIMIT, shim.E_DRIVER):
            return False
        with contextlib.suppress(LeaseError):
            self._revoke(self._pool.extents)
        self._backend.reclaim()
        return True

    def _resume(self, arenas: Sequence[Arena], prefetch: Prefetch | None) -> None:
        with undone_under(self._device_lock) as undo:
            # Without the lock, two processes could each obtain half of the memory that one needs.
            with self._device_lock:
                refills = [
                    self._begin_refill(arena, undo, prefetch is not None) for arena in arenas
                ]
            for refill in refills:
                refill.finish()
            if prefetch is not None:
                prefetch.start()
            kept = undo.pop_all()
        for arena in arenas:
            arena.end_resume() if prefetch is None else arena.begin_prefetch()
        if prefetch is not None and arenas:
            prefetch.undo = kept
            self._prefetches.append(prefetch)

    def _begin_refill(self, arena: Arena, undo: contextlib.ExitStack, late: bool) -> Refill:
        """Map memory for a whole tag, and begin to restore its content.

        The first piece is filled from the host while the driver clears the rest. With `late`,
        content in host memory is left to a prefetch.
        """
        late &= isinstance(arena.backup, HostBackup)
        refill = Refill(self._backend, arena, undo, late)
        refill.put(self._pool.take(refill.missing, undo))
        if isinstance(arena.backup, HostBackup):
            refill.put(self._pool.make(min(refill.missing, LARGEST), undo, arena.whole))
        refill.put(self._pool.make(refill.missing, undo, arena.whole))
        return refill


def _flat(extents: Iterable[Iterable[shim.Extent]]) -> list[shim.Extent]:
    return [*itertools.chain.from_iterable(extents)]
