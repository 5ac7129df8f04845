"""Copies of a plan packed in messages of bounded size.

Pure: sender and receiver make the same ones.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from memsaver.common.strided import row_major
from rollout.types import PackedBox
from trainer_bridge.sync.plan import Copy

_ALIGNMENT = 16  # of a box in a message: what the kernels like


class Packed(NamedTuple):
    """A copy, or a part of one; its elements lie row-major from byte `at` of the message."""

    copy: Copy
    at: int

    @property
    def packing(self) -> Copy:
        """The copy from the shard into the message."""
        return replace(self.copy, offset=self.at, strides=row_major(self.copy.shape))

    @property
    def unpacking(self) -> Copy:
        """The copy from a tensor of its shape into the target."""
        return replace(self.copy, start=(0,) * len(self.copy.shape))

    @property
    def box(self) -> PackedBox:
        """Returns what a handle takes."""
        copy = self.copy
        return PackedBox(
            at=self.at,
            offset=copy.offset,
            shape=copy.shape,
            strides=copy.strides,
            itemsize=copy.itemsize,
        )


class Message(NamedTuple):
    """A message from `rank`, for `target`. nbytes: with the gaps between boxes."""

    rank: int
    target: int
    pieces: tuple[Packed, ...]
    nbytes: int


def messages(copies: Iterable[Copy], limit: int) -> list[Message]:
    """Packs `copies` in order: each message of one rank and target, at most `limit` bytes long."""
    made: list[Message] = []
    pieces: list[Packed] = []
    end = 0
    for copy in copies:
        for part in parts(copy, limit):
            at = -(-end // _ALIGNMENT) * _ALIGNMENT
            last = pieces[-1].copy if pieces else part
            if pieces and (
                (last.rank, last.target) != (part.rank, part.target) or at + part.nbytes > limit
            ):
                made.append(Message(last.rank, last.target, tuple(pieces), end))
                pieces, at = [], 0
            pieces.append(Packed(part, at))
            end = at + part.nbytes
    if pieces:
        made.append(Message(pieces[-1].copy.rank, pieces[-1].copy.target, tuple(pieces), end))
    return made


def parts(copy: Copy, limit: int) -> Iterator[Copy]:
    """Yields the copy as boxes of at most `limit` bytes: rows together, or parts of a row that is
    larger than that.
    """
    if copy.nbytes <= limit:
        yield copy
        return
    if limit < copy.itemsize:
        raise ValueError(f"a message of {limit} bytes holds no element of {copy.dtype}; allow more")
    dim = next(dim for dim, size in enumerate(copy.shape) if size > 1)
    each = max(1, limit // (copy.nbytes // copy.shape[dim]))
    for first in range(0, copy.shape[dim], each):
        yield from parts(copy.part(dim, first, min(each, copy.shape[dim] - first)), limit)
