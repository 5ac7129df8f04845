"""The prefill side: computes prompts for a decode engine, and puts them into its ranks' rings."""

import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kvcache import ReqHandle
from kvcache.allocators import to_device
from kvcache.ops import gather_staged, staged_bytes
from kvcache.staging import (
    StagingBuffer,
    Watermark,
    compute_head_slice_params,
    head_writers,
    heads_per_rank,
    may_fill,
)
from memsaver import Lease, StateError, attach
from memsaver.content_watch import lost_by_others
from rollout.disagg.line import (
    Ask,
    Closed,
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
from rollout.serving.prefix import PrefixBlocks
from rollout.serving.samples import Sample, Step
from rollout.types import KV_CACHE, PeerLostError

_WAIT_SECONDS = 0.05  # for messages, when there is nothing to compute


class Writer(ABC):
    """Brings bulk bytes into decode ranks' rings: one call, one copy or message.

    requests, nbytes: what was sent so far, of all peers.
    """

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


@dataclass(frozen=True, kw_only=True)
class Slice:
    """This rank's part of what a decode rank gets: heads, those before them, and the staging."""

    start: int
    heads: int
    before: int
    buffer: StagingBuffer


@dataclass(kw_only=True)
class Parcel:
    """One prompt. asks: of all decode ranks. handle: of its pages, till sent. nth: by rank."""

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

    @property
    def holds_pages(self) -> bool:
        """Tells whether computed prompts wait to be sent."""
        return any(parcel.handle is not None for parcel in self._queue)

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


class PrefillEngine(Engine):
    """One rank of the prefill side. `connect`, then `serve` until the decode engine closes."""

    def connect(self, connections: Sequence[Line], writer: Writer, timeout: float = 60.0) -> None:
        """connections: of `dial`, one a decode rank. ValueError where the engines do not fit."""
        layers = staged_layers(self.cache)
        heads = kv_heads(self.model)
        hello = Hello(
            tp_size=self._ranks.size,
            tp_rank=self._ranks.rank,
            geometry=geometry(self.model, self.cache, layers[0].dtype),
        )
        self._peers = Peers("decode", connections, hello, timeout)
        heads_per_rank(len(self._peers), heads)  # says if they do not divide
        self._writer = writer
        ranks = self._ranks
        self._outbox = Outbox(layers, heads, ranks.rank, ranks.size, self._peers, writer)
        self._asked: list[list[Ask]] = [[] for _ in self._peers.hellos]
        self._closed = 0  # decode ranks that are done
        self._parcels: list[Parcel] = []  # admitted, by number
        self._costs: list[tuple[int, int]] = []  # pages and rows of each, until it is sent
        self._computed: list[tuple[Parcel, list[Sample]]] = []  # by the present step

    def serve(self) -> None:
        """Answer until every decode rank has closed. PeerLostError names one that is gone."""
        try:
            self._require_current(together=True)
            while self._turn():
                pass
        finally:
            self.scheduler.abort(self.scheduler.unfinished)
            self._outbox.clear(self.prefixes)
            self._writer.close()
            self._peers.close()

    def _turn(self) -> bool:
        """Messages, what all ranks know of, one step, and sending; False when all is done."""
        self._receive(0 if self.scheduler.unfinished else _WAIT_SECONDS)
        known = min(len(asked) for asked in self._asked)
        loss, closed, known, sent = self._ranks.agree(
            [self._peers.loss, self._closed, known, self._outbox.sent],
            self.saver.device,
            "requests",
        )
        if loss < len(self._peers):
            self._peers.lose(loss, "is lost, says another rank")
            raise PeerLostError(f"stopped serving: {self._peers.lost}")
        self._admit(known, sent)
        if self.scheduler.unfinished:
            self._step()
        elif self._outbox.holds_pages:
            self._require_current()
        self._outbox.send(self.prefixes)
        return closed < len(self._peers)

    def _receive(self, seconds: float) -> None:
        for peer, message in self._peers.receive(seconds):
            if isinstance(message, Ask):
                self._asked[peer].append(message)
            elif isinstance(message, Freed):
                self._outbox.watermarks[peer] = message.watermark
            else:
                assert isinstance(message, Closed)
                self._closed += 1

    # ---------------------------------------------------------------- admission

    def _admit(self, known: int, sent: int) -> None:
        """Takes requests in, in order, as long as all fit together: nothing is preempted."""
        while len(self._parcels) < known:
            parcel = Parcel(asks=[asked[len(self._parcels)] for asked in self._asked])
            pages, rows = self._cost(parcel.asks[0])
            held = [sum(costs) for costs in zip(*self._costs[sent:], strict=True)] or [0, 0]
            parcel.refusal = self._refusal(parcel.asks[0], pages, rows)
            if parcel.refusal is not None:
                pages = rows = 0
            elif (
                held[0] + pages > self.blocks.total_pages
                or held[1] + rows > self.config.max_running
            ):
                return
            self._parcels.append(parcel)
            self._costs.append((pages, rows))
            self._outbox.add(parcel)
            if parcel.refusal is None:
                self._queue(parcel.asks[0])

    def _cost(self, ask: Ask) -> tuple[int, int]:
        """Pages, and rows of the request table: one holds the pages until they are sent."""
        return -(-len(ask.prompt) // self.config.page_size), len(ask.indices) + 1

    def _refusal(self, ask: Ask, pages: int, rows: int) -> str | None:
        if pages > self.blocks.total_pages or len(ask.prompt) >= self.max_context_len:
            length = len(ask.prompt)
            return f"the prefill engine holds no prompt of {length} tokens; raise its kv_tokens"
        if rows > self.config.max_running:
            rule = "raise its max_running"
            return f"the prefill engine has no {rows} rows for {rows - 1} samples; {rule}"
        return None

    def _queue(self, ask: Ask) -> None:
        params = replace(ask.params, max_tokens=1)
        leader, *siblings = (
            Sample(
                request=ask.number,
                index=i,
                prompt=ask.prompt,
                params=params,
                seed=ask.seed,
                stop_ids=frozenset(),
            )
            for i in ask.indices
        )
        leader.siblings = siblings
        self.scheduler.waiting.append(leader)

    # ---------------------------------------------------------------- a step

    def _start_over(self) -> None:
        """Raise a StateError where computed prompts, which are lost, are still to be sent."""
        super()._start_over()
        if hasattr(self, "_outbox") and self._outbox.holds_pages:
            reason = lost_by_others([KV_CACHE], "engine")
            raise StateError(f"stopped serving: {reason} before its prompts were sent; serve anew")

    def _prefilled(self, sample: Sample) -> list[Sample]:
        """Holds the prompt's pages beyond the sample's end, which comes with its first token."""
        family = super()._prefilled(sample)
        assert sample.handle is not None
        parcel = self._parcels[sample.request]
        parcel.handle = self.prefixes.fork(sample.handle)
        assert parcel.handle is not None, "admission keeps a row free"
        self._computed.append((parcel, family))
        return family

    def _run(self, step: Step) -> None:
        super()._run(step)
        for parcel, family in self._computed:
            parcel.first = First(
                tokens=tuple(each.output[0] for each in family),
                logprobs=tuple(each.logprobs[0] for each in family),
                version=family[0].versions[0],
            )
        self._computed.clear()
