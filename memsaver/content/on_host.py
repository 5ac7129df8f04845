"""Save the content of a paused tag in host memory; detect copies that a pause can reuse."""

import itertools
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

import torch

from memsaver.content.on_disk import DiskBackup
from memsaver.memory.backend import Backend, Waitable, dlpack_tensor
from memsaver.memory.pinned_arena import PinnedArena
from memsaver.ops.layout import Ranges, joined, round_up
from memsaver.ops.rows import RowCopies, digest_table
from memsaver.system.interrupts import Finalizer

_ALIGNMENT = 64
_HOST = torch.device("cpu")
Run = tuple[int, int, int]
"""(offset in the tag, host address, nbytes)"""


class HostBackup:
    """Saved ``ranges`` of a tag, packed into pieces of the host arena that this object owns."""

    def __init__(self, ranges: Ranges, arena: PinnedArena) -> None:
        self.ranges = tuple(ranges)
        self.nbytes = sum(nbytes for _, nbytes in ranges)
        self._pieces = arena.take(sum(_aligned(nbytes) for _, nbytes in joined(ranges)))
        self.host_bytes, self.disk_bytes = self.nbytes, 0
        Finalizer(self, arena.give, self._pieces)

    def save(self, backend: Backend, base: int) -> None:
        """Copy the ranges from the tag, whose arena begins at ``base``, and wait."""
        backend.copy(self._out(base))

    def start_save(
        self, backend: Backend, base: int, done: Callable[[float], None]
    ) -> Waitable | None:
        """Begin to save after the current stream's queued work, by `Backend.copy_overlapped`."""
        return backend.copy_overlapped(self._out(base), self, done)

    def fill(self, backend: Backend, base: int, at: int, nbytes: int) -> Waitable | None:
        """Begin to restore these bytes of the tag, which have just been mapped."""
        transfers = [(base + offset, host, size) for offset, host, size in self.part(at, nbytes)]
        return backend.start_copy(transfers, inward=True)

    def restore(self, backend: Backend, base: int, end: int) -> None:
        """Do nothing: ``fill`` has restored the content."""

    def views(self, offset: int, nbytes: int) -> list[torch.Tensor]:
        """Return uint8 tensors over saved bytes from ``offset`` on; they keep this backup alive."""
        spans = joined([(host, size) for _, host, size in self.part(offset, nbytes)])
        return [dlpack_tensor(at, size, _HOST, self) for at, size in spans]

    def _out(self, base: int) -> list[tuple[int, int, int]]:
        return [(host, base + offset, nbytes) for offset, host, nbytes in self.runs()]

    def runs(self) -> Iterator[Run]:
        """Yield runs, contiguous in the tag and in one piece of the arena, in order of the tag."""
        pieces = iter(self._pieces)
        host, room = 0, 0
        for offset, nbytes in joined(self.ranges):
            while nbytes:
                if not room:
                    host, room = next(pieces)
                size = min(nbytes, room)
                yield offset, host, size
                offset, nbytes = offset + size, nbytes - size
                host, room = host + _aligned(size), room - _aligned(size)

    def part(self, first: int, nbytes: int) -> Iterator[Run]:
        """Yield the parts of the runs that lie in these bytes of the tag."""
        for offset, host, size in self.runs():
            start, end = max(offset, first), min(offset + size, first + nbytes)
            if start < end:
                yield start, host + start - offset, end - start


def _aligned(nbytes: int) -> int:
    """Round up, so that every range is aligned for a tensor."""
    return round_up(nbytes, _ALIGNMENT)


View = Callable[[int, int], torch.Tensor]
"""``view(offset, nbytes)`` returns a uint8 tensor over these bytes of the tag."""

_WORD = 4
_BYTES = 1 << 62  # first number of single bytes, above all numbers of words


def fingerprint(ranges: Ranges, view: View) -> RowCopies:
    """Build one digest of all ranges, to be run repeatedly while their addresses are valid."""
    parts = (_parts(offset, view(offset, nbytes)) for offset, nbytes in joined(ranges))
    return digest_table([*itertools.chain.from_iterable(parts)])


def _parts(offset: int, data: torch.Tensor) -> list[tuple[torch.Tensor, int]]:
    """Split data into whole words and odd bytes, with the number of each part's first element."""
    words = data.numel() // _WORD * _WORD
    parts = [(data[:words].view(torch.int32), offset // _WORD)] if words else []
    return parts + ([(data[words:], _BYTES + offset + words)] if words < data.numel() else [])


@dataclass
class CleanCopy:
    """A backup that may still equal the content of its active tag."""

    backup: HostBackup | DiskBackup
    version: Hashable  # the owner's name for the content
    digest: RowCopies  # of the content, begun when it was copied
    copying: Waitable | None = None  # to wait for, while the copy is made
    _expected: int | None = None

    def finish(self) -> None:
        """Wait for the copy, which reads the tag's memory."""
        if self.copying is not None:
            self.copying.synchronize()
            self.copying = None

    def settle(self) -> None:
        """Wait for the copy and its digest."""
        self.finish()
        if self._expected is None:
            self._expected = self.digest.result()

    def begin_check(self, version: Hashable | None, content: str, committed: int) -> bool:
        """Return whether the copy may be the tag's content, and begin a digest for ``holds``.

        The owner says that the content has ``version`` (None: unknown). The wanted backup is of the
        kind ``content``, "host" or "disk". The tag's first ``committed`` bytes have memory.
        """
        kind = HostBackup if content == "host" else DiskBackup
        if version is None or version != self.version or not isinstance(self.backup, kind):
            return False
        if any(offset + nbytes > committed for offset, nbytes in self.backup.ranges):
            return False
        self.settle()
        self.digest.start()
        return True

    def holds(self, ranges: list[tuple[int, int]]) -> bool:
        """Return whether the device still has the copied bytes, by a digest of the ranges.

        So the copy is known to be current even if another process wrote without a notice.
        """
        return self.digest.result() == self._expected and tuple(ranges) == self.backup.ranges
