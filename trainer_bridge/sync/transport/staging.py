"""Memory that a message is packed into and unpacked from, and the tables that do it."""

from collections.abc import Collection, Mapping
from itertools import chain

import torch
from torch import Tensor

from trainer_bridge.sync.boxes import torch_dtype
from trainer_bridge.sync.cast_copy import CastCopy, placements
from trainer_bridge.sync.lora_merge import DerivedCopies, LowRank
from trainer_bridge.sync.transport.messages import Message


class Buffer:
    """stage: uint8 where the kernels are. wire: as long, where messages travel; the same memory if
    that is one device, otherwise pinned.
    """

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
        """Starts to pack on the current stream.

        Derived parameters wait, and make their tables anew: scratch of one message.
        """
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
