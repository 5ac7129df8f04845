"""Copies of a plan packed in messages of bounded size, and the memory and tables that do it."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from memsaver.common.layout import row_major
from rollout.types import PackedBox
from trainer_bridge.sync.boxes import torch_dtype
from trainer_bridge.sync.cast_copy import CastCopy, placements
from trainer_bridge.sync.lora_merge import DerivedCopies, LowRank
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
    """Yields boxes of at most `limit` bytes: rows together, or parts of a longer row."""
    if copy.nbytes <= limit:
        yield copy
        return
    if limit < copy.itemsize:
        raise ValueError(f"a message of {limit} bytes holds no element of {copy.dtype}; allow more")
    dim = next(dim for dim, size in enumerate(copy.shape) if size > 1)
    each = max(1, limit // (copy.nbytes // copy.shape[dim]))
    for first in range(0, copy.shape[dim], each):
        yield from parts(copy.part(dim, first, min(each, copy.shape[dim] - first)), limit)


class Buffer:
    """stage: uint8 where the kernels are. wire: where messages travel, the same or pinned."""

    def __init__(self, nbytes: int, device: torch.device, wire: torch.device) -> None:
        self.stage = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.wire = self.stage
        if wire.type != device.type:
            self.wire = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def send(self, nbytes: int) -> None:
        """Sends what is staged to the wire; waits, where that is another device."""
        if self.wire is not self.stage:
            self.wire[:nbytes].copy_(self.stage[:nbytes])

    def arrived(self, nbytes: int) -> None:
        if self.wire is not self.stage:
            self.stage[:nbytes].copy_(self.wire[:nbytes])


class Packing:
    """Casts the pieces of one message from the shards into any stage."""

    def __init__(
        self, message: Message, sources: Mapping[str, Tensor], derived: Collection[str]
    ) -> None:
        self.message = message
        self._sources = sources
        copies = [piece.packing for piece in message.pieces]
        plain = [copy for copy in copies if copy.name not in derived]
        self._derived = [copy for copy in copies if copy.name in derived]
        places = (placements(copy, sources[copy.name]) for copy in plain)
        self._cast = CastCopy(list(chain.from_iterable(places)))
        self._extra = 0
        self.nbytes = sum(copy.nbytes for copy in copies)  # without the gaps

    def start(self, stage: Tensor, factors: Mapping[str, LowRank]) -> None:
        """Packs on the current stream; derived parameters wait, and make their tables anew."""
        self._cast.start(stage)
        self._extra = 0
        if self._derived:
            made = DerivedCopies(self._derived, self._sources)
            made.start({self.message.target: stage}, factors)
            self._extra = made.digests()[self.message.target]

    def digest(self) -> int:
        """Returns the digest of what the last start packed; waits."""
        return self._cast.result() + self._extra


def unpacking(message: Message, stage: Tensor) -> CastCopy:
    """Makes what copies the pieces of one message from one stage into a target's pages."""
    places = []
    for piece in message.pieces:
        copy, packed = piece.unpacking, stage[piece.at : piece.at + piece.copy.nbytes]
        places += placements(copy, packed.view(torch_dtype(copy.dtype)).view(copy.shape))
    return CastCopy(places)
