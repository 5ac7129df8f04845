"""Pause tagged memory and resume it at the same addresses.

The tests check these invariants after every operation, also after one that failed:

1. An address range belongs to one tag forever.
2. An extent has one owner and one place, and its leases are known.
3. Committed bytes equal the bytes that the driver or the kernel reports.
4. A failed operation leaves the state that it found.
5. Memory that work in flight uses is neither unmapped nor given to another tensor.
6. Undefined content is never served.
7. A dead process holds no lease.
"""

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
from memsaver.types import Content, Release

_PUT_OFF = 256 << 20  # bytes of dead tensors that are worth a warning
_log = logging.getLogger("memsaver")


class MemorySaver:
    """Owner of the tagged memory of one device.

    `region`, `empty` and `mem_pool` place tensors on a *tag*. `pause` releases the physical memory
    of tags, and `resume` maps memory at the same addresses, so that tensors, views and captured
    CUDA graphs stay valid. A process may have several savers.

    Operations are atomic. A failed operation raises an error that names the cause and a remedy, and
    leaves the saver unchanged. Methods may be called from any thread, and operations run one at a
    time. After `close`, operations on tags raise ``StateError``.

    Args:
        device: ``"cpu"`` (memfd and mmap) or ``"cuda:N"`` (CUDA virtual memory).
        limit_bytes: Maximum physical memory of all tags and the page pool together; ``None`` for
            the memory of the device.
        reserve_bytes: Address space to reserve for each tag; ``None`` for the size of the device's
            memory.
        disk_dir: Directory for content ``"disk"``, which is saved in unnamed files; ``None`` for
            /var/tmp, or the temporary directory where /var/tmp is not writable.

    Raises:
        ValueError: The device is not supported, or a size is not positive.
        BackendError: The device or its Python bindings are missing.
        StateError: A setting makes torch register tagged memory with NCCL.
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
        # Operations of all threads exclude each other, and so do requests of peers while they read
        # tags. The lock is re-entrant, because operations call each other. A thread takes it before
        # the lock of a device, never after it.
        self._lock = forkable(threading.RLock())
        self._peers = ShareServer(self.backend, self._lock, self._pool, self._arena)
        weakref.finalize(self, self._peers.close)
        directory = Path(disk_dir or default_directory())
        self._transactions = Transactions(
            self.backend, self._pool, directory, self._tags, self._peers
        )
        self._recorder = Recorder(self.backend)
        self._accounts = Accounts(self.backend, self._pool, self._tags)
        self._operations = 0
        self._closed = False

    def __repr__(self) -> str:
        states = (
            f"{arena.tag} {'paused' if arena.paused else format_bytes(arena.stats.committed)}"
            for arena in self._tags
        )
        tags = "closed" if self._closed else ", ".join(states) or "no tags"
        return f"MemorySaver({str(self.device)!r}: {tags})"

    @property
    def device(self) -> torch.device:
        """Return the device whose memory this saver manages."""
        return self.backend.device

    @property
    def limit_bytes(self) -> int | None:
        """Return the maximum physical memory of all tags and the page pool together.

        May be set at any time. While the saver holds more than the limit, it obtains no memory.
        """
        return self.backend.limit_bytes

    @limit_bytes.setter
    def limit_bytes(self, nbytes: int | None) -> None:
        self.backend.limit_bytes = nbytes

    @property
    def free_bytes(self) -> int:
        """Return how many bytes tags can obtain now, by the device's free memory and the limit.

        Blocks that torch caches count as free. The number is negative while the saver holds more
        than `limit_bytes`.
        """
        return self.backend.free_bytes

    @property
    def disk_dir(self) -> Path:
        """Return the directory in which the next pause saves content ``"disk"``."""
        return self._transactions.saving.disk_dir

    @disk_dir.setter
    def disk_dir(self, path: str | Path) -> None:
        self._transactions.saving.disk_dir = Path(path)

    @property
    def pinned_arena(self) -> PinnedArena:
        """Return the host memory in which content is saved.

        All savers of the process for the same type of device share one arena.
        """
        return self.backend.pinned_arena

    @held()
    def reserve_host(self, sizes: Mapping[str, int]) -> None:
        """Begin to allocate and pin host memory for saved content, in background threads.

        Pinning takes some tenths of a second per GiB, and the first pause would otherwise wait for
        it. A pause in the meantime uses the memory that is ready and waits for the rest.

        Reservations of other savers of the process add up with this one, because they share
        `pinned_arena`. A tag counts once, with its latest size, and content that is saved now needs
        no second reservation. A reservation that exceeds the available host memory raises nothing
        here; the pause that needs the memory fails. `close` cancels the reservation.

        Args:
            sizes: Bytes of saved content by tag.
        """
        saved = {arena.tag: arena.host_bytes for arena in self._tags}
        self.pinned_arena.reserve(self, sizes, self.backend.bind_thread, saved)

    @property
    def tags(self) -> list[str]:
        """Return the tags in the order of their first use."""
        return [arena.tag for arena in self._tags]

    @property
    def operations(self) -> int:
        """Return a number that grows with every change of a tag.

        What a caller knows of the tags holds until then. Allocations in a mapped part of a tag
        change nothing. Reading takes no lock.
        """
        self._require_open()
        return self._operations

    def is_paused(self, tag: str) -> bool:
        """Return whether the tag is paused.

        Args:
            tag: Tag to look up.

        Returns:
            False also while a prefetch is restoring the tag's content.

        Raises:
            TagError: The tag is unknown.
        """
        self._require_open()
        return self._tags.get(tag).paused

    def discards(self, tag: str) -> int:
        """Return how often the tag's content has been discarded or replaced by another tag's.

        The count grows with each pause that saves no copy (alone, in `swap`, or with a hand-over),
        each `exchange`, each beginning and end of an `alias`, and each `resize` that takes memory
        from tensors. The owner of a tag compares counts before it uses the content; see
        `ContentWatch`. The call takes no lock.

        Args:
            tag: Tag to look up.

        Returns:
            The count since the tag was created.

        Raises:
            TagError: The tag is unknown.
        """
        self._require_open()
        return self._tags.get(tag).discards

    def unbacked_bytes(self, tag: str) -> int:
        """Return how many bytes, up to the end of the tag's last tensor, have no memory.

        Args:
            tag: Tag to look up.

        Returns:
            The size of the tag while it is paused; otherwise the bytes at its end that a `resize`
            or a partial `resume` left without memory.

        Raises:
            TagError: The tag is unknown.
        """
        self._require_open()
        return self._tags.get(tag).unbacked

    def tag_of(self, tensor: torch.Tensor) -> str:
        """Return the tag that holds a tensor.

        Args:
            tensor: Tensor to look up by its address.

        Returns:
            The name of the tag.

        Raises:
            TagError: No tag of this saver holds the tensor.
        """
        return self._tags.at(tensor.data_ptr()).tag

    def offset_of(self, tensor: torch.Tensor) -> int:
        """Return where a tensor lies in its tag's arena.

        Args:
            tensor: Tensor to look up by its address.

        Returns:
            The byte offset of the tensor's first element.

        Raises:
            TagError: No tag of this saver holds the tensor.
        """
        with self._lock:
            return tensor.data_ptr() - self._tags.at(tensor.data_ptr()).address

    # ---------------------------------------------------------------- tensors on tags

    def region(
        self, tag: str = "default", content: Content | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Place the torch allocations of this thread on a tag.

        Of nested regions the innermost one applies. Allocations of other threads, such as
        autograd's and data loaders', stay in torch's own memory. Any thread may exit the region,
        which ends it for the thread that entered it.

        Args:
            tag: Tag to allocate on, created on first use.
            content: Where a pause keeps the content: ``"discard"`` (the default for a new tag)
                leaves it undefined after the resume, ``"host"`` keeps it in host memory and
                ``"disk"`` in a file. ``None`` accepts the policy of an existing tag.

        Returns:
            A context manager that can be entered once.

        Raises:
            ValueError: `content` is none of the three policies.
            TagError: The tag has a different content policy.
            StateError: The tag is paused.
            LeaseError: The tag's pages are aliased.
            OutOfMemory: An allocation inside failed; names the needed bytes and the holders.
            CompilerError: On the CPU, the C++ compiler is missing or failed.
        """
        return Unbroken(self._region(tag, content))

    @contextlib.contextmanager
    def _region(self, tag: str, content: Content | None) -> Iterator[None]:
        arena = self._open_for_use(tag, content, enter=True)
        before, thread = arena.stats.committed, threading.get_ident()
        try:
            with self.backend.allocate_from(arena.slot, self._make_room):
                arena.settle_frees()
                try:
                    yield
                finally:
                    self._warn_put_off(arena, before)
        except torch.OutOfMemoryError as error:
            cause, hint = arena.cause(), ""
            if not cause.code:
                raise
            # Before version 2.13, torch does not empty its cache while a region is open.
            if cause.code == shim.E_DRIVER and (cache := self.backend.cached_bytes):
                with self._operation():
                    self._transactions.make_room(cause)
                hint = (
                    f"{format_bytes(cache)} of torch's cache were released: enter the region again"
                )
            raise shortage(self._accounts, f"region {tag!r}", [arena], cause, hint=hint) from error
        finally:
            arena.leave()
            # The garbage collector may close this generator in any thread and under any lock. The
            # unused end of the tag then stays until the next trim.
            if threading.get_ident() == thread:
                self._settle(arena, before)

    def _make_room(self, slot: int) -> bool:
        """Release retained and cached memory; return whether to retry the failed allocation."""
        with self._operation():
            if again := self._transactions.make_room(shim.cause(slot)):
                shim.cause(slot, clear=True)
            return again

    def _warn_put_off(self, arena: Arena, before: int) -> None:
        """Warn if a region grew while torch could not reuse the memory of dead tensors."""
        if arena.stats.committed - before < _PUT_OFF:
            return
        if (nbytes := self.backend.put_off_bytes) >= _PUT_OFF:
            _log.warning(
                "region %r: %s of dead tensors that a second stream used were not reused: before "
                "version 2.13 torch reuses them only while no region is open; leave the region at "
                "each step",
                arena.tag,
                format_bytes(nbytes),
            )

    def empty(
        self,
        shape: tuple[int, ...] | list[int] | int,
        dtype: torch.dtype = torch.float32,
        tag: str = "default",
        content: Content | None = None,
        elastic: bool = False,
    ) -> torch.Tensor:
        """Allocate an uninitialized tensor on a tag.

        The tensor is freed when its storage dies. Unlike `region`, this needs no C++ compiler.

        Args:
            shape: Shape of the tensor.
            dtype: Data type of the tensor.
            tag: Tag to allocate on, created on first use.
            content: Where a pause keeps the content; see `region`.
            elastic: Obtain the tag's memory in pieces of at most 1 GiB, now and at each resume, so
                that `resize` can release some of it. On a GPU, a tensor otherwise gets its memory
                in one piece.

        Returns:
            A contiguous tensor on this saver's device.

        Raises:
            ValueError: A length is negative, or `content` is none of the three policies.
            TagError: The tag has a different content policy.
            StateError: The tag is paused.
            LeaseError: The tag's pages are aliased.
            OutOfMemory: Names the needed bytes and the holders. Nothing has changed.
        """
        size = (shape,) if isinstance(shape, int) else tuple(shape)
        if any(length < 0 for length in size):
            raise ValueError(f"empty: no length of the shape {list(size)} may be negative")
        # C takes no larger number; an allocation of this size fails with a proper message.
        nbytes = min(math.prod(size) * dtype.itemsize, sys.maxsize)
        first = tag not in self.tags
        arena = self._open_for_use(tag, content)
        if not nbytes:
            return torch.empty(size, dtype=dtype, device=self.device)
        before, operation = arena.stats.committed, f"empty({list(size)}, {dtype}) on tag {tag!r}"
        more = self.backend.round_up(arena.stats.top + nbytes) - before if elastic else 0
        try:
            with self._operation(), explained(self._accounts, operation, [arena], more):
                if elastic:
                    self._transactions.commit_pieces(self._active(tag, "empty"), nbytes)
                tensor = self._transactions.empty(arena, nbytes)
        except MemSaverError:
            if first:
                self._forget(arena)
            raise
        self._settle(arena, before, trim=False)
        return tensor.view(dtype).view(size)

    def mem_pool(self, tag: str, content: Content | None = None) -> torch.cuda.MemPool:
        """Create a torch memory pool whose memory is on a tag.

        Args:
            tag: Tag to allocate on, created on first use.
            content: Where a pause keeps the content; see `region`.

        Returns:
            A pool for ``torch.cuda.use_mem_pool`` and, by its ``id``, for
            ``torch.cuda.graph(pool=...)``.

        Raises:
            ValueError: The device is the CPU, or `content` is none of the three policies.
            TagError: The tag has a different content policy.
            StateError: The tag is paused.
            LeaseError: The tag's pages are aliased.
        """
        if self.device.type != "cuda":
            raise ValueError("mem_pool needs a CUDA device; on the CPU use region() or empty()")
        return cuda_hook.new_pool(self._open_for_use(tag, content).slot, self.device)

    # ---------------------------------------------------------------- pause and resume

    def pause(
        self,
        *tags: str,
        content: Content | None = None,
        release: Release = "driver",
        to: PoolTicket | None = None,
        streams: Sequence[torch.cuda.Stream] | None = None,
    ) -> None:
        """Release the physical memory of the given tags and keep their addresses.

        Tensors on a paused tag must not be accessed. Tags that are paused already are skipped.
        Aliased pages return to their owner, whichever `release` is given, and their content cannot
        be kept here.

        Args:
            *tags: Tags to pause; all tags if empty.
            content: Override the tags' policy for this pause. ``"host"`` keeps the live bytes in
                host memory and ``"disk"`` in a file until the next resume restores them. After
                ``"discard"`` they are undefined.
            release: Where the memory goes. ``"driver"`` frees it. ``"retain"`` puts it into this
                saver's page pool, from which any of its tags resumes without a driver allocation.
                ``"hand_over"`` puts it into the page pool of the saver that issued `to`.
            to: Ticket of the receiving saver (`pool_ticket`); required for ``"hand_over"``, and
                not allowed otherwise.
            streams: Wait only for the work on these streams instead of all work on the device. The
                caller guarantees that no other work uses the tags.

        Raises:
            TagError: A tag is unknown.
            StateError: A region of a tag is open. Nothing has changed.
            LeaseError: Another process maps a tag, does not release its import of it, or refuses
                the hand-over. Nothing has changed, unless the message says that the receiver fell
                silent during the hand-over; then the tags are paused.
            HostMemoryError: Host memory for the content is short. Nothing has changed.
            BackendError: The file for the content could not be written. Nothing has changed.
            ValueError: The arguments contradict each other, `to` belongs to another device, or the
                content of aliased pages would be kept. Nothing has changed.
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
        """Map physical memory behind the given tags at their original addresses.

        The operation is atomic: if not all of the memory is available, nothing is mapped. Content
        that the pause saved is restored bit for bit; other content is undefined. Tags that are
        active already are skipped.

        Args:
            *tags: Tags to resume; all tags if empty.
            at_least: If memory is short, accept a partial resume that maps at least this many bytes
                from the start of the tag. Requires exactly one tag, without saved content.
                `backed_view` returns the usable part of a tensor; `resize`, or the next pause and
                resume, maps the rest.

        Raises:
            OutOfMemory: Names the needed bytes and the holders. Nothing has changed.
            TagError: A tag is unknown.
            BackendError: The content could not be restored. The tags stay paused, and their content
                is kept.
            ValueError: `at_least` is given for several tags, or for a tag with saved content.
                Nothing has changed.
        """
        with self._operation():
            if at_least is not None:
                self._transactions.check_partial(self._select(tags))
            with self._resuming(tags) as arenas:
                self._transactions.resume(arenas, at_least)

    def begin_resume(self, *tags: str, order: Sequence[torch.Tensor] = ()) -> Prefetch:
        """Map memory behind the given tags as `resume` does, and restore content in the background.

        The call returns when the memory is mapped, while content is still being copied from host
        memory; content on disk is restored before that. Call `Prefetch.wait` for a tensor before
        using it. Every later operation on these tags waits for the whole prefetch, and raises
        ``BackendError`` if it failed. Until then, a `mem_pool` of the tags cannot allocate.

        Args:
            *tags: Tags to resume; all tags if empty.
            order: Tensors whose content to restore first, in this order.

        Returns:
            The prefetch, which waits for single tensors or for all content.

        Raises:
            OutOfMemory: Names the needed bytes and the holders. Nothing has changed.
            TagError: A tag is unknown.
            BackendError: Content on disk could not be restored. The tags stay paused, and their
                content is kept.
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

    def swap(self, *, pause: str, resume: str, content: Content | None = None) -> None:
        """Pause one tag and resume another with the memory of the first, in one operation.

        Both tags' content is copied at the same time, one to the host and one from it, extent by
        extent. The operation uses at most 1 GiB more device memory than the larger of the two tags.
        Memory that the second tag does not need stays in the page pool.

        An extent moves as a whole. If it is larger than the memory that the second tag still lacks,
        new memory is allocated instead, in addition to that 1 GiB. Tags made with ``elastic=True``
        have small extents.

        Args:
            pause: Active tag to pause.
            resume: Paused tag to resume.
            content: Override the first tag's policy: ``"host"`` or ``"discard"``.

        Raises:
            OutOfMemory: Names the needed bytes and the holders. Nothing has changed.
            HostMemoryError: Host memory for the content of `pause` is short. Nothing has changed.
            BackendError: The content of `resume` could not be restored. Nothing has changed.
            StateError: `pause` is paused already, `resume` is not paused, or a region of `pause` is
                open.
            LeaseError: Another process maps `pause`, or its pages are aliased.
            TagError: A tag is unknown.
            ValueError: The content of `pause` would go to disk.
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
        """Declare that the content of an active tag is `version` until its next pause.

        If a copy of the same version exists from an earlier pause or `save`, with the same
        allocations, that pause copies nothing. The pause compares a digest first, so it never loses
        a write that the owner does not know of. Repeat the call before each pause. The copy is
        kept in the meantime, unless another tag needs its host memory.

        Args:
            tag: Active tag.
            version: Name of the content, chosen by the caller; equal content has an equal version.

        Raises:
            TagError: The tag is unknown.
            StateError: The tag is paused.
            LeaseError: The tag's pages are aliased.
        """
        with self._lock:
            self._active(tag, "mark_clean").version = version

    def save(self, tag: str, version: Hashable) -> Waitable | None:
        """Begin to copy an active tag's content to host memory, after queued work.

        The copy follows the work that is queued on the current stream. Work that only reads the tag
        may continue during the copy. The next pause uses the copy as if `mark_clean` had been
        called with the same version.

        Args:
            tag: Active tag.
            version: Name of the content, chosen by the caller; see `mark_clean`.

        Returns:
            An event whose ``synchronize()`` waits for the copy, or ``None`` if the copy is complete
            (CPU).

        Raises:
            TagError: The tag is unknown.
            StateError: The tag is paused.
            LeaseError: The tag's pages are aliased.
            HostMemoryError: Host memory for the copy is short.
        """
        with self._operation():
            arena = self._active(tag, "save")
            done = partial(self._recorder.record, "save", arena)
            return self._transactions.saving.start(arena, version, done)

    def saved(self, tensor: torch.Tensor, zero_copy: bool = False) -> torch.Tensor:
        """Return the saved content of a tensor on a paused tag.

        Args:
            tensor: Contiguous tensor on a paused tag.
            zero_copy: Return a view of the saved bytes instead of a copy. The view is valid until
                the tag's next resume. Requires content in host memory, in one piece.

        Returns:
            A CPU tensor with the shape and dtype of `tensor`.

        Raises:
            TagError: No tag of this saver holds the tensor.
            StateError: The tag has no saved content, or the tensor was not part of it.
            ValueError: The tensor is not contiguous, or `zero_copy` is not possible.
        """
        if not tensor.nbytes:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        with self._lock:
            arena = self._transactions.settled(self._tags.at(tensor.data_ptr()))
            return read_saved(arena, tensor, zero_copy)

    # ---------------------------------------------------------------- size

    def resize(self, tag: str, nbytes: int) -> int:
        """Grow or shrink the memory behind an active tag to its first `nbytes` bytes.

        Remaining content is kept. The part of a tensor beyond the memory must not be accessed; see
        `backed_view`. The size is rounded up to pages, and on a GPU to whole extents, because an
        extent is released as a whole.

        Args:
            tag: Active tag.
            nbytes: Bytes to back with memory, from the start of the tag.

        Returns:
            The number of bytes that are backed now.

        Raises:
            OutOfMemory: Names the needed bytes and the holders. Nothing has changed.
            StateError: The tag is paused.
            LeaseError: Another process maps the tag, or its pages are aliased. Nothing has changed.
            TagError: The tag is unknown.
            ValueError: `nbytes` is negative or exceeds the tag's reserved addresses.
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
        """Return the leading rows of a tensor that have memory behind them.

        Args:
            tensor: Contiguous tensor on a tag, with at least one dimension.

        Returns:
            A view of the first rows, which is empty while the tag is paused.

        Raises:
            ValueError: The tensor is not contiguous, or has no dimension.
            TagError: No tag of this saver holds the tensor.
        """
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
        """Release memory that no tensor uses to the driver.

        This covers the page pool and the unused end of each tag, except of tags that a region or a
        lease is using. The next resume of a paused tag does not map its unused end.

        Args:
            tag: Trim only the unused end of this tag; ``None`` for all tags and the page pool.

        Returns:
            The number of bytes that were released.

        Raises:
            TagError: The tag is unknown.
            LeaseError: Another process does not release its import of the memory.
        """
        with self._operation():
            arenas = self._select(() if tag is None else (tag,))
            return self._transactions.trim(arenas, pool=tag is None)

    def release_retained(self, to: PoolTicket | None = None, most: int | None = None) -> None:
        """Release the page pool's memory, to another saver's page pool or to the driver.

        Args:
            to: Ticket of the receiving saver (`pool_ticket`). If it refuses or is gone, the driver
                gets all of the memory, as it does for ``None``.
            most: Maximum number of bytes to hand over; ``None`` for all. The driver gets the rest.

        Raises:
            ValueError: `to` belongs to another device. The memory is still retained.
            LeaseError: Another process does not release its import of the memory, which is still
                retained.
        """
        with self._operation():
            self._require_open()
            self._transactions.release_retained(to, most)

    # ---------------------------------------------------------------- pages of other tags

    def exchange(self, one: str, other: str) -> None:
        """Exchange the memory, and with it the content, of two active tags.

        The tensors of each tag then show the content of the other tag. Nothing is copied, and
        addresses stay the same, so tensors and captured CUDA graphs stay valid. The operation waits
        for the device. The version declared by `mark_clean` moves with the content; clean copies
        are dropped.

        Args:
            one: Active tag.
            other: Active tag with the same number of committed bytes.

        Raises:
            ValueError: The sizes differ, or the tags are the same. Nothing has changed.
            StateError: A tag is paused, or a region of it is open. Nothing has changed.
            LeaseError: Another process maps a tag, or its pages are aliased. Nothing has changed.
            TagError: A tag is unknown.
        """
        with self._operation():
            arenas = [self._active(tag, "exchange") for tag in (one, other)]
            with self._recorder.timed("exchange", arenas):
                self._transactions.exchange(*arenas)

    def alias(self, tag: str, ticket: Ticket) -> None:
        """Map the pages of another saver's tag behind a paused tag, which becomes active.

        Byte i of this tag is then byte i of the owner's tag: two tags show one memory, which the
        owner still owns and accounts for. ``pause(tag)`` returns the pages. Until then the owner
        cannot pause its tag, and this tag cannot be allocated on, resized, exchanged, swapped,
        saved or shared. A later `resume` restores the tag's own saved content. The pages stay
        mapped if the owner dies.

        Args:
            tag: Paused tag of this saver.
            ticket: Ticket for the owner's tag (`share`), which also decides whether the pages are
                writable here.

        Raises:
            StateError: The tag is not paused. Nothing has changed.
            ValueError: The ticket is for another device or for a tag of this saver, or the owner's
                tag is too small for the tensors of this one. Nothing has changed.
            LeaseError: The owner refuses or is gone, or the tag's pages are aliased already.
                Nothing has changed.
            TagError: The tag is unknown.
        """
        with self._lock:
            self._transactions.check_alias(self._arena(tag), ticket)
        started = time.perf_counter()
        with held(), contextlib.ExitStack() as undo:
            # Not under the lock: the owner may be waiting for this saver.
            aliased = alias_pages(ticket, self.device, undo)
            with self._operation():
                arena = self._arena(tag)
                self._transactions.alias(arena, aliased)
                undo.pop_all()
                self._recorder.record("alias", arena, time.perf_counter() - started)

    # ---------------------------------------------------------------- sharing

    def share(self, tag: str, writable: bool = False) -> Ticket:
        """Return a ticket with which other processes of this user map a tag.

        Args:
            tag: Tag to share; it must be active when it is mapped.
            writable: Whether holders of the ticket may write to the tag.

        Returns:
            A picklable ticket for `memsaver.attach` and `alias`; the same one for equal arguments.

        Raises:
            TagError: The tag is unknown.
            LeaseError: The tag's pages are aliased; share them at their owner.
        """
        with held(), self._lock:
            arena = self._arena(tag)
            arena.require_own(f"share({tag!r}): share it at its owner")
            return self._peers.ticket(arena, writable)

    def pool_ticket(self) -> PoolTicket:
        """Return a ticket with which other savers of this user hand memory to this one.

        Returns:
            A picklable ticket for ``pause(to=...)`` and ``release_retained(to=...)``.
        """
        with held(), self._lock:
            self._require_open()
            return self._peers.pool_ticket()

    # ---------------------------------------------------------------- reports, and closing

    def report(self, *, others: bool = True) -> Report:
        """Report the state and memory of every tag.

        Args:
            others: Fill `Report.others`, which takes milliseconds where torch holds much memory.

        Returns:
            A report, whose ``str`` is a table.
        """
        with self._lock:
            self.backend.free_put_off()
            return self._accounts.report(self._peers.holders, others)

    def leases(self, tag: str) -> int:
        """Return how many leases and aliases of a tag exist now.

        The call is much cheaper than `report`.

        Args:
            tag: Tag to look up.

        Returns:
            The number of leases and aliases.

        Raises:
            TagError: The tag is unknown.
        """
        with self._lock:
            self._require_open()
            return len(self._peers.holders(self._tags.get(tag).tag))

    def take_usage(self) -> Usage:
        """Return this process's use of the device, with torch's peak since the last call.

        The call takes about 0.1 ms. It does not wait for operations of other threads, so it may
        observe an operation that is half done.

        Returns:
            Bytes by tag, of torch, of the device, and of saved content.
        """
        return self._accounts.usage()

    def drain_events(self) -> list[Event]:
        """Return and forget the recorded operations.

        Returns:
            The operations since the last call, oldest first; at most the latest 10,000.
        """
        with self._lock:
            return self._recorder.drain()

    def check_integrity(self) -> None:
        """Check that the tables of tags, extents and page pool agree.

        May be called at any time.

        Raises:
            AssertionError: The tables contradict each other.
        """
        with self._lock:
            check_tables(self._tags, self._pool, self.backend)

    def close(self) -> None:
        """Release all memory for good.

        Tensors that are still alive must not be accessed: their addresses stay reserved, without
        memory. In a forked child, which owns none of the memory, the call does nothing.

        Raises:
            LeaseError: Another process maps a tag. Nothing was released.
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

    # ---------------------------------------------------------------- internals

    @contextlib.contextmanager
    def _operation(self) -> Iterator[None]:
        """Run the body as one operation: under the lock, without interrupts, and logged."""
        with held(), self._lock, self.backend.allow_captures(), self._recorder.logged():
            call_due()
            try:
                yield
            finally:
                self._operations += 1

    def _require_open(self) -> None:
        if self._closed:
            raise StateError("this MemorySaver is closed; make a new one")
        self.backend.require_own_process()

    def _arena(self, tag: str) -> Arena:
        self._require_open()
        return self._transactions.settled(self._tags.get(tag))

    def _active(self, tag: str, operation: str) -> Arena:
        """Return the tag's arena; raise an error unless the tag is active with its own memory."""
        arena = self._arena(tag)
        if arena.paused:
            raise StateError(f"{operation}({tag!r}): the tag is paused; resume it first")
        arena.require_own(f"{operation}({tag!r})")
        return arena

    def _select(self, tags: tuple[str, ...]) -> list[Arena]:
        self._require_open()
        return [*map(self._transactions.settled, self._tags.select(tags))]

    def _open_for_use(self, tag: str, content: Content | None, enter: bool = False) -> Arena:
        """Return the tag's arena, created on first use, and with `enter` open a region of it."""
        with held(), self._lock:
            self._require_open()
            arena = self._transactions.settled(self._tags.open(tag, content))
            if enter:
                arena.enter()
        return arena

    def _forget(self, arena: Arena) -> None:
        """Remove a tag whose first tensor failed, unless another thread uses it by now."""
        with self._operation():
            if not arena.open_regions and not arena.stats.blocks and not arena.paused:
                self._tags.forget(arena.tag)
                arena.close()

    def _settle(self, arena: Arena, before: int, trim: bool = True) -> None:
        """Trim the tag after allocations, unless a region or lease uses it; record its growth."""
        with self._operation():
            if trim and not arena.open_regions and not self._peers.holders(arena.tag):
                arena.trim()
            if arena.stats.committed != before:
                self._recorder.record(
                    "grow" if arena.stats.committed > before else "trim", arena, 0.0
                )
