"""The ways on which keys and values go from prefill ranks into the rings of decode ranks."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from memsaver import Lease, MemorySaver, attach

STAGING = "staging"  # the tag of a ring that is shared


class Transport(ABC):
    """One way of bulk bytes; every rank has an object of its own, of the same class.

    A decode rank calls `make_ring`, `expect` and `take`, a prefill rank the others.
    """

    @abstractmethod
    def make_ring(self, nbytes: int, saver: MemorySaver) -> tuple[Tensor, Any]:
        """Return a ring, uint8, and the ticket with which a prefill rank opens it."""

    def expect(self, peer: int) -> None:
        """Let a prefill rank open the ring; in the order of ranks, as prefill ranks do."""
        return

    def take(self, peer: int, part: Tensor) -> None:
        """Have the bytes in `part` of the ring that the peer has announced, on the current stream.

        Raises:
            RuntimeError: The peer is lost.
        """
        return

    @abstractmethod
    def open(self, peer: int, ring_bytes: int, ticket: Any, device: torch.device) -> None:
        """Open the ring of a decode rank, which expects it; what is sent lies on `device`."""

    @abstractmethod
    def put(self, peer: int, staged: Tensor, offset: int) -> None:
        """Begin to send uint8 `staged` to byte `offset` of the peer's ring; announce it afterwards.

        `staged` must not change until `settle`.

        Raises:
            RuntimeError: The peer does not take it.
        """

    def settle(self, peer: int) -> None:
        """Wait until what was last put to the peer may be overwritten."""
        return

    def close(self) -> None:
        """Give the opened rings up."""
        return


class MappedTransport(Transport):
    """The ring lies on a tag of the decode rank's saver; prefill ranks of its host map it."""

    def __init__(self) -> None:
        self._leases: list[Lease] = []
        self._rings: dict[int, Tensor] = {}

    def make_ring(self, nbytes: int, saver: MemorySaver) -> tuple[Tensor, Any]:
        ring = saver.empty(nbytes, torch.uint8, STAGING)
        return ring, (saver.share(STAGING, writable=True), saver.offset_of(ring))

    def open(self, peer: int, ring_bytes: int, ticket: Any, device: torch.device) -> None:
        share, offset = ticket
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            self._leases.append(attach(share))  # for this GPU, which copies
        self._rings[peer] = self._leases[-1].tensor((ring_bytes,), torch.uint8, offset)

    def put(self, peer: int, staged: Tensor, offset: int) -> None:
        ring = self._rings[peer]
        ring[offset : offset + len(staged)].copy_(staged)
        if ring.is_cuda:  # the peer reads as soon as it is told
            torch.cuda.current_stream(ring.device).synchronize()

    def close(self) -> None:
        self._rings.clear()  # they dangle when the leases end
        for lease in self._leases:
            lease.close()
        self._leases.clear()


class GroupTransport(Transport):
    """Sends and receives over torch.distributed."""

    def __init__(self, ranks: Sequence[int], group: dist.ProcessGroup | None = None) -> None:
        """Create this rank's end.

        Args:
            ranks: The peers, in the default group's numbers.
            group: A group that has all ranks of both engines; None: the default one.
        """
        self._ranks, self._group = list(ranks), group
        self._sending: dict[int, dist.Work] = {}

    def make_ring(self, nbytes: int, saver: MemorySaver) -> tuple[Tensor, Any]:
        self._ring = torch.empty(nbytes, dtype=torch.uint8, device=saver.device)
        return self._ring, None

    def expect(self, peer: int) -> None:
        self.take(peer, self._ring[:1])

    def take(self, peer: int, part: Tensor) -> None:
        dist.recv(part, src=self._ranks[peer], group=self._group)

    def open(self, peer: int, ring_bytes: int, ticket: Any, device: torch.device) -> None:
        """Send one byte: NCCL connects two ranks when they first exchange something, and both have
        to wait for it then. In `put` only this rank would, as the peer is told afterwards.
        """
        byte = torch.zeros(1, dtype=torch.uint8, device=device)
        dist.send(byte, dst=self._ranks[peer], group=self._group)

    def put(self, peer: int, staged: Tensor, offset: int) -> None:
        work = dist.isend(staged, dst=self._ranks[peer], group=self._group)
        assert work is not None
        self._sending[peer] = work

    def settle(self, peer: int) -> None:
        if work := self._sending.pop(peer, None):
            work.wait()

    def close(self) -> None:
        self._sending.clear()
