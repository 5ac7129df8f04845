"""A prefill rank's prompts on their way: once computed gathered, put into the decode ranks' rings,
told.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvcache import ReqHandle
from kvcache.allocators import to_device
from kvcache.ops import gather_staged, staged_bytes
from kvcache.staging import (
    StagingBuffer,
    Watermark,
    compute_head_slice_params,
    head_writers,
    may_fill,
)
from rollout.disagg.channel import Peers
from rollout.disagg.messages import Ask, Filled, First, Range, Refused
from rollout.disagg.transport import Writer
from rollout.serving.prefix import PrefixBlocks


@dataclass(frozen=True, kw_only=True)
class Slice:
    """Describes what this rank sends to one decode rank: its heads, how many of other writers lie
    before; and its staging.
    """

    start: int
    heads: int
    before: int
    buffer: StagingBuffer


@dataclass(kw_only=True)
class Parcel:
    """One prompt. asks: of every decode rank. handle: holds its pages until all is sent. first:
    None until it is computed. nth: next range, by rank.
    """

    asks: Sequence[Ask]
    handle: ReqHandle | None = None
    first: First | None = None
    refusal: str | None = None
    nth: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.nth = [0] * len(self.asks)


class Outbox:
    """First in, first out, refusals too: decode ranks assign ranges in the order of their requests,
    so that the first parcel's next range is always the oldest that is not freed, and will be ready.
    """

    def __init__(
        self,
        layers: tuple[Tensor, Tensor],
        heads: int,
        rank: int,
        size: int,
        peers: Peers,
        writer: Writer,
    ) -> None:
        """heads: KV heads of the whole model. rank, size: of this engine."""
        self._k, self._v = layers
        self._peers, self._writer = peers, writer
        self._queue: deque[Parcel] = deque()
        self.watermarks = [Watermark(0, 0)] * len(peers)
        self.sent = 0  # parcels
        self._slices: dict[int, Slice] = {}
        for peer, hello in enumerate(peers.hellos):
            start, count, _, _ = compute_head_slice_params(size, len(peers), rank, peer, heads)
            if count:
                writers = head_writers(size, len(peers), peer, heads)
                before = sum(each.num_heads for each in writers if each.src_tp_rank < rank)
                total = sum(each.num_heads for each in writers)
                buffer = StagingBuffer(hello.ring_bytes * count // total, self._k.device)
                self._slices[peer] = Slice(start=start, heads=count, before=before, buffer=buffer)
                # which copies into a ring that may be on another GPU
                with torch.cuda.device_of(self._k):
                    writer.open(peer, hello.ring_bytes, hello.ticket, self._k.device)

    def add(self, parcel: Parcel) -> None:
        self._queue.append(parcel)

    def send(self, blocks: PrefixBlocks) -> None:
        """Everything that is ready, in order; the pages of what is sent are free afterwards."""
        while self._queue and all(
            self._send_to(peer, self._queue[0], blocks) for peer in range(len(self._peers))
        ):
            self._release(self._queue.popleft(), blocks)
            self.sent += 1

    def clear(self, blocks: PrefixBlocks) -> None:
        """Forgets what is not sent."""
        while self._queue:
            self._release(self._queue.popleft(), blocks)

    def _release(self, parcel: Parcel, blocks: PrefixBlocks) -> None:
        if parcel.handle is not None:
            blocks.release(parcel.handle, parcel.asks[0].prompt)

    def _send_to(self, peer: int, parcel: Parcel, blocks: PrefixBlocks) -> bool:
        """Sends what it can; True when the peer has all of the parcel that this rank owes it."""
        ask = parcel.asks[peer]
        if parcel.refusal is not None:
            if not parcel.nth[peer]:
                self._peers.send(peer, Refused(number=ask.number, reason=parcel.refusal))
            parcel.nth[peer] = 1
            return True
        if parcel.first is None:
            return False
        part = self._slices.get(peer)
        while part is not None and parcel.nth[peer] < len(ask.ranges):
            at = ask.ranges[parcel.nth[peer]]
            if not may_fill(at.round, at.end, self.watermarks[peer]):
                return False
            self._put(peer, part, parcel, at, blocks)
            filled = Filled(number=ask.number, nth=parcel.nth[peer], first=parcel.first)
            self._peers.send(peer, filled)
            parcel.nth[peer] += 1
        return True

    def _put(self, peer: int, part: Slice, parcel: Parcel, at: Range, blocks: PrefixBlocks) -> None:
        """Gather this rank's heads of a range's tokens, and one bulk copy."""
        assert parcel.handle is not None
        slots = to_device(
            blocks.blocks.token_ids(parcel.handle, at.first, at.first + at.tokens), self._k.device
        )
        nbytes = staged_bytes(self._k, self._v, at.tokens, part.heads)
        self._writer.settle(peer)
        staged = part.buffer.view(0, nbytes)
        gather_staged(self._k, self._v, slots, part.start, part.heads, staged)
        before = staged_bytes(self._k, self._v, at.tokens, part.before)
        self._writer.put(peer, staged, at.offset + before)
