"""Content of a paused tag in a file, through a few buffers in the host arena."""

from __future__ import annotations

import ctypes
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from pathlib import Path

import numpy
import torch

from memsaver.backup.disk_file import BLOCK, DiskFile
from memsaver.common.finalizers import Finalizer
from memsaver.common.ranges import Ranges, cut
from memsaver.common.rounding import round_up
from memsaver.common.signals import deliver
from memsaver.vmm.backend import Backend
from memsaver.vmm.pinned_arena import HostArena, Piece
from memsaver.vmm.workers import workers

CHUNK = 8 << 20
_WORKERS = 8  # requests in flight: what keeps an NVMe drive busy
_POLL_SECONDS = 0.1

Transfer = tuple[int, int, int]


class DiskBackup:
    """``ranges`` (offset, nbytes) of a tag, one after the other in a file that is gone when this
    object dies.

    The buffers are taken at once and kept, so that reading it back needs no memory that might not
    be there.
    """

    def __init__(self, ranges: Ranges, arena: HostArena, directory: Path) -> None:
        self.ranges = tuple(ranges)
        self.nbytes = sum(nbytes for _, nbytes in ranges)
        self._buffers: queue.SimpleQueue[Piece] = queue.SimpleQueue()
        pieces: list[Piece] = []
        try:
            for _ in range(min(_WORKERS, -(-self.nbytes // CHUNK))):
                pieces += _whole(arena, CHUNK)
            self._file = DiskFile(directory, self.nbytes)
        except BaseException:
            arena.give(pieces)
            raise
        Finalizer(self, arena.give, pieces)
        for piece in pieces:
            self._buffers.put(piece)
        self.host_bytes = sum(piece.nbytes for piece in pieces)
        self.disk_bytes = self._file.nbytes

    def save(self, backend: Backend, base: int) -> None:
        """Copies from the tag, whose arena begins at ``base``; returns when it is done."""

        def out(at: int, parts: Sequence[tuple[int, int]], buffer: Piece) -> None:
            placed = _placed(buffer.address, parts)
            backend.copy([(to, base + offset, nbytes) for to, offset, nbytes in placed])
            self._file.write(_memory(buffer, sum(nbytes for _, nbytes in parts)), at)

        self._each_chunk(backend, out)

    def fill(self, backend: Backend, base: int, at: int, nbytes: int) -> None:
        """Does nothing yet: ``restore`` reads, when all of the tag is mapped."""

    def restore(self, backend: Backend, base: int, end: int) -> None:
        """Copies into the tag's first ``end`` bytes: what was trimmed meanwhile has no memory."""

        def back(at: int, parts: Sequence[tuple[int, int]], buffer: Piece) -> None:
            self._file.read(_memory(buffer, sum(nbytes for _, nbytes in parts)), at)
            placed = _placed(buffer.address, parts)
            kept = [
                (offset, source, min(nbytes, end - offset))
                for source, offset, nbytes in placed
                if offset < end
            ]
            backend.copy([(base + offset, source, nbytes) for offset, source, nbytes in kept])

        self._each_chunk(backend, back)

    def views(self, offset: int, nbytes: int) -> list[torch.Tensor]:
        """uint8 tensors with the saved bytes of the tag from ``offset`` on, read from the file."""
        found = []
        for start, parts in cut(self.ranges, CHUNK):
            at = 0
            for begin, size in parts:
                first, last = max(begin, offset), min(begin + size, offset + nbytes)
                if first < last:
                    chunk = self._read_chunk(start, sum(n for _, n in parts))
                    found.append(chunk[at + first - begin : at + last - begin])
                at += size
        return found

    def _read_chunk(self, at: int, nbytes: int) -> torch.Tensor:
        buffer = self._buffers.get()
        try:
            self._file.read(_memory(buffer, nbytes), at)
            held = numpy.frombuffer(_memory(buffer, nbytes)[:nbytes], numpy.uint8)
            return torch.from_numpy(held.copy())  # on no tag, even inside a region
        finally:
            self._buffers.put(buffer)

    def _each_chunk(
        self, backend: Backend, move: Callable[[int, Sequence[tuple[int, int]], Piece], None]
    ) -> None:
        def work(chunk: tuple[int, list[tuple[int, int]]]) -> None:
            backend.bind_thread()
            buffer = self._buffers.get()
            try:
                move(*chunk, buffer)
            finally:
                self._buffers.put(buffer)

        futures = [workers("disk").submit(work, chunk) for chunk in cut(self.ranges, CHUNK)]
        try:
            while wait(futures, _POLL_SECONDS).not_done:
                deliver()
        finally:  # after an error or an interrupt too: memory that others work on stays mapped
            for future in futures:
                future.cancel()
            wait(futures)
        for future in futures:
            future.result()


def _whole(arena: HostArena, nbytes: int) -> list[Piece]:
    """One piece of ``nbytes``, as direct I/O needs it."""
    pieces = arena.take(nbytes, whole=True)
    assert len(pieces) == 1 and pieces[0].address % BLOCK == 0
    return pieces


def _placed(address: int, parts: Sequence[tuple[int, int]]) -> list[Transfer]:
    out = []
    for offset, nbytes in parts:
        out.append((address, offset, nbytes))
        address += nbytes
    return out


def _memory(buffer: Piece, nbytes: int) -> memoryview:
    """The buffer's first bytes, in whole blocks."""
    size = round_up(nbytes, BLOCK)
    return memoryview((ctypes.c_char * size).from_address(buffer.address)).cast("B")
