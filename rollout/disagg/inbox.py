"""A decode rank's ring: who was promised which bytes, what has come, and for which slots."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import takewhile

import torch
from torch import Tensor

from kvcache.ops import Writers, scatter_staged, staged_bytes
from kvcache.staging import StagingAllocator, head_writers
from rollout.disagg.channel import Peers
from rollout.disagg.messages import Ask, Filled, First, Freed, Range, Refused
from rollout.disagg.transport import Reader
from rollout.serving.samples import Chunk, Sample

_ALIGNMENT = 256  # bytes, of ranges in the ring


@dataclass(eq=False, kw_only=True)
class Transfer:
    """The prompt of `sample` on its way into `slots`.

    waiting: for each range how many writers are missing.
    """

    sample: Sample
    number: int
    slots: Tensor
    start: int
    ranges: list[Range]
    ids: list[int]
    waiting: list[int]
    first: First | None = None
    refusal: str | None = None
    _handle: object = field(init=False)

    def __post_init__(self) -> None:
        self._handle = self.sample.handle

    @property
    def wanted(self) -> bool:
        """Tells whether the sample still waits in the pages that it had then: not aborted,
        preempted or recomputed.
        """
        return self.sample.remote and self.sample.handle is self._handle

    @property
    def complete(self) -> bool:
        return self.refusal is not None or not any(self.waiting)


class Inbox:
    """Order of `transfers` is that of requests, the same on all ranks of the engine."""

    def __init__(
        self,
        layers: tuple[Tensor, Tensor],
        heads: int,
        rank: int,
        size: int,
        peers: Peers,
        reader: Reader,
        ring: Tensor,
    ) -> None:
        """heads: KV heads of the whole model. rank, size: of this engine. ring: uint8."""
        self._k, self._v = layers
        self._peers, self._reader, self._ring = peers, reader, ring
        self._slices = {
            each.src_tp_rank: each for each in head_writers(len(peers), size, rank, heads)
        }
        self._writers = Writers.of(
            [(each.dst_head_start, each.num_heads) for each in self._slices.values()], ring.device
        )
        self.allocator = StagingAllocator(len(ring), _ALIGNMENT)
        self.transfers: deque[Transfer] = deque()
        self.heard = False
        self._numbers = 0
        self._fits = len(ring) // staged_bytes(self._k, self._v, 1, self._writers.total)  # tokens
        if not self._fits:
            raise ValueError(f"ring_bytes={len(ring)} does not hold one token; raise it")
        for peer in self._slices:
            reader.open(peer)

    def ask(self, chunk: Chunk) -> None:
        """Promise ranges for the rest of a prompt, and ask all prefill ranks for it."""
        sample, end = chunk.sample, chunk.start + chunk.length
        ranges, ids = [], []
        for first in range(chunk.start, end, self._fits):
            tokens = min(self._fits, end - first)
            nbytes = staged_bytes(self._k, self._v, tokens, self._writers.total)
            assigned = self.allocator.assign(nbytes)
            assert assigned is not None, "ranges are cut to fit"
            ids.append(assigned.id)
            ranges.append(
                Range(
                    first=first,
                    tokens=tokens,
                    offset=assigned.offset,
                    nbytes=nbytes,
                    round=assigned.round,
                )
            )
        waiting = [len(self._slices)] * len(ranges)
        self.transfers.append(
            Transfer(
                sample=sample, number=self._numbers, slots=chunk.slots, start=chunk.start,
                ranges=ranges, ids=ids, waiting=waiting,
            )
        )  # fmt: skip
        ask = Ask(
            number=self._numbers,
            prompt=sample.tokens(0, end),
            params=sample.params,
            seed=sample.seed,
            indices=(sample.index, *(each.index for each in sample.siblings)),
            ranges=tuple(ranges),
        )
        self._numbers += 1
        self._peers.send_all(ask)

    @property
    def arrived(self) -> int:
        """Counts the transfers that are complete, up to the first that is not: ranks hear of later
        ones in any order.
        """
        return sum(1 for _ in takewhile(lambda each: each.complete, self.transfers))

    def receive(self, seconds: float) -> None:
        """Everything that has come; waits for the first of it for so long. `heard`: whether
        anything has.
        """
        self.heard = False
        for peer, message in self._peers.receive(seconds):
            assert isinstance(message, Filled | Refused)
            self.heard = True
            nth = message.number - (self._numbers - len(self.transfers))
            if nth < 0:
                continue  # refused by another rank before, and done with
            transfer = self.transfers[nth]
            if isinstance(message, Refused):
                if transfer.refusal is None:
                    transfer.refusal = message.reason
                    self._free(transfer, *range(len(transfer.ranges)))
            else:
                self._filled(peer, transfer, message)

    def _filled(self, peer: int, transfer: Transfer, message: Filled) -> None:
        at, part = transfer.ranges[message.nth], self._slices[peer]
        before = sum(each.num_heads for each in self._slices.values() if each.src_tp_rank < peer)
        begin = staged_bytes(self._k, self._v, at.tokens, before)
        nbytes = staged_bytes(self._k, self._v, at.tokens, part.num_heads)
        try:
            self._reader.take(peer, self._ring[at.offset + begin : at.offset + begin + nbytes])
        except RuntimeError as error:
            self._peers.lose(peer, f"is gone ({error})")
            return
        transfer.first = message.first
        transfer.waiting[message.nth] -= 1
        if not transfer.waiting[message.nth]:
            if transfer.wanted:
                self._scatter(transfer, at)
            self._free(transfer, message.nth)

    def _scatter(self, transfer: Transfer, at: Range) -> None:
        slots = transfer.slots[at.first - transfer.start :][: at.tokens]
        scatter_staged(self._ring[at.offset : at.end], self._k, self._v, slots, self._writers)
        if self._ring.is_cuda:  # the writers must not overtake it
            torch.cuda.current_stream(self._ring.device).synchronize()

    def _free(self, transfer: Transfer, *nth: int) -> None:
        for each in nth:
            self.allocator.free(transfer.ids[each])
        self._peers.send_all(Freed(watermark=self.allocator.watermark))
