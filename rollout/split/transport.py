"""Transports that move keys and values from prefill ranks into the rings of decode ranks."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from memsaver import Lease, MemorySaver, attach

STAGING = "staging"  # tag of a shared ring


class Transport(ABC):
    """Base class of transports. Each rank owns one instance; all ranks use the same class.

    Decode ranks call `make_ring`, `expect` and `take`; prefill ranks call the other methods.
    """

    @abstractmethod
    def make_ring(self, nbytes: int, saver: MemorySaver) -> tuple[Tensor, Any]:
        """Allocate the ring of this decode rank, on the device of the decode engine's saver.

        Returns:
            The ring, uint8 [nbytes], and the ticket with which a prefill rank opens it.
        """

    def expect(self, peer: int) -> None:
        """Connect a prefill rank, which calls `open`; called in the order of prefill ranks."""
        return

    def take(self, peer: int, part: Tensor) -> None:
        """Receive announced bytes of a prefill rank into a part of the ring, on the current stream.

        Raises:
            RuntimeError: The peer is lost.
        """
        return

    @abstractmethod
    def open(self, peer: int, ring_bytes: int, ticket: Any, device: torch.device) -> None:
        """Open the ring of a decode rank, which calls `expect`.

        `ticket` comes from the rank's `make_ring`. The tensors that are sent are on `device`.
        """

    @abstractmethod
    def put(self, peer: int, staged: Tensor, offset: int) -> None:
        """Begin to send bytes to a decode rank's ring. The caller announces them afterwards.

        `staged` is uint8 and must not change until `settle`. `offset` is the first byte in the
        ring.

        Raises:
            RuntimeError: The peer does not accept them.
        """

    def settle(self, peer: int) -> None:
        """Wait until the tensor of the last `put` to a decode rank may be overwritten."""
        return

    def close(self) -> None:
        """Release the opened rings."""
        return


class MappedTransport(Transport):
    """Transport within a host: the ring is on a shared tag, which prefill ranks map and write."""

    def __init__(self) -> None:
        self._leases: list[Lease] = []
        self._rings: dict[int, Tensor] = {}

    def make_ring(self, nbytes: int, saver: MemorySaver) -> tuple[Tensor, Any]:
        ring = saver.empty(nbytes, torch.uint8, STAGING)
        return ring, (saver.share(STAGING, writable=True), saver.offset_of(ring))

    def open(self, peer: int, ring_bytes: int, ticket: Any, device: torch.device) -> None:
        share, offset = ticket
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            self._leases.append(attach(share))  # maps the ring for the GPU that copies
        self._rings[peer] = self._leases[-1].tensor((ring_bytes,), torch.uint8, offset)

    def put(self, peer: int, staged: Tensor, offset: int) -> None:
        ring = self._rings[peer]
        ring[offset : offset + len(staged)].copy_(staged)
        if ring.is_cuda:  # the peer reads as soon as the bytes are announced
            torch.cuda.current_stream(ring.device).synchronize()

    def close(self) -> None:
        self._rings.clear()  # these tensors would dangle once the leases end
        for lease in self._leases:
            lease.close()
        self._leases.clear()


class GroupTransport(Transport):
    """Transport over torch.distributed, within or between hosts."""

    def __init__(self, ranks: Sequence[int], group: dist.ProcessGroup | None = None) -> None:
        """Create this rank's end.

        Args:
            ranks: Ranks of the peer engine, numbered as in the default group.
            group: Group with all ranks of both engines; None for the default group.
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
        """Send one byte, so that NCCL connects the two ranks now.

        NCCL connects at the first exchange, in which both ranks have to take part. If that were
        `put`, this rank would wait alone, because the peer receives only after the announcement.
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
