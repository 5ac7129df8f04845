"""The prefill side: an engine computes prompts into the rings of decode ranks."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvcache import ReqHandle
from kvcache.allocators import to_device
from kvcache.ops import gather_staged
from kvcache.staging import HeadSlice, Watermark, head_writers, may_fill
from memsaver import StateError
from memsaver.content_watch import lost_by_others
from rollout.engine.engine import Engine
from rollout.errors import PeerLostError
from rollout.scheduling.prompt_source import PromptSource
from rollout.scheduling.samples import Sample
from rollout.split.control import Ask, Filled, First, Range, RankPeers, Refused, StagedCache
from rollout.split.transport import Transport
from rollout.tag_names import KV_CACHE

_WAIT_SECONDS = 0.05  # wait for messages when there is nothing to compute


@dataclass(kw_only=True)
class Parcel:
    """One requested prompt, from admission until all decode ranks have it."""

    asks: Sequence[Ask]  # request of each decode rank, by rank
    # Pages of the pool and rows of the request table that the prompt takes until it is sent; 0 if
    # it is refused.
    pages: int
    rows: int
    handle: ReqHandle | None = None  # of the pages, once they are computed
    refusal: str | None = None  # reason for not computing the prompt
    samples: list[Sample] = field(default_factory=list)  # which end with their first tokens
    nth: Counter[int] = field(default_factory=Counter)  # ranges sent (1 for a refusal), by peer

    @property
    def first(self) -> First | None:
        """Return the first tokens of the samples; None until all are computed."""
        if not all(sample.output for sample in self.samples):
            return None
        return First(
            tokens=tuple(sample.output[0] for sample in self.samples),
            logprobs=tuple(sample.logprobs[0] for sample in self.samples),
            version=self.samples[0].versions[0],
        )


class PromptServer(PromptSource):
    """Prompts that one rank of an engine computes for a decode engine, until that closes.

    Prompts and refusals are sent first in, first out. Decode ranks assign ranges in the order of
    their requests. The next range of the first parcel is therefore the oldest range that is not
    freed, so it becomes ready and the queue cannot deadlock.

    Args:
        engine: The engine that computes the prompts.
        addresses: zmq endpoints of the decode ranks, which may begin to listen later.
        key: Secret that all ranks of both engines share.
        transport: Moves keys and values; the same class on all ranks.
        timeout: Seconds after which a decode rank is lost if it accepts no message.
        connect_timeout: Seconds to wait for the decode ranks.

    Raises:
        TimeoutError: A decode rank did not answer.
        ValueError: The engines do not match, or the cache is not plain full attention.
    """

    overlap = False

    def __init__(
        self,
        engine: Engine,
        addresses: Sequence[str],
        key: bytes,
        transport: Transport,
        *,
        timeout: float = 60.0,
        connect_timeout: float = 600.0,
    ) -> None:
        self._engine, self._transport = engine, transport
        self._cache = StagedCache.of(engine.model, engine.cache, engine.runner.ranks)
        hello = self._cache.greeting()
        self._peers = RankPeers("decode", hello, key, timeout, connect_timeout, dial=addresses)
        self._asked: list[list[Ask]] = [[] for _ in self._peers.hellos]
        self._watermarks = [Watermark(0, 0)] * len(self._peers)
        self._parcels: list[Parcel] = []  # all that were admitted, by request number
        self._sent = 0  # number of the first of them, which are sent completely
        self._slices: dict[int, HeadSlice] = {}
        self._staging: dict[int, Tensor] = {}
        self._open_rings()

    def _open_rings(self) -> None:
        """Open the ring of every decode rank that this one sends to."""
        cache, device = self._cache, self._cache.k.device
        for peer, hello in enumerate(self._peers.hellos):
            writers = head_writers(cache.size, len(self._peers), peer, cache.heads)
            total = sum(part.num_heads for part in writers)
            for part in writers:
                if part.src_tp_rank == cache.rank:
                    nbytes = hello.ring_bytes * part.num_heads // total
                    self._slices[peer] = part
                    self._staging[peer] = torch.empty(nbytes, dtype=torch.uint8, device=device)
                    # this GPU copies, even into a ring on another GPU
                    with torch.cuda.device_of(cache.k):
                        self._transport.open(peer, hello.ring_bytes, hello.ticket, device)

    def serve(self) -> None:
        """Compute and send prompts until every decode rank has closed.

        Raises:
            PeerLostError: A decode rank is gone; names the rank.
            StateError: The engine cannot compute or has requests of its own, or its KV cache lost
                computed prompts before they were sent.
        """
        engine = self._engine
        if left := engine.unfinished:
            raise StateError(
                f"cannot serve prompts: {len(left)} requests of submit are unfinished; step until "
                f"they end, or abort them"
            )
        source, engine.prompts = engine.prompts, self
        try:
            engine.require_current(together=True)
            while self._turn():
                pass
        finally:
            engine.prompts = source
            engine.requests.drop(engine.unfinished)
            for parcel in self._parcels[self._sent :]:
                self._drop(parcel)
            self._transport.close()
            self._peers.close()

    def _turn(self) -> bool:
        """Receive, admit, compute one step and send; return False when all decode ranks closed."""
        engine = self._engine
        self._receive(0 if engine.unfinished else _WAIT_SECONDS)
        known = min(len(asked) for asked in self._asked)
        loss, closed, known, sent = engine.runner.ranks.agree(
            [self._peers.loss, self._peers.closed, known, self._sent],
            engine.saver.device,
            "requests",
        )
        if loss < len(self._peers):
            self._peers.lose(loss, "is lost (reported by another rank)")
            raise PeerLostError(f"the prefill engine stopped serving: {self._peers.lost}")
        self._admit(known, sent)
        if self._holds_pages:
            engine.require_current()
        step = engine.follow if engine.runner.ranks.rank else engine.step
        for output in step():
            if output.error is not None:
                error = f"{type(output.error).__name__}: {output.error}"
                self._parcels[output.id].refusal = f"the prefill engine failed: {error}"
        self._send()
        return closed < len(self._peers)

    def _receive(self, seconds: float) -> None:
        for peer, message in self._peers.receive(seconds):
            if isinstance(message, Ask):
                self._asked[peer].append(message)
            else:
                assert isinstance(message, Watermark)
                self._watermarks[peer] = message

    # ---------------------------------------------------------------- admission

    def _admit(self, known: int, sent: int) -> None:
        """Queue requests in order while all fit into the pool together, so none is preempted.

        All ranks of this engine have received `known` requests and sent `sent` parcels.
        """
        parcels, config = self._parcels, self._engine.config
        while len(parcels) < known:
            asks = [asked[len(parcels)] for asked in self._asked]
            pages = -(-len(asks[0].prompt) // config.page_size)
            # one additional row holds the pages until they are sent
            parcel = Parcel(asks=asks, pages=pages, rows=len(asks[0].indices) + 1)
            parcel.refusal = self._refusal(parcel)
            if parcel.refusal is not None:
                parcel.pages = parcel.rows = 0
            held = [*parcels[sent:], parcel]
            if (
                sum(unsent.pages for unsent in held) > self._engine.blocks.total_pages
                or sum(unsent.rows for unsent in held) > config.max_running
            ):
                return
            parcels.append(parcel)
            if parcel.refusal is None:
                self._queue(parcel)

    def _refusal(self, parcel: Parcel) -> str | None:
        engine, length = self._engine, len(parcel.asks[0].prompt)
        if parcel.pages > engine.blocks.total_pages or length >= engine.max_context_len:
            return f"the prefill engine cannot hold {length} prompt tokens; raise its kv_tokens"
        if parcel.rows > engine.config.max_running:
            samples = parcel.rows - 1
            rule = "raise its max_running"
            return f"the prefill engine needs {parcel.rows} rows for {samples} samples; {rule}"
        return None

    def _queue(self, parcel: Parcel) -> None:
        ask = parcel.asks[0]
        params = replace(ask.params, max_tokens=1, forced=ask.params.forced[:1])
        parcel.samples = [
            Sample(
                request=ask.number,
                index=i,
                prompt=ask.prompt,
                params=params,
                seed=ask.seed,
                stop_ids=frozenset(),
            )
            for i in ask.indices
        ]
        leader, *leader.siblings = parcel.samples
        self._engine.scheduler.waiting.append(leader)
        self._engine.requests.follow(parcel.samples)

    # ---------------------------------------------------------------- sending

    def _send(self) -> None:
        """Send the parcels that are ready, in order, and free the pages of each sent parcel."""
        for parcel in self._parcels[self._sent :]:
            if not all(self._send_to(peer, parcel) for peer in range(len(self._peers))):
                return
            self._drop(parcel)
            self._sent += 1

    @property
    def _holds_pages(self) -> bool:
        """Return whether a computed prompt waits to be sent."""
        return any(parcel.handle is not None for parcel in self._parcels[self._sent :])

    def _drop(self, parcel: Parcel) -> None:
        """Free the pages that a parcel holds."""
        handle, parcel.handle = parcel.handle, None
        if handle is not None:
            self._engine.prefixes.release(handle, parcel.asks[0].prompt)

    def _send_to(self, peer: int, parcel: Parcel) -> bool:
        """Send the ranges that are ready; return whether this rank's part of the parcel is sent."""
        ask = parcel.asks[peer]
        if parcel.refusal is not None:
            if not parcel.nth[peer]:
                self._peers.send(peer, Refused(number=ask.number, reason=parcel.refusal))
            parcel.nth[peer] = 1
            return True
        first = parcel.first
        if first is None:
            return False
        part = self._slices.get(peer)
        while part is not None and parcel.nth[peer] < len(ask.ranges):
            at = ask.ranges[parcel.nth[peer]]
            if not may_fill(at.round, at.end, self._watermarks[peer]):
                return False
            self._put(peer, part, parcel, at)
            filled = Filled(number=ask.number, nth=parcel.nth[peer], first=first)
            self._peers.send(peer, filled)
            parcel.nth[peer] += 1
        return True

    def _put(self, peer: int, part: HeadSlice, parcel: Parcel, at: Range) -> None:
        """Gather this rank's heads of a range's tokens, and send them in one bulk copy."""
        assert parcel.handle is not None
        k, v = self._cache.k, self._cache.v
        tokens = self._engine.blocks.token_ids(parcel.handle, at.first, at.first + at.tokens)
        self._transport.settle(peer)
        staged = self._staging[peer][: self._cache.nbytes(at.tokens, part.num_heads)]
        slots = to_device(tokens, k.device)
        gather_staged(k, v, slots, part.src_head_start, part.num_heads, staged)
        before = self._cache.nbytes(at.tokens, part.dst_head_start)
        self._transport.put(peer, staged, at.offset + before)

    # ---------------------------------------------------------------- the engine's steps

    def computed(self, sample: Sample) -> None:
        """Keep the prompt's pages after the sample ends, which it does with its first token."""
        assert sample.handle is not None
        parcel = self._parcels[sample.request]
        self._drop(parcel)  # a step that computed it may have failed afterwards
        parcel.handle = self._engine.prefixes.fork(sample.handle)
        assert parcel.handle is not None, "admission keeps a row free"

    def lost(self) -> None:
        """Raise a StateError if prompts were computed and not sent."""
        if self._holds_pages:
            reason = lost_by_others([KV_CACHE], "engine")
            raise StateError(
                f"stopped serving: {reason} before its prompts were sent; connect both engines anew"
            )
