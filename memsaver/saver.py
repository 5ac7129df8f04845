"""``MemorySaver``: tags of memory that can be given back and put back behind the same addresses."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import threading
import time
import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from memsaver.content.on_disk import default_directory
from memsaver.errors import MemSaverError, StateError, format_bytes
from memsaver.memory import as_device, make_backend
from memsaver.memory.backend import Waitable
from memsaver.memory.page_pool import PagePool
from memsaver.memory.pinned_arena import PinnedArena
from memsaver.memory.torch_allocator import check_segments
from memsaver.native import cuda_hook, shim
from memsaver.report import Event, Report, Usage
from memsaver.sharing.lease import alias_pages
from memsaver.sharing.server import ShareServer
from memsaver.system.interrupts import Unbroken, call_due, held
from memsaver.system.threads import forkable
from memsaver.tag.arena import Arena
from memsaver.tag.events import Recorder, check_tables
from memsaver.tag.out_of_memory import explained, shortage
from memsaver.tag.prefetch import Prefetch
from memsaver.tag.saving import read_saved
from memsaver.tag.tags import Accounts, Tags, check_content
from memsaver.tag.tickets import PoolTicket, Ticket
from memsaver.tag.transaction import Transactions

_PUT_OFF = 256 << 20  # bytes worth a warning
_log = logging.getLogger("memsaver")


class MemorySaver:
    """Tagged memory of one device. Several savers may live in one process.

    Args:
        device: ``"cpu"`` (memfd and mmap) or ``"cuda:N"`` (CUDA virtual memory).
        limit_bytes: the most physical memory that all tags together may hold; ``None``: what the
            device has.
        reserve_bytes: addresses reserved for each tag; ``None``: as many as the device has memory.
        disk_dir: where content ``"disk"`` is saved, in nameless files; ``None``: /var/tmp, else the
            temporary folder.

    Every operation raises with cause and next step, and leaves the state it found when it fails.
    """

    @held()
    def __init__(
        self,
        device: str | torch.device = "cpu",
        *,
        limit_bytes: int | None = None,
        reserve_bytes: int | None = None,
        disk_dir: str | Path | None = None,
    ) -> None:
        for name, value in (("limit_bytes", limit_bytes), ("reserve_bytes", reserve_bytes)):
            if value is not None and value <= 0:
                raise ValueError(f"{name}={value} must be positive, or None")
        device = as_device(device)
        if device.type == "cuda":
            check_segments()
        self.backend = make_backend(device, limit_bytes)
        self._pool = PagePool(self.backend)
        self._tags = Tags(self.backend, reserve_bytes or self.backend.total_bytes)
        self._lock = forkable(threading.RLock())
        self._peers = ShareServer(self.backend, self._lock, self._pool, self._arena)
        weakref.finalize(self, self._peers.close)
        directory = Path(disk_dir or default_directory())
        self._transactions = Transactions(
            self.backend, self._pool, directory, self._tags, self._peers
        )
        self._recorder = Recorder(self.backend)
        self._accounts = Accounts(self.backend, self._pool, self._tags)
        self._closed = False

    def __repr__(self) -> str:
        held = (
            f"{arena.tag} {'paused' if arena.paused else format_bytes(arena.stats.committed)}"
            for arena in self._tags
        )
        tags = "closed" if self._closed else ", ".join(held) or "no tags"
        return f"MemorySaver({str(self.device)!r}: {tags})"

    @property
    def device(self) -> torch.device:
        return self.backend.device

    @property
    def limit_bytes(self) -> int | None:
        """May be set at any time; below what is held, nothing more is taken until it fits."""
        return self.backend.limit_bytes

    @limit_bytes.setter
    def limit_bytes(self, nbytes: int | None) -> None:
        self.backend.limit_bytes = nbytes

    @property
    def free_bytes(self) -> int:
        """Bytes that tags can get now, as device and limit tell; what torch's cache gives back is
        free.
        """
        return self.backend.free_bytes

    @property
    def disk_dir(self) -> Path:
        """The folder that content ``"disk"`` is saved in, from the next pause on."""
        return self._transactions.saving.disk_dir

    @disk_dir.setter
    def disk_dir(self, path: str | Path) -> None:
        self._transactions.saving.disk_dir = Path(path)

    @property
    def pinned_arena(self) -> PinnedArena:
        """The arena content is saved in; one for all savers of the process on a kind of device."""
        return self.backend.pinned_arena

    @held()
    def reserve_host(self, sizes: Mapping[str, int]) -> None:
        """Begin to obtain the host memory of so many bytes of saved content by tag, in threads, and
        return. Pinning takes some tenths of a second a GiB, for which the first pause would wait.

        What other savers of the process reserved comes on top, as the arena is theirs, too; the
        same tag again is not counted twice, nor is what is saved of it now. A pause meanwhile uses
        what is there and waits for the rest. More than may be had is not refused here, but to the
        pause that needs it. ``close`` ends what this saver began.
        """
        saved = {arena.tag: arena.host_bytes for arena in self._tags}
        self.pinned_arena.reserve(self, sizes, self.backend.bind_thread, saved)

    @property
    def tags(self) -> list[str]:
        """Tags in the order of their first use."""
        return [arena.tag for arena in self._tags]

    def is_paused(self, tag: str) -> bool:
        self._require_open()
        return self._tags.get(tag).paused

    def discards(self, tag: str) -> int:
        """Count how often so far the content of the tag was discarded, or another's took its place.

        A pause without a copy does so (alone, by ``swap``, with a hand-over), an exchange, an alias
        and its end, and a resize that takes memory from tensors. The owner of a tag notes the count
        and compares it before it uses what lay there (``ContentWatch``); no lock is taken.
        """
        self._require_open()
        return self._tags.get(tag).discards

    def unbacked_bytes(self, tag: str) -> int:
        """Return how many bytes of the tag's tensors have no memory behind them: all while it is
        paused, else what a ``resize`` or ``resume(at_least=)`` left out at the end.
        """
        self._require_open()
        return self._tags.get(tag).unbacked

    def tag_of(self, tensor: torch.Tensor) -> str:
        """The tag that a tensor is on; ``TagError`` if on none."""
        return self._tags.at(tensor.data_ptr()).tag

    def offset_of(self, tensor: torch.Tensor) -> int:
        """Byte offset of a tensor's first element in its tag's arena."""
        with self._lock:
            return tensor.data_ptr() - self._tags.at(tensor.data_ptr()).address

    # ---------------------------------------------------------------- tensors on tags

    def region(
        self, tag: str = "default", content: str | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Place this thread's torch allocations on ``tag``; the innermost region wins.

        ``content``: what a pause does with the content: ``"discard"`` (default for a new tag),
        ``"host"``, ``"disk"``. Allocations of other threads (autograd's, loaders') are not caught.
        Any thread may leave it, which ends it for the thread that entered it.
        Raises ``StateError`` on a paused tag, ``OutOfMemory`` where torch's own error would say
        less, ``CompilerError`` on the CPU without a C++ compiler.
        """
        return Unbroken(self._region(tag, content))

    @contextlib.contextmanager
    def _region(self, tag: str, content: str | None) -> Iterator[None]:
        arena = self._open_for_use(tag, content, enter=True)
        before, thread = arena.stats.committed, threading.get_ident()
        try:
            with self.backend.allocate_from(arena.slot, self._make_room):
                arena.settle_frees()
                try:
                    yield
                finally:
                    self._tell_put_off(arena, before)
        except torch.OutOfMemoryError as error:
            cause, hint = arena.cause(), ""
            if not cause.code:
                raise
            # before version 2.13 torch keeps its cache while a region is open
            if cause.code == shim.E_DRIVER and (cache := self.backend.cached_bytes):
                with self._operation():
                    self._transactions.make_room(cause)
                hint = f"{format_bytes(cache)} of torch's cache were given back: enter it again"
            what = f"region {tag!r}"
            raise shortage(self._accounts, what, [arena], cause, hint=hint) from error
        finally:
            arena.leave()
            # a collector may end a generator that is in here, in any thread and under any lock:
            # the unused end stays until the next trim then
            if threading.get_ident() == thread:
                self._settle(arena, before)

    def _make_room(self, slot: int) -> bool:
        """Give up what is kept and cached for a region's allocation that failed; False: it lacks
        something else.
        """
        with self._operation():
            if again := self._transactions.make_room(shim.cause(slot)):
                shim.cause(slot, clear=True)
            return again

    def _tell_put_off(self, arena: Arena, before: int) -> None:
        """Warn where torch kept much of what died in a region that grew, because it was open."""
        if arena.stats.committed - before < _PUT_OFF:
            return
        if (nbytes := self.backend.put_off_bytes) >= _PUT_OFF:
            _log.warning(
                "region %r: %s of tensors that were used on a second stream have died, and could "
                "not be used again: before version 2.13 torch looks for them where no region is "
                "open; leave the region at each step",
                arena.tag,
                format_bytes(nbytes),
            )

    def empty(
        self,
        shape: tuple[int, ...] | list[int] | int,
        dtype: torch.dtype = torch.float32,
        tag: str = "default",
        content: str | None = None,
        elastic: bool = False,
    ) -> torch.Tensor:
        """An uninitialised tensor at a fixed place on ``tag``, freed when its storage dies. Needs
        no compiler.

        elastic: its memory comes in pieces of at most 1 GiB, now and at each resume, so that
        ``resize`` can give some back; on a GPU the memory of other tensors is one piece each.
        """
        size = (shape,) if isinstance(shape, int) else tuple(shape)
        if any(length < 0 for length in size):
            raise ValueError(f"empty: no length of the shape {list(size)} may be negative")
        # more does not go through C as it is
        nbytes = min(math.prod(size) * dtype.itemsize, sys.maxsize)
        first = tag not in self.tags
        arena = self._open_for_use(tag, content)
        if not nbytes:
            return torch.empty(size, dtype=dtype, device=self.device)
        before, what = arena.stats.committed, f"empty({list(size)}, {dtype}) on tag {tag!r}"
        more = self.backend.round_up(arena.stats.top + nbytes) - before if elastic else 0
        try:
            with self._operation(), explained(self._accounts, what, [arena], more):
                if elastic:
                    self._transactions.commit_pieces(self._active(tag, "empty"), nbytes)
                tensor = self._transactions.empty(arena, nbytes)
        except MemSaverError:
            if first:
                self._forget(arena)
            raise
        self._settle(arena, before, trim=False)
        return tensor.view(dtype).view(size)

    def mem_pool(self, tag: str, content: str | None = None) -> torch.cuda.MemPool:
        """A pool for ``torch.cuda.use_mem_pool`` and ``torch.cuda.graph(pool=...)`` whose memory is
        on ``tag``.
        """
        if self.device.type != "cuda":
            raise ValueError("mem_pool needs a CUDA device; on the CPU use region() or empty()")
        return cuda_hook.new_pool(self._open_for_use(tag, content).slot, self.device)

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

        content: overrides the tags' policy for this pause: ``"host"`` keeps the live bytes in host
        memory, ``"disk"`` in a file, and the next resume restores them; after ``"discard"`` they
        are undefined.
        release: where the memory goes. ``"driver"``; ``"retain"``: into this saver's page pool,
        from which any of its tags is resumed without the driver; ``"hand_over"``: into the page
        pool of the saver whose ticket is ``to``. Aliased pages go back to their owner, whatever
        ``release`` says; their content cannot be kept (``ValueError``). streams: wait for the work
        on these only, not for all of the device's; the caller answers for the rest. Raises
        ``TagError`` (unknown tag), ``StateError`` (a region is open), ``LeaseError`` (another
        process maps the tag, or does not let go of it, or does not take it over).
        """
        check_content(content)
        self._transactions.check_release(release, to)
        with self._operation():
            arenas = [arena for arena in self._select(tags) if not arena.paused]
            with self._recorder.timed("pause", arenas):
                lost = self._transactions.pause(arenas, content, release, to, streams)
            if lost is not None:
                raise lost

    def resume(self, *tags: str, at_least: int | None = None) -> None:
        """Put memory behind the tags again (no tag: all), at the same addresses. Active tags are
        skipped.

        All or nothing: when memory is short, nothing changes and ``OutOfMemory`` says how much was
        missing and who holds the rest. Content saved by the pause is restored bit for bit, other
        content is undefined.

        at_least: of one tag without saved content, take what fits now if that is so many bytes from
        its start; ``backed_view`` tells what of a tensor may be used, ``resize`` or the next pause
        and resume bring the rest.
        """
        with self._operation():
            with self._resuming(tags) as arenas:
                self._transactions.resume(arenas, at_least)

    def begin_resume(self, *tags: str, order: Sequence[torch.Tensor] = ()) -> Prefetch:
        """Put memory behind the tags (no tag: all) as ``resume`` does, and return while content
        that is saved in host memory is on its way: first that of the tensors in ``order``.

        Whoever touches a tensor on one of the tags waits for its bytes (``Prefetch.wait``). Every
        operation on one of them waits for all of it, a second ``begin_resume`` too, and raises
        ``BackendError`` where content did not come. Until then ``mem_pool`` cannot allocate there.
        """
        with self._operation(), self._resuming(tags) as arenas:
            done = partial(self._recorder.record_all, "prefetch", arenas)
            prefetch = Prefetch(self.backend, arenas, order, self._settle_prefetch, done)
            self._transactions.resume(arenas, prefetch=prefetch)
            return prefetch

    @contextlib.contextmanager
    def _resuming(self, tags: tuple[str, ...]) -> Iterator[list[Arena]]:
        arenas = [arena for arena in self._select(tags) if arena.paused]
        names = ", ".join(repr(arena.tag) for arena in arenas)
        with (
            explained(self._accounts, f"resume({names})", arenas),
            self._recorder.timed("resume", arenas),
        ):
            yield arenas

    def _settle_prefetch(self, prefetch: Prefetch) -> None:
        with self._operation():
            self._transactions.settle(prefetch)

    def swap(self, *, pause: str, resume: str, content: str | None = None) -> None:
        """Pause one tag and resume another at once: the memory of the first serves the second.

        Content goes to the host and comes from it at the same time, extent by extent, with at most
        1 GiB of the device beside what the first tag holds. Memory that the second does not need
        stays in the page pool. content: overrides the first tag's policy, ``"host"`` or
        ``"discard"``. All or nothing, as ``pause`` and ``resume``. An extent goes over as a whole:
        for one that is larger than what is missing, as much new memory is taken (tags made with
        ``elastic=True`` have small ones); ``OutOfMemory`` where there is none.
        """
        check_content(content)
        with self._operation():
            out, into = self._active(pause, "swap"), self._arena(resume)
            more = max(0, into.committed_when_paused - out.stats.committed)
            timed = self._recorder.timed
            with (
                explained(self._accounts, f"swap({pause!r}, {resume!r})", [into], more),
                timed("resume", [into]),
                timed("pause", [out]),
            ):
                self._transactions.swap(out, content, into)

    # ---------------------------------------------------------------- content

    def mark_clean(self, tag: str, version: Hashable) -> None:
        """Say that the content of an active tag is, until its next pause, what the owner calls
        ``version``.

        If that pause finds the copy of the same version from an earlier pause or ``save``, on the
        same allocations, it copies nothing. It compares a digest first, so a write that the owner
        does not know of is never lost. To be said anew before each pause; the copy stays in host
        memory meanwhile, unless another tag needs the room.
        """
        with self._lock:
            self._active(tag, "mark_clean").mark_clean(version)

    def save(self, tag: str, version: Hashable) -> Waitable | None:
        """Begin to copy an active tag's content to host memory, behind the work that is queued on
        the current stream.

        Work that only reads the tag may go on meanwhile. The next pause finds the copy as after
        ``mark_clean``. Returns an event to wait for; None where it is done at once (CPU).
        """
        with self._operation():
            arena = self._active(tag, "save")
            done = partial(self._recorder.record, "save", arena)
            return self._transactions.saving.start(arena, version, done)

    def saved(self, tensor: torch.Tensor, zero_copy: bool = False) -> torch.Tensor:
        """The saved content of a contiguous tensor on a paused tag, on the CPU.

        zero_copy: the memory that it is saved in, which is someone else's after the tag's next
        resume; ``ValueError`` where it lies on disk or in several pieces.
        """
        if not tensor.nbytes:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        with self._lock:
            arena = self._transactions.settled(self._tags.at(tensor.data_ptr()))
            return read_saved(arena, tensor, zero_copy)

    # ---------------------------------------------------------------- size

    def resize(self, tag: str, nbytes: int) -> int:
        """Put memory behind the first ``nbytes`` of a tag and take it away from the rest; bytes
        that are backed now.

        Content of what stays is kept; tensors that reach beyond must not be touched there
        (``backed_view``). Sizes are rounded up to pages, on a GPU to whole extents: what was put
        there in one piece is given back in one. Raises ``StateError`` (paused), ``LeaseError``
        (another process maps it), ``OutOfMemory``; nothing was changed then.
        """
        with self._operation():
            arena = self._active(tag, "resize")
            before = arena.stats.committed
            more = self.backend.round_up(nbytes) - before
            with explained(self._accounts, f"resize({tag!r}, {nbytes})", [arena], more):
                self._transactions.resize(arena, nbytes)
            if arena.stats.committed != before:
                self._recorder.record("resize", arena, 0.0)
            return arena.stats.committed

    def backed_view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The leading rows of a contiguous tensor on a tag that have memory behind them now."""
        if not tensor.is_contiguous() or not tensor.ndim:
            raise ValueError(
                f"backed_view needs a contiguous tensor with rows, got {tuple(tensor.shape)}"
            )
        with self._lock:
            arena = self._tags.at(tensor.data_ptr())
            backed = arena.backed - (tensor.data_ptr() - arena.address)
        row = tensor.stride(0) * tensor.element_size()
        return tensor[: max(0, min(len(tensor), backed // row))] if row else tensor

    def trim(self, tag: str | None = None) -> int:
        """Give memory that no tensor uses back to the driver: kept extents and the tags' unused
        ends; returns bytes.

        A paused tag's unused end is not put back by the next resume. tag: only this one's unused
        end.
        """
        with self._operation():
            arenas = self._select(() if tag is None else (tag,))
            return self._transactions.trim(arenas, pool=tag is None)

    def release_retained(self, to: PoolTicket | None = None, most: int | None = None) -> None:
        """Give away what the page pool retains: at most ``most`` bytes (None: all) to the saver
        whose ticket is ``to``, into its page pool; the rest to the driver, and all of it where
        there is no ``to``, or where that refuses or is gone.

        Raises ``ValueError`` (``to`` is of another device) and ``LeaseError`` (a process does not
        let go of what it has imported): the memory is still kept then.
        """
        with self._operation():
            self._require_open()
            self._transactions.release_retained(to, most)

    # ---------------------------------------------------------------- pages of other tags

    def exchange(self, one: str, other: str) -> None:
        """Two active tags swap their memory: what the tensors of each showed, those of the other
        show from here on.

        Addresses stay, so tensors and captured CUDA graphs do; nothing is copied. Both must have as
        many bytes committed. Waits for the device. What ``mark_clean`` said goes with the content;
        copies that were kept of it are dropped. Raises ``ValueError`` (sizes, or twice the same
        tag), ``StateError`` (paused, or a region is open), ``LeaseError`` (another process maps one
        of them, or one is aliased); nothing was changed then.
        """
        with self._operation():
            arenas = [self._active(tag, "exchange") for tag in (one, other)]
            with self._recorder.timed("exchange", arenas):
                self._transactions.exchange(*arenas)

    def alias(self, tag: str, ticket: Ticket) -> None:
        """Make a paused tag active with the pages of another saver's tag, whose ``share`` gave the
        ticket.

        Byte i of the tag is byte i of the other one: two tags, one memory, which stays the owner's
        and counts there. ``pause(tag)`` gives it back; until then the owner cannot pause, and this
        tag cannot be allocated on, resized, exchanged, swapped, saved or shared (``LeaseError``).
        The tag's own content, if it was saved, comes back with the ``resume`` after that. Writable
        as the ticket says. The pages stay if the owner dies.

        Raises ``StateError`` (the tag is not paused), ``ValueError`` (another device, a ticket of
        this saver, or the tag's tensors need more bytes than the other tag has), ``LeaseError``
        (the owner refuses or is gone); nothing was changed then.
        """
        with self._lock:
            self._transactions.check_alias(self._arena(tag), ticket)
        started = time.perf_counter()
        with held(), contextlib.ExitStack() as undo:
            # without the lock: the owner may be waiting for this saver
            aliased = alias_pages(ticket, self.device, undo)
            with self._operation():
                arena = self._arena(tag)
                self._transactions.alias(arena, aliased)
                undo.pop_all()
                self._recorder.record("alias", arena, time.perf_counter() - started)

    # ---------------------------------------------------------------- sharing

    def share(self, tag: str, writable: bool = False) -> Ticket:
        """A ticket with which another process of this user maps the tag (``memsaver.attach``)."""
        with held(), self._lock:
            arena = self._arena(tag)
            arena.require_own(f"share({tag!r}): share it at its owner")
            return self._peers.ticket(arena, writable)

    def pool_ticket(self) -> PoolTicket:
        """A ticket with which a saver of this user hands memory to this one (``pause(to=)``)."""
        with held(), self._lock:
            self._require_open()
            return self._peers.pool_ticket()

    # ---------------------------------------------------------------- what it holds, and its end

    def report(self, *, others: bool = True) -> Report:
        """Returns what every tag holds now.

        others: False leaves out `Report.others`, which takes milliseconds where torch holds much.
        """
        with self._lock:
            self.backend.free_put_off()
            return self._accounts.report(self._peers.holders, others)

    def leases(self, tag: str) -> int:
        """Counts how often leases and aliases map the tag now; much cheaper than ``report``."""
        with self._lock:
            self._require_open()
            return len(self._peers.holders(self._tags.get(tag).tag))

    def take_usage(self) -> Usage:
        """Tells what this process holds of the device now, and torch's most since the last call.

        Takes some 0.1 ms, and waits for no operation of another thread: it may see its middle.
        """
        return self._accounts.usage()

    def drain_events(self) -> list[Event]:
        """The operations since the last call, oldest first."""
        with self._lock:
            return self._recorder.drain()

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` where the tables contradict each other; callable at any time."""
        with self._lock:
            check_tables(self._tags, self._pool, self.backend)

    def close(self) -> None:
        """Give everything back. Tensors still alive must not be touched: their addresses stay
        without memory.

        Does nothing in a forked child, which has none of it.
        """
        if self.backend.forked:
            return
        with held():
            self.pinned_arena.stop(self)
        with self._operation():
            if self._closed:
                return
            self._transactions.close(list(self._tags))
            self._closed = True
            self.backend.close()

    # ---------------------------------------------------------------- for the operations

    @contextlib.contextmanager
    def _operation(self) -> Iterator[None]:
        """Runs one at a time, no interrupt in the middle, and its driver calls go to the log."""
        with held(), self._lock, self.backend.allow_captures(), self._recorder.logged():
            call_due()
            yield

    def _require_open(self) -> None:
        if self._closed:
            raise StateError("this MemorySaver is closed; make a new one")
        self.backend.require_own_process()

    def _arena(self, tag: str) -> Arena:
        self._require_open()
        return self._transactions.settled(self._tags.get(tag))

    def _active(self, tag: str, what: str) -> Arena:
        """A tag with memory of its own; ``StateError``, ``LeaseError``."""
        arena = self._arena(tag)
        if arena.paused:
            raise StateError(f"{what}({tag!r}): the tag is paused; resume it first")
        arena.require_own(f"{what}({tag!r})")
        return arena

    def _select(self, tags: tuple[str, ...]) -> list[Arena]:
        self._require_open()
        return [*map(self._transactions.settled, self._tags.select(tags))]

    def _open_for_use(self, tag: str, content: str | None, enter: bool = False) -> Arena:
        """The tag's arena, made on first use; ``enter``: with one more region, before any pause."""
        with held(), self._lock:
            self._require_open()
            arena = self._transactions.settled(self._tags.open(tag, content))
            if enter:
                arena.enter()
        return arena

    def _forget(self, arena: Arena) -> None:
        """A tag whose first tensor could not be made, unless another thread found it meanwhile."""
        with self._operation():
            if not arena.open_regions and not arena.stats.blocks and not arena.paused:
                self._tags.forget(arena.tag)
                arena.close()

    def _settle(self, arena: Arena, before: int, trim: bool = True) -> None:
        """Gives back the unused tail after allocating, never under a lease; tells the timeline."""
        with self._operation():
            if trim and not arena.open_regions and not self._peers.holders(arena.tag):
                arena.trim()
            if arena.stats.committed != before:
                self._recorder.record(
                    "grow" if arena.stats.committed > before else "trim", arena, 0.0
                )
