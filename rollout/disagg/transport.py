"""Brings a prefill rank's bulk bytes into a decode rank's ring: one call, one copy or message."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kvcache.staging import StagingBuffer
from memsaver import Lease, MemorySaver, attach

STAGING = "staging"  # the ring's tag, where it is shared


class Writer(ABC):
    """A prefill rank's side. requests, nbytes: what was sent so far, of all peers."""

    def __init__(self) -> None:
        self.requests = self.nbytes = 0

    def put(self, peer: int, staged: Tensor, offset: int) -> None:
        """Begin to send uint8 `staged` to byte `offset` of the peer's ring, before the message that
        says so. It must stay as it is until `settle`. RuntimeError if the peer does not take it.
        """
        self.requests += 1
        self.nbytes += staged.numel()
        self._put(peer, staged, offset)

    @abstractmethod
    def open(self, peer: int, ring_bytes: int, ticket: Any, device: torch.device) -> None:
        """Get to know a peer's ring, while the peer opens this rank; data is on `device`."""

    @abstractmethod
    def _put(self, peer: int, staged: Tensor, offset: int) -> None: ...

    @abstractmethod
    def settle(self, peer: int) -> None:
        """Wait until what was last put to the peer may be overwritten."""

    @abstractmethod
    def close(self) -> None: ...


class Reader(ABC):
    """A decode rank's side."""

    @abstractmethod
    def ring(self, nbytes: int, saver: MemorySaver) -> tuple[Tensor, Any]:
        """The bytes, uint8, and what a writer needs to reach them."""

    def open(self, peer: int) -> None:
        """Get to know a peer that opens this rank's ring; in the order of peers, as they do."""
        return

    @abstractmethod
    def take(self, peer: int, part: Tensor) -> None:
        """Takes `part` of the ring, which the peer has said is written: it is, on the current
        stream, afterwards. RuntimeError if the peer is lost.
        """


class MappedReader(Reader):
    """The ring lies on a tag of the saver that prefill ranks on the same host map."""

    def ring(self, nbytes: int, saver: MemorySaver) -> tuple[Tensor, Any]:
        ring = saver.empty(nbytes, torch.uint8, STAGING)
        return ring, (saver.share(STAGING, writable=True), saver.offset_of(ring))

    def take(self, peer: int, part: Tensor) -> None:
        return


class MappedWriter(Writer):
    """Copies into the decode ranks' pages."""

    def __init__(self) -> None:
        super().__init__()
        self._leases: list[Lease] = []
        self._rings: dict[int, Tensor] = {}

    def open(self, peer: int, ring_bytes: int, ticket: Any, device: torch.device) -> None:
        share, offset = ticket
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            self._leases.append(attach(share))  # for this GPU, which copies
        self._rings[peer] = self._leases[-1].tensor((ring_bytes,), torch.uint8, offset)

    def _put(self, peer: int, staged: Tensor, offset: int) -> None:
        ring = self._rings[peer]
        ring[offset : offset + len(staged)].copy_(staged)
        if ring.is_cuda:  # the peer reads as soon as it is told
            torch.cuda.current_stream(ring.device).synchronize()

    def settle(self, peer: int) -> None:
        return

    def close(self) -> None:
        self._rings.clear()  # they dangle when the leases end
        for lease in self._leases:
            lease.close()
        self._leases.clear()


class GroupReader(Reader):
    """Receives over torch.distributed. ranks: the peers', in the default group's numbers."""

    def __init__(self, ranks: Sequence[int], group: dist.ProcessGroup | None = None) -> None:
        self._ranks, self._group = list(ranks), group

    def ring(self, nbytes: int, saver: MemorySaver) -> tuple[Tensor, Any]:
        self._ring = StagingBuffer(nbytes, saver.device).tensor
        return self._ring, None

    def open(self, peer: int) -> None:
        self.take(peer, self._ring[:1])

    def take(self, peer: int, part: Tensor) -> None:
        dist.recv(part, src=self._ranks[peer], group=self._group)


class GroupWriter(Writer):
    """Sends over torch.distributed; see `GroupReader`."""

    def __init__(self, ranks: Sequence[int], group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self._ranks, self._group = list(ranks), group
        self._sending: dict[int, dist.Work] = {}

    def open(self, peer: int, ring_bytes: int, ticket: Any, device: torch.device) -> None:
        """One byte: NCCL connects two ranks when they first exchange something, and both have to
        wait for it then. In `put` only this rank would, as the other one is told afterwards.
        """
        dist.send(
            torch.zeros(1, dtype=torch.uint8, device=device),
            dst=self._ranks[peer],
            group=self._group,
        )

    def _put(self, peer: int, staged: Tensor, offset: int) -> None:
        work = dist.isend(staged, dst=self._ranks[peer], group=self._group)
        assert work is not None
        self._sending[peer] = work

    def settle(self, peer: int) -> None:
        if work := self._sending.pop(peer, None):
            work.wait()

    def close(self) -> None:
        self._sending.clear()
