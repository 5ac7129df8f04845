"""Save of tags' content to host memory or a file, unless a clean copy still holds it."""

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path

import numpy
import torch

from memsaver.content import Backup, DiskBackup, HostBackup
from memsaver.errors import BackendError, HostMemoryError, StateError
from memsaver.memory.backend import Backend, Waitable
from memsaver.native import shim
from memsaver.tag.arena import Arena
from memsaver.types import Content


class Saving:
    """Component that saves the content of one saver's tags, under the saver's lock."""

    def __init__(self, backend: Backend, disk_dir: Path, tags: Iterable[Arena]) -> None:
        self.disk_dir = disk_dir
        self._backend = backend
        self._tags = tags

    def save(self, arena: Arena, content: Content) -> Backup:
        backup, fresh = self.prepare(arena, content)
        if fresh:
            try:
                backup.save(self._backend, arena.address)
            except BaseException:
                arena.forget_clean_copy()
                raise
        return backup

    def prepare(self, arena: Arena, content: Content) -> tuple[Backup, bool]:
        """Return the backup for a tag's content, and whether the content must be copied into it.

        A clean copy that still holds the content needs no copying.
        """
        copy, claim = arena.clean_copy, (arena.version, content, arena.stats.committed)
        try:
            if copy is not None and not copy.begin_check(*claim):
                copy = None
        except BackendError:  # the copy failed while it was made
            copy = None
        ranges = _saved_ranges(arena)  # overlaps with the check
        if copy is not None and copy.holds(ranges):
            return copy.backup, False
        arena.forget_clean_copy()
        backup = self._new_backup(ranges, content)
        if arena.version is not None:
            arena.keep_clean_copy(backup, arena.version, ranges).settle()
        return backup, True

    def _new_backup(self, ranges: Sequence[tuple[int, int]], content: Content) -> Backup:
        """Allocate a backup, and drop clean copies if host memory is short."""
        host = self._backend.pinned_arena
        for last in (False, True):
            try:
                return (
                    HostBackup(ranges, host)
                    if content == "host"
                    else DiskBackup(ranges, host, self.disk_dir)
                )
            except HostMemoryError:
                if last or not self._drop_clean_copies():
                    raise
        raise AssertionError

    def _drop_clean_copies(self) -> bool:
        """Drop the clean copies of active tags, and return whether there were any."""
        clean = [arena for arena in self._tags if arena.clean_copy is not None and not arena.paused]
        for arena in clean:
            arena.forget_clean_copy()
        return bool(clean)

    def start(
        self, arena: Arena, version: Hashable, done: Callable[[float], None]
    ) -> Waitable | None:
        """Begin to copy an active tag's content to the host, overlapped with work that reads it.

        For `done` and the result, see `Backend.copy_overlapped`.
        """
        ranges = _saved_ranges(arena)
        arena.forget_clean_copy()
        backup = self._new_backup(ranges, "host")
        assert isinstance(backup, HostBackup)
        copy = arena.keep_clean_copy(backup, version, ranges)
        try:
            copy.copying = backup.start_save(self._backend, arena.address, done)
        except BaseException:
            arena.forget_clean_copy()
            raise
        return copy.copying


def live_ranges(arena: Arena) -> list[tuple[int, int]]:
    """Return (offset, nbytes) of the allocations in use.

    On a GPU, these are the live blocks inside the segments of torch's caching allocator.
    """
    blocks = shim.blocks(arena.slot)
    if arena.backend.device.type != "cuda":
        return blocks
    inside: dict[int, list[tuple[int, int]]] = {}
    for segment in torch.cuda.memory_snapshot(include_traces=False):
        offset = segment["address"] - arena.address
        if 0 <= offset < arena.reservation.nbytes:
            inside[offset] = _live_blocks(segment, arena.address)
    return [*itertools.chain.from_iterable(inside.get(block[0], [block]) for block in blocks)]


def _saved_ranges(arena: Arena) -> list[tuple[int, int]]:
    """Return (offset, nbytes) of the live content that has memory behind it."""
    end = arena.stats.committed
    return [(at, min(nbytes, end - at)) for at, nbytes in live_ranges(arena) if at < end]


def _live_blocks(segment: dict, base: int) -> list[tuple[int, int]]:
    live, address = [], segment["address"]
    for block in segment["blocks"]:
        if block["state"].startswith("active"):
            live.append((address - base, block["requested_size"]))
        address += block["size"]
    return live


def read_saved(arena: Arena, tensor: torch.Tensor, zero_copy: bool) -> torch.Tensor:
    """Return a tensor's saved content on the CPU; see `MemorySaver.saved`."""
    if arena.backup is None:
        raise StateError(
            f"tag {arena.tag!r} holds no saved content; pause it with content='host' or 'disk'"
        )
    if not tensor.is_contiguous():
        raise ValueError(
            "cannot return the saved content of a tensor that is not contiguous; pass its base"
        )
    views = arena.backup.views(tensor.data_ptr() - arena.address, tensor.nbytes)
    if sum(view.numel() for view in views) != tensor.nbytes:
        raise StateError("the tensor was not alive, or had no memory, when its tag was paused")
    if zero_copy and (len(views) != 1 or arena.backup.disk_bytes):
        raise ValueError(
            "zero_copy needs content that is saved in host memory in one piece; use zero_copy=False"
        )
    flat = views[0] if zero_copy else _joined(views, tensor.nbytes)
    return flat.view(tensor.dtype).view(tensor.shape)


def _joined(views: list[torch.Tensor], nbytes: int) -> torch.Tensor:
    """Concatenate views into memory that is on no tag, even if a region is open."""
    flat = torch.from_numpy(numpy.empty(nbytes, dtype=numpy.uint8))
    for part, view in zip(flat.split([*map(len, views)]), views, strict=True):
        part.copy_(view)
    return flat
