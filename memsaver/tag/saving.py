"""Content on its way out of a tag, to host memory or a file, unless a kept copy still holds it."""

from __future__ import annotations

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


class Saving:
    """Saves for one saver, which holds its lock around every call."""

    def __init__(self, backend: Backend, disk_dir: Path, tags: Iterable[Arena]) -> None:
        """disk_dir: for content "disk". tags: all of the saver's."""
        self.disk_dir = disk_dir
        self._backend = backend
        self._tags = tags

    def save(self, arena: Arena, content: str) -> Backup:
        backup, fresh = self.prepare(arena, content)
        if fresh:
            try:
                backup.save(self._backend, arena.address)
            except BaseException:
                arena.forget_clean_copy()
                raise
        return backup

    def prepare(self, arena: Arena, content: str) -> tuple[Backup, bool]:
        """Tells where the content goes, and whether it must be copied there: not if a clean copy
        still holds it.
        """
        copy, claim = arena.clean_copy, (arena.version, content, arena.stats.committed)
        try:
            if copy is not None and not copy.begin_check(*claim):
                copy = None
        except BackendError:  # it was not made
            copy = None
        ranges = _saved_ranges(arena)  # while the check runs
        if copy is not None and copy.holds(ranges):
            return copy.backup, False
        arena.forget_clean_copy()
        backup = self._new_backup(ranges, content)
        if arena.version is not None:
            arena.keep_clean_copy(backup, arena.version, ranges).settle()
        return backup, True

    def _new_backup(self, ranges: Sequence[tuple[int, int]], content: str) -> Backup:
        """Makes room for it, before anything is copied; clean copies give way."""
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
        """Drops the clean copies of active tags; True if there was one."""
        found = [arena for arena in self._tags if arena.clean_copy is not None and not arena.paused]
        for arena in found:
            arena.forget_clean_copy()
        return bool(found)

    def start(
        self, arena: Arena, version: Hashable, done: Callable[[float], None]
    ) -> Waitable | None:
        """Copy an active tag's content to the host while work goes on that does not write it.
        done: see `Backend.copy_overlapped`.
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
    """(offset, nbytes) of what is in use.

    Under torch's caching allocator: the live blocks inside its segments.
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
    """(offset, nbytes) of the live content, where there is memory behind it."""
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
    """Returns content on the CPU, of the tensor's dtype and shape; see ``MemorySaver.saved``."""
    if arena.backup is None:
        raise StateError(
            f"tag {arena.tag!r} holds no saved content; pause it with content='host' or 'disk'"
        )
    if not tensor.is_contiguous():
        raise ValueError(
            "the saved content of a tensor that is not contiguous cannot be given; ask for its base"
        )
    views = arena.backup.views(tensor.data_ptr() - arena.address, tensor.nbytes)
    if sum(view.numel() for view in views) != tensor.nbytes:
        raise StateError("the tensor was not alive, or had no memory, when its tag was paused")
    if zero_copy and (len(views) != 1 or arena.backup.disk_bytes):
        raise ValueError(
            "zero_copy needs content that is saved in host memory in one piece; use zero_copy=False"
        )
    flat = views[0] if zero_copy else _gathered(views, tensor.nbytes)
    return flat.view(tensor.dtype).view(tensor.shape)


def _gathered(views: list[torch.Tensor], nbytes: int) -> torch.Tensor:
    """Copies one after the other, into memory that is on no tag even if a region is open."""
    flat = torch.from_numpy(numpy.empty(nbytes, dtype=numpy.uint8))
    done = 0
    for view in views:
        flat[done : done + len(view)] = view
        done += len(view)
    return flat
