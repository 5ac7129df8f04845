"""The decode side: an engine whose prompts a prefill engine computes into each rank's ring."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

import torch
from torch import Tensor

from kvcache import ReqHandle
from kvcache.ops import Writers, scatter_staged
from kvcache.staging import StagingAllocator, head_writers
from rollout.disagg.control import Ask, Filled, First, Range, RankPeers, Refused, StagedCache
from rollout.disagg.transport import Transport
from rollout.engine import Engine, Launched
from rollout.errors import PeerLostError
from rollout.serving.samples import Chunk, Sample, Step

_WAIT_SECONDS = 0.05  # wait for messages when there is nothing to decode
_ALIGNMENT = 256  # alignment of ranges in the ring, in bytes

OnLoss = Literal["recompute", "refuse"]


@dataclass(eq=False, kw_only=True)
class KVTransfer:
    """Keys and values of a sample's prompt on their way into KV slots."""

    sample: Sample
    handle: ReqHandle | None  # of its pages at the request; the sample may lose them later
    slots: Tensor  # for tokens `start` and following, int64
    start: int  # first transferred token; the prefix cache has the tokens before it
    ranges: tuple[Range, ...]
    waiting: list[int]  # number of writers that each range still waits for
    first: First | None = None  # set once a rank has announced a range
    refusal: str | None = None  # reason of a prefill rank for not computing the prompt

    @property
    def wanted(self) -> bool:
        """Return whether the sample still waits for its original pages: no abort, no preemption."""
        return self.sample.remote and self.sample.handle is self.handle

    @property
    def complete(self) -> bool:
        return self.refusal is not None or not any(self.waiting)


class Inbox:
    """A decode rank's ring and the prompts that it has requested.

    `transfers` are the open transfers by request number; all ranks of the engine have the same
    order.
    """

    def __init__(
        self, cache: StagedCache, peers: RankPeers, transport: Transport, ring: Tensor
    ) -> None:
        """Connect every prefill rank that sends to this one.

        `ring` is uint8, on the device of the cache.

        Raises:
            ValueError: The ring is smaller than one token.
        """
        self._cache = cache
        self._peers, self._transport, self._ring = peers, transport, ring
        writers = head_writers(len(peers), cache.size, cache.rank, cache.heads)
        self._slices = {part.src_tp_rank: part for part in writers}
        self._writers = Writers.of(
            [(part.dst_head_start, part.num_heads) for part in writers], ring.device
        )
        self.allocator = StagingAllocator(len(ring), _ALIGNMENT)
        self.transfers: dict[int, KVTransfer] = {}
        self._last_heard = time.monotonic()
        self._next_number = 0
        self._ring_tokens = len(ring) // cache.nbytes(1, self._writers.total)
        if not self._ring_tokens:
            raise ValueError(f"ring_bytes={len(ring)} does not hold one token; raise it")
        for peer in self._slices:
            transport.expect(peer)

    def ask(self, chunk: Chunk) -> None:
        """Assign ranges for the uncached rest of a prompt, and request it of all prefill ranks."""
        sample, end = chunk.sample, chunk.start + chunk.length
        ranges = tuple(
            self._assign(first, min(self._ring_tokens, end - first))
            for first in range(chunk.start, end, self._ring_tokens)
        )
        self.transfers[self._next_number] = KVTransfer(
            sample=sample,
            handle=sample.handle,
            slots=chunk.slots,
            start=chunk.start,
            ranges=ranges,
            waiting=[len(self._slices)] * len(ranges),
        )
        ask = Ask(
            number=self._next_number,
            prompt=sample.tokens(0, end),
            params=sample.params,
            seed=sample.seed,
            indices=(sample.index, *(sibling.index for sibling in sample.siblings)),
            ranges=ranges,
        )
        self._next_number += 1
        self._peers.send_all(ask)

    def _assign(self, first: int, tokens: int) -> Range:
        nbytes = self._cache.nbytes(tokens, self._writers.total)
        assigned = self.allocator.assign(nbytes)
        assert assigned is not None, "ranges are split to fit"
        id, offset, round = assigned
        return Range(
            first=first, tokens=tokens, id=id, offset=offset, end=offset + nbytes, round=round
        )

    @property
    def arrived(self) -> int:
        """Count the complete transfers before the first incomplete one."""
        return sum(
            1 for _ in takewhile(lambda transfer: transfer.complete, self.transfers.values())
        )

    def receive(self, seconds: float) -> None:
        """Handle queued messages, waiting up to `seconds` for the first.

        If transfers are open and no prefill rank sends anything for the timeout, a rank is lost.
        """
        if not self.transfers:
            self._last_heard = time.monotonic()
        for peer, message in self._peers.receive(seconds):
            assert isinstance(message, Filled | Refused)
            self._last_heard = time.monotonic()
            transfer = self.transfers.get(message.number)
            if transfer is None:
                continue  # finished already, because another rank refused the prompt
            if isinstance(message, Refused):
                if transfer.refusal is None:
                    transfer.refusal = message.reason
                    self._free(transfer, *range(len(transfer.ranges)))
            else:
                self._filled(peer, transfer, message)
        if time.monotonic() - self._last_heard > self._peers.timeout:
            self._peers.lose(0, f"or another rank sent nothing for {self._peers.timeout:g} s")

    def _filled(self, peer: int, transfer: KVTransfer, message: Filled) -> None:
        at, part = transfer.ranges[message.nth], self._slices[peer]
        begin = at.offset + self._cache.nbytes(at.tokens, part.dst_head_start)
        nbytes = self._cache.nbytes(at.tokens, part.num_heads)
        try:
            self._transport.take(peer, self._ring[begin : begin + nbytes])
        except RuntimeError as error:
            self._peers.lose(peer, f"is gone ({error})")
            return
        transfer.first = message.first
        transfer.waiting[message.nth] -= 1
        if not transfer.waiting[message.nth]:
            if transfer.wanted:
                self._scatter(transfer, at)
            self._free(transfer, message.nth)

    def _scatter(self, transfer: KVTransfer, at: Range) -> None:
        slots = transfer.slots[at.first - transfer.start :][: at.tokens]
        scatter_staged(
            self._ring[at.offset : at.end], self._cache.k, self._cache.v, slots, self._writers
        )
        if self._ring.is_cuda:  # a writer may reuse the range once it is freed
            torch.cuda.current_stream(self._ring.device).synchronize()

    def _free(self, transfer: KVTransfer, *nth: int) -> None:
        for index in nth:
            self.allocator.free(transfer.ranges[index].id)
        self._peers.send_all(self.allocator.watermark)


@dataclass(kw_only=True)
class SplitStats:
    """Counters of a decode engine since `connect`.

    Attributes:
        arrived: Prompts that the prefill engine computed.
        recomputed: Prompts that were requested but computed here, because the prefill engine
            refused them, had other weights or was lost.
        reason: Reason for the last recomputed prompt or for the loss; None if neither occurred.
        rounds: Times that allocation in the ring wrapped around.
    """

    arrived: int = 0
    recomputed: int = 0
    reason: str | None = None
    rounds: int = 0


class DecodeEngine(Engine):
    """One rank of the decode side: `connect`, then `generate` as with any engine, then `close`.

    A prompt is admitted with all its pages, computed by the prefill engine, and decoded here from
    its first token on. Tokens in the prefix cache are not requested. This engine computes a prompt
    itself if the prefill engine refuses it or has other weights.

    Attributes:
        inbox: Ring and open transfers of this rank.
        split: Counters since `connect`.
    """

    def connect(
        self,
        address: str,
        key: bytes,
        transport: Transport,
        *,
        prefill_ranks: int,
        ring_bytes: int,
        on_loss: OnLoss = "recompute",
        timeout: float = 60.0,
        connect_timeout: float = 600.0,
    ) -> None:
        """Listen for all prefill ranks, and exchange greetings.

        Args:
            address: zmq endpoint of this rank, `tcp://host:port` or `ipc://path`.
            key: Secret that all ranks of both engines share.
            transport: Moves keys and values; the same class on all ranks.
            prefill_ranks: Number of ranks of the prefill engine.
            ring_bytes: Size of the ring in bytes; longer prompts are sent in parts.
            on_loss: Reaction to the loss of a prefill rank. "recompute" computes pending and all
                later prompts here; "refuse" raises `PeerLostError`, and later calls of `generate`
                are refused.
            timeout: Seconds after which a prefill rank is lost if it is silent while prompts are
                pending, or accepts no message.
            connect_timeout: Seconds to wait for the prefill ranks.

        Raises:
            TimeoutError: Not all prefill ranks connected with the same key.
            ValueError: The engines do not match, the ring is smaller than one token, or the cache
                is not plain full attention.
        """
        cache = StagedCache.of(self.model, self.cache, self._ranks)
        ring, ticket = transport.make_ring(ring_bytes, self.saver)
        hello = cache.greeting(ring_bytes=ring_bytes, ticket=ticket)
        listen = address, prefill_ranks
        self._peers = RankPeers("prefill", hello, key, timeout, connect_timeout, listen=listen)
        self.inbox = Inbox(cache, self._peers, transport, ring)
        self._on_loss = on_loss
        self.split = SplitStats()
        self._remote = True  # whether the prefill engine computes prompts; equal on all ranks
        self._idle = False
        self._done = 0  # transfers that are complete on all ranks

    def close(self) -> None:
        """Announce the end to the prefill engine, and wait for it to disconnect."""
        self._peers.end()

    def unavailable_reason(self) -> str | None:
        """Return why this engine cannot generate, or None.

        With `on_loss="refuse"`, the loss of a prefill rank is a reason too.

        Returns:
            The reasons, joined by "; "; None if there is none.
        """
        lost = self.split.reason if not self._remote and self._on_loss == "refuse" else None
        return "; ".join(filter(None, (super().unavailable_reason(), lost))) or None

    def _mark(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            # beam search needs the logits of the prompt in this process
            sample.remote = self._remote and sample.beams is None

    def _step(self) -> None:
        self._require_current()  # before transfers are written into the pages
        if self._remote:
            self._receive()
        super()._step()

    def _launch(self, step: Step) -> Launched | None:
        for chunk in step.arriving:
            self.inbox.ask(chunk)
        self._idle = not step.decode and not step.chunks
        return None if self._idle else super()._launch(step)

    # ---------------------------------------------------------------- arrivals

    def _receive(self) -> None:
        """Handle messages, and start to decode the prompts that are complete on all ranks."""
        inbox = self.inbox
        inbox.receive(_WAIT_SECONDS if self._idle else 0)
        loss, complete = self._ranks.agree(
            [self._peers.loss, self._done + inbox.arrived], self.saver.device, "arrived prompts"
        )
        while self._done < complete:
            self._finish(inbox.transfers.pop(self._done))
            self._done += 1
        self.split.rounds = inbox.allocator.watermark.round
        if loss < len(self._peers):
            self._peers.lose(loss, "is lost (reported by another rank)")
            self._continue_alone()

    def _finish(self, transfer: KVTransfer) -> None:
        if not transfer.wanted:
            return
        first, version = transfer.first, self.weights_version
        if first is None:
            self._recompute(transfer.sample, f"refused: {transfer.refusal}")
        elif first.version != version:
            self._recompute(
                transfer.sample,
                f"the prefill engine has weights {first.version}, this one {version}",
            )
        else:
            self._begin(transfer.sample, first)

    def _begin(self, sample: Sample, first: First) -> None:
        self.scheduler.arrived(sample)
        self.split.arrived += 1
        for member, token, logprob in zip(
            self._prefilled(sample), first.tokens, first.logprobs, strict=True
        ):
            self.scheduler.append(member, token, logprob, first.version)

    def _recompute(self, sample: Sample, reason: str) -> None:
        self.scheduler.preempt(sample)
        self.split.recomputed += 1
        self.split.reason = reason

    def _continue_alone(self) -> None:
        """Disconnect from all prefill ranks after a loss, and recompute or refuse."""
        reason = f"the prefill engine is lost: {self._peers.lost}"
        self._remote, self.split.reason = False, reason
        self._peers.close()
        if self._on_loss == "refuse":
            raise PeerLostError(reason)
        for transfer in reversed(self.inbox.transfers.values()):
            if transfer.wanted:
                self._recompute(transfer.sample, reason)
        self.inbox.transfers.clear()
        for sample in self.scheduler.waiting:
            sample.remote = False
