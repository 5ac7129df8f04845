"""The decode side: an engine whose prompts are computed elsewhere, or here when that fails; and
each rank's ring: who was promised which bytes, what has come, and for which slots.
"""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from kvcache.ops import Writers, scatter_staged, staged_bytes
from kvcache.staging import StagingAllocator, StagingBuffer, head_writers, heads_per_rank
from memsaver import MemorySaver
from rollout.disagg.line import (
    Ask,
    Filled,
    First,
    Freed,
    Hello,
    Line,
    Peers,
    Range,
    Refused,
    geometry,
    kv_heads,
    staged_layers,
)
from rollout.engine import Engine
from rollout.serving.samples import Chunk, Sample, Step
from rollout.types import PeerLostError, SamplingParams

_WAIT_SECONDS = 0.05  # for messages, when there is nothing to decode

OnLoss = Literal["recompute", "refuse"]
_ALIGNMENT = 256  # bytes, of ranges in the ring
STAGING = "staging"  # the ring's tag, where it is shared


class Reader(ABC):
    """A decode rank's side of what brings bulk bytes into its ring."""

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


@dataclass(eq=False, kw_only=True)
class KVTransfer:
    """The prompt of `sample` on its way into `slots`. waiting: writers missing, by range."""

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
        """Tells whether the sample still waits in those pages: not aborted or preempted."""
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
        self.transfers: deque[KVTransfer] = deque()
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
            KVTransfer(
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
        """Counts the complete transfers, up to the first that is not: ranks agree on these."""
        return sum(1 for _ in takewhile(lambda each: each.complete, self.transfers))

    def receive(self, seconds: float) -> None:
        """Takes what has come; waits so long for the first of it. `heard`: something has."""
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

    def _filled(self, peer: int, transfer: KVTransfer, message: Filled) -> None:
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

    def _scatter(self, transfer: KVTransfer, at: Range) -> None:
        slots = transfer.slots[at.first - transfer.start :][: at.tokens]
        scatter_staged(self._ring[at.offset : at.end], self._k, self._v, slots, self._writers)
        if self._ring.is_cuda:  # the writers must not overtake it
            torch.cuda.current_stream(self._ring.device).synchronize()

    def _free(self, transfer: KVTransfer, *nth: int) -> None:
        for each in nth:
            self.allocator.free(transfer.ids[each])
        self._peers.send_all(Freed(watermark=self.allocator.watermark))


@dataclass(kw_only=True)
class SplitStats:
    """Counts since `connect`. arrived: prompts that came. recomputed: prompts that were refused or
    lost, and computed here. reason: of the last. rounds: times that the ring began anew.
    """

    arrived: int = 0
    recomputed: int = 0
    reason: str | None = None
    rounds: int = 0


class DecodeEngine(Engine):
    """One rank of the decode side: `connect`, then `generate` as of any engine, then `close`.

    A prompt is admitted with all its pages, computed by the prefill engine, and decoded from its
    first token on. What the prefix cache has is not asked for. A refused prompt, and one made by
    other weights, is computed here.
    """

    def connect(
        self,
        connections: Sequence[Line],
        reader: Reader,
        *,
        ring_bytes: int,
        on_loss: OnLoss = "recompute",
        timeout: float = 60.0,
    ) -> None:
        """connections: one to every prefill rank, from `accept`. ring_bytes: of the ring; longer
        prompts are sent in parts. on_loss: when a prefill rank is gone, or silent for `timeout`
        seconds with prompts under way: compute these and all later ones here, or raise
        PeerLostError and refuse to generate. ValueError where the engines do not fit together.
        """
        layers = staged_layers(self.cache)
        heads = kv_heads(self.model)
        ring, ticket = reader.ring(ring_bytes, self.saver)
        hello = Hello(
            tp_size=self._ranks.size,
            tp_rank=self._ranks.rank,
            geometry=geometry(self.model, self.cache, layers[0].dtype),
            ring_bytes=ring_bytes,
            ticket=ticket,
        )
        self._peers = Peers("prefill", connections, hello, timeout)
        heads_per_rank(len(self._peers), heads)  # says if they do not divide
        self.inbox = Inbox(
            layers, heads, self._ranks.rank, self._ranks.size, self._peers, reader, ring
        )
        self._on_loss = on_loss
        self.split = SplitStats()
        self._remote = True  # whether prompts are sent away; the same on all ranks
        self._idle = False
        self._done = 0  # transfers that all ranks have
        self._heard = time.monotonic()

    def close(self) -> None:
        """Lets the prefill engine end, and waits for it."""
        self._peers.end()

    def unavailable_reason(self) -> str | None:
        """Adds to the engine's reasons the loss of a prefill rank that is not made good here."""
        lost = self.split.reason if not self._remote and self._on_loss == "refuse" else None
        return "; ".join(filter(None, (super().unavailable_reason(), lost))) or None

    def _submit(self, prompt: Sequence[int], params: SamplingParams) -> list[Sample]:
        samples = super()._submit(prompt, params)
        for sample in samples:
            # a beam search needs its prompt's logits here
            sample.remote = self._remote and sample.beams is None
        return samples

    def _step(self) -> None:
        self._require_current()  # before what has come is written into the pages
        if self._remote:
            self._receive()
        super()._step()

    def _run(self, step: Step) -> None:
        for chunk in step.arriving:
            self.inbox.ask(chunk)
        self._idle = not step.decode and not step.chunks
        if not self._idle:
            super()._run(step)

    # ---------------------------------------------------------------- arrivals

    def _receive(self) -> None:
        """Takes what has come; a prompt starts to decode when all ranks have it."""
        inbox = self.inbox
        self.inbox.receive(_WAIT_SECONDS if self._idle else 0)
        self._notice_silence()
        loss, complete = self._ranks.agree(
            [self._peers.loss, self._done + inbox.arrived], self.saver.device, "arrived prompts"
        )
        while self._done < complete:
            self._finish(inbox.transfers.popleft())
            self._done += 1
        self.split.rounds = inbox.allocator.watermark.round
        if loss < len(self._peers):
            self._peers.lose(loss, "is lost, says another rank")
            self._go_on_alone()

    def _notice_silence(self) -> None:
        now = time.monotonic()
        if self.inbox.heard or not self.inbox.transfers:
            self._heard = now
        elif now - self._heard > self._peers.timeout:
            self._peers.lose(0, f"or another sent nothing for {self._peers.timeout:g} s")

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
        for each, token, logprob in zip(
            self._prefilled(sample), first.tokens, first.logprobs, strict=True
        ):
            self.scheduler.append(each, token, logprob, first.version)

    def _recompute(self, sample: Sample, reason: str) -> None:
        self.scheduler.recompute(sample)
        self.split.recomputed += 1
        self.split.reason = reason

    def _go_on_alone(self) -> None:
        """A prefill rank is lost: nothing more is taken from any."""
        reason = f"the prefill engine is lost: {self._peers.lost}"
        self._remote, self.split.reason = False, reason
        self._peers.close()
        if self._on_loss == "refuse":
            raise PeerLostError(reason)
        for transfer in reversed(self.inbox.transfers):
            if transfer.wanted:
                self._recompute(transfer.sample, reason)
        self.inbox.transfers.clear()
        for sample in self.scheduler.waiting:
            sample.remote = False
