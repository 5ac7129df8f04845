"""The decode side: another engine computes the prompts, into a ring of each rank."""

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
from memsaver import StateError
from rollout.engine.engine import Engine
from rollout.errors import PeerLostError
from rollout.scheduling.prompt_source import PromptSource
from rollout.scheduling.samples import Chunk, Sample, Step
from rollout.split.control import Ask, Filled, First, Range, RankPeers, Refused, StagedCache
from rollout.split.transport import Transport

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
    """Counters of a `RemotePrompts` since the connection.

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


class RemotePrompts(PromptSource):
    """Prompts of one rank of an engine that a prefill engine computes, until `close`.

    A prompt is admitted with all its pages, computed by the prefill engine, and decoded here from
    its first token on. Tokens in the prefix cache are not requested. This engine computes a prompt
    itself if the prefill engine refuses it or has other weights.

    Args:
        engine: The engine that decodes.
        address: zmq endpoint of this rank, `tcp://host:port` or `ipc://path`.
        key: Secret that all ranks of both engines share.
        transport: Moves keys and values; the same class on all ranks.
        prefill_ranks: Number of ranks of the prefill engine, which connect now.
        ring_bytes: Size of the ring in bytes; longer prompts are sent in parts.
        on_loss: Reaction to the loss of a prefill rank. "recompute" computes pending and all later
            prompts here; "refuse" raises `PeerLostError` in each step until `close`.
        timeout: Seconds after which a prefill rank is lost if it is silent while prompts are
            pending, or accepts no message.
        connect_timeout: Seconds to wait for the prefill ranks.

    Attributes:
        inbox: Ring and open transfers of this rank.
        stats: Counters since the connection.

    Raises:
        TimeoutError: Not all prefill ranks connected with the same key.
        ValueError: The engines do not match, the ring is smaller than one token, or the cache is
            not plain full attention.
        StateError: The engine has another source of prompts.
    """

    overlap = False

    def __init__(
        self,
        engine: Engine,
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
        if type(engine.prompts) is not PromptSource:
            rule = f"the engine gets prompts from {type(engine.prompts).__name__}; close() it first"
            raise StateError(f"cannot connect: {rule}")
        cache = StagedCache.of(engine.model, engine.cache, engine.runner.ranks)
        ring, ticket = transport.make_ring(ring_bytes, engine.saver)
        hello = cache.greeting(ring_bytes=ring_bytes, ticket=ticket)
        listen = address, prefill_ranks
        self._peers = RankPeers("prefill", hello, key, timeout, connect_timeout, listen=listen)
        self.inbox = Inbox(cache, self._peers, transport, ring)
        self._engine, self._on_loss = engine, on_loss
        self.stats = SplitStats()
        self._idle = False  # whether the last step had nothing to compute
        self._done = 0  # transfers that are complete on all ranks
        engine.prompts = self

    def close(self) -> None:
        """Let the engine compute its prompts again, and announce the end to the prefill engine.

        Wait for the prefill engine to disconnect.
        """
        self._peers.end()
        self._detach("the connection is closed")

    def accept(self, samples: Sequence[Sample]) -> None:
        self._idle = False
        for sample in samples:
            # beam search needs the logits of the prompt in this process
            sample.remote = sample.beams is None

    def ask(self, step: Step) -> None:
        for chunk in step.arriving:
            self.inbox.ask(chunk)
        self._idle = not step.decode and not step.chunks

    # ---------------------------------------------------------------- arrivals

    def receive(self) -> None:
        """Handle messages, and start to decode the prompts that are complete on all ranks."""
        if self.refusal is not None:
            raise PeerLostError(self.refusal)
        engine, inbox = self._engine, self.inbox
        inbox.receive(_WAIT_SECONDS if self._idle else 0)
        loss, complete = engine.runner.ranks.agree(
            [self._peers.loss, self._done + inbox.arrived], engine.saver.device, "arrived prompts"
        )
        while self._done < complete:
            self._finish(inbox.transfers.pop(self._done))
            self._done += 1
        self.stats.rounds = inbox.allocator.watermark.round
        if loss < len(self._peers):
            self._peers.lose(loss, "is lost (reported by another rank)")
            self._continue_alone()

    def _finish(self, transfer: KVTransfer) -> None:
        if not transfer.wanted:
            return
        first, version = transfer.first, self._engine.weights_version
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
        scheduler = self._engine.scheduler
        scheduler.arrived(sample)
        self.stats.arrived += 1
        family = sample, *scheduler.fork_siblings(sample)
        for member, token, logprob in zip(family, first.tokens, first.logprobs, strict=True):
            scheduler.append(member, token, logprob, first.version)

    def _recompute(self, sample: Sample, reason: str) -> None:
        self._engine.scheduler.preempt(sample)
        self.stats.recomputed += 1
        self.stats.reason = reason

    def _continue_alone(self) -> None:
        """Disconnect from all prefill ranks after a loss, and recompute or refuse."""
        reason = self.stats.reason = f"the prefill engine is lost: {self._peers.lost}"
        self._peers.close()
        if self._on_loss == "refuse":
            self.refusal = reason
            raise PeerLostError(reason)
        self._detach(reason)

    def _detach(self, reason: str) -> None:
        """Let the engine compute its prompts again, pending ones included."""
        if self._engine.prompts is not self:
            return
        self._engine.prompts = PromptSource()
        for transfer in reversed(self.inbox.transfers.values()):
            if transfer.wanted:
                self._recompute(transfer.sample, reason)
        self.inbox.transfers.clear()
        for sample in self._engine.scheduler.waiting:
            sample.remote = False
