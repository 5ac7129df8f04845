"""``MemorySaver``: tags of memory that can be given back and put back behind the same addresses."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from memsaver import integrity
from memsaver.allocator import shim
from memsaver.arena import Arena
from memsaver.backends.base import ShortOfMemory, make_backend
from memsaver.backup import reading
from memsaver.backup.disk_file import default_directory
from memsaver.errors import StateError
from memsaver.page_pool import PagePool
from memsaver.recorder import Recorder
from memsaver.report import CallStats, Event, Report, TagReport
from memsaver.shortage import PAGE_POOL, explain
from memsaver.switch import Switch
from memsaver.tags import Tags, check_content

if TYPE_CHECKING:
    from memsaver.backup.host import Waitable
    from memsaver.backup.host_arena import HostArena
    from memsaver.lease import PoolTicket, Ticket
    from memsaver.share import ShareServer


class MemorySaver:
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

    def __init__(
        self,
        device: str | torch.device = "cpu",
        *,
        limit_bytes: int | None = None,
        reserve_bytes: int | None = None,
        disk_dir: str | Path | None = None,
        debug: bool = False,
    ) -> None:
        for name, value in (("limit_bytes", limit_bytes), ("reserve_bytes", reserve_bytes)):
            if value is not None and value <= 0:
                raise ValueError(f"{name}={value} must be positive, or None")
        self._backend = make_backend(torch.device(device), limit_bytes)
        self._pool = PagePool(self._backend)
        self._tags = Tags(self._backend, reserve_bytes or self._backend.total_bytes)
        directory = Path(disk_dir or default_directory())
        self._switch = Switch(self._backend, self._pool, debug, directory, self._tags)
        self._recorder = Recorder(self._backend)
        self._lock = threading.RLock()
        self._closed = False
        self._pid = os.getpid()
        self._guard = None
        if debug:
            from memsaver.debug import PausedGuard

            self._guard = PausedGuard(self._tags.paused_at)
            self._guard.enable()

    @property
    def device(self) -> torch.device:
        return self._backend.device

    @property
    def limit_bytes(self) -> int | None:
        """May be set at any time; below what is held, nothing more is taken until enough was given back."""
        return self._backend.limit_bytes

    @limit_bytes.setter
    def limit_bytes(self, nbytes: int | None) -> None:
        self._backend.limit_bytes = nbytes

    @property
    def disk_dir(self) -> Path:
        """Where content ``"disk"`` is saved, from the next pause on."""
        return self._switch.disk_dir

    @disk_dir.setter
    def disk_dir(self, path: str | Path) -> None:
        self._switch.disk_dir = Path(path)

    @property
    def host_arena(self) -> HostArena:
        """Where content is saved; one for all savers of the process with the same kind of device."""
        return self._backend.host_arena

    @property
    def tags(self) -> list[str]:
        """Tags in the order of their first use."""
        return [arena.tag for arena in self._tags]

    def is_paused(self, tag: str) -> bool:
        return self._arena(tag).paused

    def tag_of(self, tensor: torch.Tensor) -> str:
        """The tag that a tensor is on; ``TagError`` if on none."""
        return self._tags.at(tensor.data_ptr()).tag

    def offset_of(self, tensor: torch.Tensor) -> int:
        """Byte offset of a tensor's first element in its tag's arena."""
        with self._lock:
            return tensor.data_ptr() - self._tags.at(tensor.data_ptr()).address

    # ---------------------------------------------------------------- placing

    @contextlib.contextmanager
    def region(self, tag: str = "default", content: str | None = None) -> Iterator[None]:
        """Place this thread's torch allocations on ``tag``; the innermost region wins.

        ``content``: what a pause does with the content: ``"discard"`` (default for a new tag), ``"host"``, ``"disk"``.
        Allocations of other threads (autograd's, loaders') are not caught. Raises ``StateError`` on a paused tag,
        ``OutOfMemory`` where torch's own error would say less, ``CompilerError`` on the CPU without a C++ compiler.
        """
        arena = self._open_for_use(tag, content, enter=True)
        before = arena.stats.committed
        try:
            with self._hook(arena):
                arena.settle_frees()
                yield
        except torch.OutOfMemoryError as error:
            cause = arena.cause()
            if cause.code:
                raise self._shortage(f"region {tag!r}", [arena], cause) from error
            raise
        finally:
            with self._lock:
                arena.open_regions -= 1
            self._settle(arena, before)

    def empty(
        self,
        shape: tuple[int, ...] | list[int] | int,
        dtype: torch.dtype = torch.float32,
        tag: str = "default",
        content: str | None = None,
        elastic: bool = False,
    ) -> torch.Tensor:
        """An uninitialised tensor at a fixed place on ``tag``, freed when its storage dies. Needs no compiler.

        elastic: its memory comes in pieces of at most 1 GiB, now and at each resume, so that ``resize`` can give some
        back; on a GPU the memory of other tensors is one piece each.
        """
        size = torch.Size((shape,) if isinstance(shape, int) else shape)
        arena = self._open_for_use(tag, content)
        nbytes = size.numel() * dtype.itemsize
        if not nbytes:
            return torch.empty(size, dtype=dtype, device=self.device)
        before = arena.stats.committed
        if elastic:
            self._commit_pieces(arena, nbytes)
        tensor = arena.empty(nbytes)
        if tensor is None and self._switch.make_room():
            tensor = arena.empty(nbytes)
        if tensor is None:
            raise self._shortage(f"empty({list(size)}, {dtype}) on tag {tag!r}", [arena], arena.cause())
        self._settle(arena, before, trim=False)
        return tensor.view(dtype).view(size)

    def _commit_pieces(self, arena: Arena, nbytes: int) -> None:
        """Put memory behind the next ``nbytes`` of a tag, in pieces, which it keeps to."""
        arena.whole, arena.elastic = False, True
        end = self._backend.round_up(arena.stats.top + nbytes)
        before = arena.stats.committed
        if before < end <= arena.reservation.nbytes:  # beyond: the allocation fails, and says why
            with self._operation():
                try:
                    self._switch.resize(arena, end)
                except ShortOfMemory as short:
                    raise self._shortage(f"empty on tag {arena.tag!r}", [arena], short.cause, end - before) from None

    def mem_pool(self, tag: str, content: str | None = None) -> torch.cuda.MemPool:
        """A pool for ``torch.cuda.use_mem_pool`` and ``torch.cuda.graph(pool=...)`` whose memory is on ``tag``."""
        if self.device.type != "cuda":
            raise ValueError("mem_pool needs a CUDA device; on the CPU use region() or empty()")
        from memsaver.allocator import cuda_hook

        return cuda_hook.new_pool(self._open_for_use(tag, content).slot)

    def _hook(self, arena: Arena) -> contextlib.AbstractContextManager[None]:
        if self.device.type == "cuda":
            from memsaver.allocator import cuda_hook

            return cuda_hook.allocate_from(arena.slot, self.device)
        from memsaver.allocator import cpu_hook

        return cpu_hook.allocate_from(arena.slot)

    def _open_for_use(self, tag: str, content: str | None, enter: bool = False) -> Arena:
        """The tag's arena, made on first use; ``enter`` counts one more open region, so that no pause comes between."""
        with self._lock:
            self._require_open()
            arena = self._tags.open(tag, content)
            arena.open_regions += enter
        return arena

    def _settle(self, arena: Arena, before: int, trim: bool = True) -> None:
        """After allocating: give back the unused tail (never under a lease), and tell the timeline."""
        with self._operation():
            if trim and not arena.open_regions and not self._leases(arena.tag):
                arena.trim()
            if arena.stats.committed != before:
                self._recorder.record("grow" if arena.stats.committed > before else "trim", arena, 0.0)

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
            lost = self._switch.pause(arenas, saved, release, to, streams)
            seconds = (time.perf_counter() - started) / max(1, len(arenas))
            for arena in arenas:
                arena.last_pause_seconds = seconds
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
                arena.last_resume_seconds = seconds
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
            out.last_pause_seconds = into.last_resume_seconds = seconds
            self._recorder.record("pause", out, seconds)
            self._recorder.record("resume", into, seconds)

    def mark_clean(self, tag: str, version: Hashable) -> None:
        """Say that the content of an active tag is, until its next pause, what the owner calls ``version``.

        If that pause finds the copy of the same version from an earlier pause or ``save``, on the same allocations, it
        copies nothing. It compares a digest first, so a write that the owner does not know of is never lost. To be said
        anew before each pause; the copy stays in host memory meanwhile, unless another tag needs the room.
        """
        with self._lock:
            self._active(tag, "mark_clean").version = version

    def save(self, tag: str, version: Hashable) -> Waitable | None:
        """Begin to copy an active tag's content to host memory, behind the work that is queued on the current stream.

        Work that only reads the tag may go on meanwhile. The next pause finds the copy as after ``mark_clean``. Returns
        an event to wait for; None where it is done at once (CPU).
        """
        with self._operation():
            return self._switch.start_save(self._active(tag, "save"), version)

    def saved(self, tensor: torch.Tensor, zero_copy: bool = False) -> torch.Tensor:
        """The saved content of a contiguous tensor on a paused tag, on the CPU.

        zero_copy: the memory that it is saved in, which is someone else's after the tag's next resume; ``ValueError``
        where it lies on disk or in several pieces.
        """
        if not tensor.nbytes:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        with self._lock:
            return reading.read(self._tags.at(tensor.data_ptr()), tensor, zero_copy)

    def _active(self, tag: str, what: str) -> Arena:
        arena = self._arena(tag)
        if arena.paused:
            raise StateError(f"{what}({tag!r}): the tag is paused; resume it first")
        return arena

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
            wanted, before = self._backend.round_up(nbytes), arena.stats.committed
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
            backed = arena.stats.committed - (tensor.data_ptr() - arena.address)
        row = tensor.stride(0) * tensor.element_size()
        return tensor[: max(0, min(len(tensor), backed // row))] if row else tensor

    def trim(self, tag: str | None = None) -> int:
        """Give memory that no tensor uses back to the driver: kept extents and the tags' unused ends; returns bytes.

        A paused tag's unused end is not put back by the next resume. tag: only this one's unused end.
        """
        with self._operation():
            arenas = self._select(() if tag is None else (tag,))
            arenas = [arena for arena in arenas if not arena.open_regions and not self._leases(arena.tag)]
            kept = self._pool.extents if tag is None else []
            if arenas and self.device.type == "cuda":
                from memsaver.allocator import cuda_hook

                cuda_hook.free_dead_blocks(arenas[0].slot, self.device)
            return self._switch.trim(arenas, kept)

    def _shortage(self, what: str, arenas: list[Arena], cause: shim.Cause, needed: int = 0) -> Exception:
        """needed: bytes; 0: those of the paused arenas, or what the failed call asked for."""
        needed = needed or sum(arena.committed_when_paused for arena in arenas if arena.paused)
        holders = {arena.tag: arena.stats.committed for arena in self._tags}
        holders[PAGE_POOL] = self._pool.held_bytes
        return explain(what, cause, needed or cause.requested, self._tags.reserve_bytes, holders, self._backend)

    # ---------------------------------------------------------------- sharing and reporting

    def share(self, tag: str, writable: bool = False) -> Ticket:
        """A ticket with which another process of this user maps the tag (``memsaver.attach``)."""
        with self._lock:
            return self._sharing().ticket(self._arena(tag), writable)

    def pool_ticket(self) -> PoolTicket:
        """A ticket with which a saver of this user hands its memory over to this one (``pause(to=...)``)."""
        with self._lock:
            self._require_open()
            return self._sharing().pool_ticket(self._backend.device_key)

    def _sharing(self) -> ShareServer:
        if self._switch.server is None:
            from memsaver.share import ShareServer

            self._switch.server = ShareServer(self._lock, self._pool, self._arena)
            weakref.finalize(self, self._switch.server.close)
        return self._switch.server

    def report(self) -> Report:
        """What every tag holds now."""
        with self._lock:
            tags = {arena.tag: self._tag_report(arena) for arena in self._tags}
            return Report(
                device=str(self.device),
                limit_bytes=self.limit_bytes,
                committed_bytes=self._backend.committed_bytes,
                pool_bytes=self._pool.held_bytes,
                backup_bytes=sum(tag.backup_bytes for tag in tags.values()),
                tags=tags,
                others=self._backend.other_holders(),
            )

    def _tag_report(self, arena: Arena) -> TagReport:
        stats = arena.stats
        return TagReport(
            state="paused" if arena.paused else "active",
            content=arena.content,
            reserved_bytes=stats.reserved,
            committed_bytes=stats.committed,
            live_bytes=sum(nbytes for _, nbytes in arena.live_ranges()),
            backup_bytes=arena.backup.host_bytes if arena.backup else 0,
            disk_bytes=arena.backup.disk_bytes if arena.backup else 0,
            extents=stats.extents,
            leases=len(self._leases(arena.tag)),
            last_pause_seconds=arena.last_pause_seconds,
            last_resume_seconds=arena.last_resume_seconds,
        )

    def statistics(self) -> dict[str, CallStats]:
        """Calls, failures, bytes and seconds of every driver operation so far (``"create"``, ``"map"``, ...)."""
        return self._recorder.statistics()

    def drain_events(self) -> list[Event]:
        """The operations since the last call, oldest first."""
        with self._lock:
            return self._recorder.drain()

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` where the tables contradict each other; callable at any time."""
        with self._lock:
            integrity.check(self._tags, self._pool, self._backend)

    def close(self) -> None:
        """Give everything back. Tensors still alive must not be touched: their addresses stay without memory."""
        with self._operation():
            if self._closed:
                return
            self._switch.close(list(self._tags))
            if self._guard is not None:
                self._guard.disable()
            self._closed = True

    @contextlib.contextmanager
    def _operation(self) -> Iterator[None]:
        """One at a time, and its driver calls go to the log."""
        with self._lock, self._recorder.logged():
            yield

    def _require_open(self) -> None:
        if self._closed:
            raise StateError("this MemorySaver is closed; make a new one")
        if os.getpid() != self._pid:
            raise StateError("this is a forked child, where the saver is inert; make a MemorySaver of its own")
        if self._guard is not None:
            self._guard.enable()  # in this thread, too

    def _arena(self, tag: str) -> Arena:
        self._require_open()
        return self._tags.get(tag)

    def _select(self, tags: tuple[str, ...]) -> list[Arena]:
        self._require_open()
        return self._tags.select(tags)

    def _leases(self, tag: str) -> list[int]:
        return [] if self._switch.server is None else self._switch.server.holders(tag)
