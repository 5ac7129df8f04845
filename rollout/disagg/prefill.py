"""The prefill side: computes prompts for a decode engine and sends it their keys, values and first
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvcache.staging import heads_per_rank
from rollout.disagg.channel import Peers
from rollout.disagg.geometry import geometry, kv_heads, staged_layers
from rollout.disagg.line import Line
from rollout.disagg.messages import Ask, Closed, First, Freed, Hello
from rollout.disagg.outbox import Outbox, Parcel
from rollout.disagg.transport import Writer
from rollout.engine import Engine
from rollout.errors import PeerLostError
from rollout.serving.samples import Sample, Step

_WAIT_SECONDS = 0.05  # for messages, when there is nothing to compute


class PrefillEngine(Engine):
    """One rank of the prefill side. `connect`, then `serve` until the decode engine closes."""

    def connect(self, connections: Sequence[Line], writer: Writer, timeout: float = 60.0) -> None:
        """connections: one to every decode rank, from `dial`.

        ValueError where the engines do not fit together.
        """
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
            while self._turn():
                pass
        finally:
            self.scheduler.abort(self.scheduler.unfinished)
            self._outbox.clear(self.prefixes)
            self._writer.close()
            self._peers.close()

    def _turn(self) -> bool:
        """Messages, what all ranks know of, one step, and what is ready to go; False when all is
        done.
        """
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
        """Takes requests in, in order, as long as all that are not sent fit together: nothing is
        ever preempted.
        """
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
        """Pages, and rows of the request table: one more than samples holds the pages until they
        are sent.
        """
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
