"""Content of a paused tag in host memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import torch

from memsaver.common.layout import Ranges, joined, round_up
from memsaver.common.signals import Finalizer
from memsaver.vmm.backend import Backend, Waitable
from memsaver.vmm.pinned_arena import HostArena

_ALIGNMENT = 64
Run = tuple[int, int, int]
"""(offset in the tag, host address, nbytes)"""


class HostBackup:
    """``ranges`` (offset, nbytes) of a tag, packed into pieces of the host arena, for its life."""

    def __init__(self, ranges: Ranges, arena: HostArena) -> None:
        self.ranges = tuple(ranges)
        self.nbytes = sum(nbytes for _, nbytes in ranges)
        self._pieces = arena.take(sum(_aligned(nbytes) for _, nbytes in joined(ranges)))
        self.host_bytes, self.disk_bytes = self.nbytes, 0
        Finalizer(self, arena.give, self._pieces)

    def save(self, backend: Backend, base: int) -> None:
        """Copies from the tag, whose arena begins at ``base``; returns when it is done."""
        backend.copy(self._out(base))

    def start_save(
        self, backend: Backend, base: int, done: Callable[[float], None]
    ) -> Waitable | None:
        """Saves after what the current stream has queued; done: see `Backend.copy_beside`."""
        return backend.copy_beside(self._out(base), self, done)

    def fill(self, backend: Backend, base: int, at: int, nbytes: int) -> Waitable | None:
        """Start to bring back what lies in these bytes of the tag, which have just been mapped."""
        transfers = [(base + offset, host, size) for offset, host, size in self.part(at, nbytes)]
        return backend.start_copy(transfers, inward=True)

    def restore(self, backend: Backend, base: int, end: int) -> None:
        """Nothing is left to do: ``fill`` has brought it."""

    def views(self, offset: int, nbytes: int) -> list[torch.Tensor]:
        """uint8 tensors over the saved bytes from ``offset`` on; good while this backup lives."""
        found = joined([(host, size) for _, host, size in self.part(offset, nbytes)])
        return [_view(address, size, self) for address, size in found]

    def _out(self, base: int) -> list[tuple[int, int, int]]:
        return [(host, base + offset, nbytes) for offset, host, nbytes in self.runs()]

    def runs(self) -> Iterator[Run]:
        """Yields runs, contiguous in the tag and in one piece of the arena, in order of the tag."""
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
        """Yields what of the runs lies in these bytes of the tag."""
        for offset, host, size in self.runs():
            start, end = max(offset, first), min(offset + size, first + nbytes)
            if start < end:
                yield start, host + start - offset, end - start


def _aligned(nbytes: int) -> int:
    """Rounds up so that every range begins where a tensor may."""
    return round_up(nbytes, _ALIGNMENT)


def _view(address: int, nbytes: int, owner: object) -> torch.Tensor:
    buffer = (ctypes.c_char * nbytes).from_address(address)
    # The memory stays as long as a tensor looks at it.
    buffer.owner = owner  # type: ignore[attr-defined]
    return torch.frombuffer(buffer, dtype=torch.uint8)
