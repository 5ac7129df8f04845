"""``MemorySaver``: tags of memory that can be given back and put back behind the same addresses.

What puts tensors on tags is in ``placing.py``, tags that take each other's pages in ``alias.py``, what all of it stands
on in ``core.py``.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import torch

from memsaver.alias import Aliasing
from memsaver.backup import saved_content as reading
from memsaver.errors import StateError
from memsaver.tag.arena import Arena
from memsaver.tag.table import check_content
from memsaver.vmm.backend import ShortOfMemory

if TYPE_CHECKING:
    from memsaver.backup.on_host import Waitable
    from memsaver.sharing.lease import PoolTicket, Ticket
    from memsaver.sharing.server import ShareServer


class MemorySaver(Aliasing):
    """Tagged memory of one device. Several savers may live in one process.

    Args:
        device: ``"cpu"`` (memfd and mmap) or ``"cuda:N"`` (CUDA virtual memory).
        limit_bytes: the most physical memory that all tags together may hold; ``None``: what the device has.
        reserve_bytes: addresses reserved for each tag; ``None``: as many as the device has memory.
        disk_dir: where content ``"disk"`` is saved, in nameless files; ``None``: /var/tmp, else the temporary folder.
        debug: a torch operation on paused memory raises ``StateError`` before it runs, in every thread that uses the
            saver (``memsaver.debug``), and kept content is compared across a pause. Costs microseconds an operation.

    Every operation raises with cause and next step, and leaves the state it found when it fails.
    """

    # ---------------------------------------------------------------- pause and resume

    def pause(
        self,
        *tags: str,
        content: str | None = None,
        release: str = "driver",
        to: PoolTicket | None = None,
        streams: Sequence[torch.cuda.Stream] | None = None,
    ) -> None:
        """Take the memory of the tags away (no tag: all). Paused tags are skipped; all or nothing.

        content: overrides the tags' policy for this pause: ``"host"`` keeps the live bytes in host memory, ``"disk"``
        in a file, and the next resume restores them; after ``"discard"`` they are undefined.
        release: where the memory goes. ``"driver"``; ``"keep"``: into this saver's page pool, from which any of its
        tags is resumed without the driver; ``"hand_over"``: into the page pool of the saver whose ticket is ``to``.
        Borrowed pages go back to their owner, whatever ``release`` says; their content cannot be kept (``ValueError``).
        streams: wait for the work on these only, not for all of the device's; the caller answers for the rest.
        Raises ``TagError`` (unknown tag), ``StateError`` (a region is open), ``LeaseError`` (another process maps the
        tag, or does not let go of it, or does not take it over).
        """
        check_content(content)
        self._switch.check_release(release, to)
        with self._operation():
            arenas = [arena for arena in self._select(tags) if not arena.paused]
            if inside := [arena.tag for arena in arenas if arena.open_regions]:
                raise StateError(f"cannot pause {inside}: a region of it is open; leave the region first")
            started = time.perf_counter()
            kept = [(arena, content or arena.content) for arena in arenas]
            saved = [(arena, where) for arena, where in kept if where != "discard"]
            if lent := [arena.tag for arena, _ in saved if arena.loan is not None]:
                raise ValueError(f"the pages of {lent} are borrowed, their content is their owner's; content='discard'")
            lost = self._switch.pause(arenas, saved, release, to, streams)
            seconds = (time.perf_counter() - started) / max(1, len(arenas))
            for arena in arenas:
                self._recorder.record("pause", arena, seconds)
            if lost is not None:
                raise lost

    def resume(self, *tags: str, at_least: int | None = None) -> None:
        """Put memory behind the tags again (no tag: all), at the same addresses. Active tags are skipped.

        All or nothing: when memory is short, nothing changes and ``OutOfMemory`` says how much was missing and who
        holds the rest. Content saved by the pause is restored bit for bit, other content is undefined.

        at_least: of one tag without saved content, take what fits now if that is so many bytes from its start;
        ``backed_view`` tells what of a tensor may be used, ``resize`` or the next pause and resume bring the rest.
        """
        with self._operation():
            arenas = [arena for arena in self._select(tags) if arena.paused]
            started = time.perf_counter()
            try:
                self._switch.resume(arenas)
            except ShortOfMemory as short:
                if at_least is None or not self._resume_most(arenas, at_least):
                    names = ", ".join(repr(arena.tag) for arena in arenas)
                    raise self._shortage(f"resume({names})", arenas, short.cause) from None
            seconds = (time.perf_counter() - started) / max(1, len(arenas))
            for arena in arenas:
                self._recorder.record("resume", arena, seconds)

    def _resume_most(self, arenas: list[Arena], at_least: int) -> bool:
        if len(arenas) != 1 or arenas[0].backup is not None:
            raise ValueError("at_least takes one tag, whose content was discarded by its pause")
        return self._switch.resume_most(arenas[0], at_least)

    def swap(self, *, pause: str, resume: str, content: str | None = None) -> None:
        """Pause one tag and resume another at once: the memory of the first serves the second.

        Content goes to the host and comes from it at the same time, extent by extent, with at most 1 GiB of the device
        beside what the first tag holds. Memory that the second does not need stays in the page pool. content: overrides
        the first tag's policy, ``"host"`` or ``"discard"``. All or nothing, as ``pause`` and ``resume``. Memory
        in too large extents goes through the driver the first time, one tag after the other.
        """
        with self._operation():
            out, into = self._active(pause, "swap"), self._arena(resume)
            check_content(content)
            if not into.paused:
                raise StateError(f"swap: tag {resume!r} is not paused")
            if out.open_regions:
                raise StateError(f"cannot pause {pause!r}: a region of it is open; leave the region first")
            if (where := content or out.content) == "disk":
                raise ValueError("swap keeps content in host memory; pass content='host', or pause and resume")
            started = time.perf_counter()
            try:
                self._switch.swap(out, where, into)
            except ShortOfMemory as short:
                more = into.committed_when_paused - out.stats.committed
                raise self._shortage(f"swap({pause!r}, {resume!r})", [into], short.cause, max(0, more)) from None
            seconds = time.perf_counter() - started
            self._recorder.record("pause", out, seconds)
            self._recorder.record("resume", into, seconds)

    # ---------------------------------------------------------------- content

    def mark_clean(self, tag: str, version: Hashable) -> None:
        """Say that the content of an active tag is, until its next pause, what the owner calls ``version``.

        If that pause finds the copy of the same version from an earlier pause or ``save``, on the same allocations, it
        copies nothing. It compares a digest first, so a write that the owner does not know of is never lost. To be said
        anew before each pause; the copy stays in host memory meanwhile, unless another tag needs the room.
        """
        with self._lock:
            self._active(tag, "mark_clean").mark_clean(version)

    def save(self, tag: str, version: Hashable) -> Waitable | None:
        """Begin to copy an active tag's content to host memory, behind the work that is queued on the current stream.

        Work that only reads the tag may go on meanwhile. The next pause finds the copy as after ``mark_clean``. Returns
        an event to wait for; None where it is done at once (CPU).
        """
        with self._operation():
            return self._switch.saving.start(self._active(tag, "save"), version)

    def saved(self, tensor: torch.Tensor, zero_copy: bool = False) -> torch.Tensor:
        """The saved content of a contiguous tensor on a paused tag, on the CPU.

        zero_copy: the memory that it is saved in, which is someone else's after the tag's next resume; ``ValueError``
        where it lies on disk or in several pieces.
        """
        if not tensor.nbytes:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        with self._lock:
            return reading.read(self._tags.at(tensor.data_ptr()), tensor, zero_copy)

    # ---------------------------------------------------------------- size

    def resize(self, tag: str, nbytes: int) -> int:
        """Put memory behind the first ``nbytes`` of a tag and take it away from the rest; bytes that are backed now.

        Content of what stays is kept; tensors that reach beyond must not be touched there (``backed_view``). Sizes are
        rounded up to pages, on a GPU to whole extents: what was put there in one piece is given back in one. Raises
        ``StateError`` (paused), ``LeaseError`` (another process maps it), ``OutOfMemory``; nothing was changed then.
        """
        with self._operation():
            arena = self._arena(tag)
            if arena.paused:
                raise StateError(f"tag {tag!r} is paused; resume it first, at_least= takes what fits")
            arena.require_own(f"resize({tag!r}, {nbytes})")
            wanted, before = self.backend.round_up(nbytes), arena.stats.committed
            if nbytes < 0 or wanted > arena.reservation.nbytes:
                raise ValueError(f"{nbytes} bytes are outside the {arena.reservation.nbytes} reserved for {tag!r}")
            try:
                self._switch.resize(arena, wanted)
            except ShortOfMemory as short:
                raise self._shortage(f"resize({tag!r}, {nbytes})", [arena], short.cause, wanted - before) from None
            if arena.stats.committed != before:
                self._recorder.record("resize", arena, 0.0)
            return arena.stats.committed

    def backed_view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The leading rows of a contiguous tensor of one of the tags that have memory behind them now."""
        if not tensor.is_contiguous() or not tensor.ndim:
            raise ValueError(f"backed_view needs a contiguous tensor with rows, got {tuple(tensor.shape)}")
        with self._lock:
            arena = self._tags.at(tensor.data_ptr())
            backed = arena.backed - (tensor.data_ptr() - arena.address)
        row = tensor.stride(0) * tensor.element_size()
        return tensor[: max(0, min(len(tensor), backed // row))] if row else tensor

    def trim(self, tag: str | None = None) -> int:
        """Give memory that no tensor uses back to the driver: kept extents and the tags' unused ends; returns bytes.

        A paused tag's unused end is not put back by the next resume. tag: only this one's unused end.
        """
        with self._operation():
            arenas = self._select(() if tag is None else (tag,))
            self._switch.recall(arenas)
            arenas = [arena for arena in arenas if not arena.open_regions and not self._leases(arena.tag)]
            kept = self._pool.extents if tag is None else []
            if arenas and self.device.type == "cuda":
                from memsaver.native import cuda_hook

                cuda_hook.free_dead_blocks(arenas[0].slot, self.device)
            return self._switch.trim(arenas, kept)

    # ---------------------------------------------------------------- sharing

    def share(self, tag: str, writable: bool = False) -> Ticket:
        """A ticket with which another process of this user maps the tag (``memsaver.attach``)."""
        with self._lock:
            arena = self._arena(tag)
            arena.require_own(f"share({tag!r}): share it at its owner")
            return self._sharing().ticket(arena, writable)

    def pool_ticket(self) -> PoolTicket:
        """A ticket with which a saver of this user hands its memory over to this one (``pause(to=...)``)."""
        with self._lock:
            self._require_open()
            return self._sharing().pool_ticket(self.backend.device_key)

    def _sharing(self) -> ShareServer:
        if self._switch.server is None:
            from memsaver.sharing.server import ShareServer

            self._switch.server = ShareServer(self._lock, self._pool, self._arena)
            weakref.finalize(self, self._switch.server.close)
        return self._switch.server
