"""The decode side: an engine whose prompts are computed elsewhere, or here when that fails."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvcache.staging import heads_per_rank
from rollout.disagg.channel import Peers
from rollout.disagg.geometry import geometry, kv_heads, staged_layers
from rollout.disagg.inbox import Inbox, Transfer
from rollout.disagg.line import Line
from rollout.disagg.messages import First, Hello
from rollout.disagg.transport import Reader
from rollout.engine import Engine
from rollout.errors import PeerLostError
from rollout.serving.samples import Sample, Step
from rollout.types import SamplingParams

_WAIT_SECONDS = 0.05  # for messages, when there is nothing to decode

OnLoss = Literal["recompute", "refuse"]


@dataclass(kw_only=True)
class SplitStats:
    """Counts since `connect`. arrived: prompts that came. recomputed: prompts that were refused or
    lost, and computed here. reason: why the last of them was. rounds: times that the ring began
    anew.
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

    def _finish(self, transfer: Transfer) -> None:
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
