"""Four prefill ranks to two decode ranks without engines: staged, against one copy a token, layer,
and key or value.

Every rank is a process with a pool of its own heads; ranks share GPUs where there are fewer than
ranks. The floor, "plain copy", takes as many bytes by each pair of ranks from a contiguous buffer
into the ring.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from kvcache.ops.staging_copy import Writers, gather_staged, scatter_staged, staged_bytes
from kvcache.staging import HeadSlice, head_writers, heads_per_rank, pool_layers
from memsaver import MemorySaver, Ticket, attach
from rollout.disagg import MappedReader, MappedWriter
from tests.benchmarks.common import MIB, WARMUP, Figure, Figures, Scale, figures, settle
from tests.benchmarks.kvcache.pools import HEADS, PAGE_SIZE, make_pool, shuffled_slots
from tests.helpers.ranks import results, start_ranks


def transfer(scale: Scale) -> Figures:
    """A prompt of 4,096 tokens, and one of 256, which copies per token get through in time."""
    plan = Plan(
        writers=scale.choose(4, 2),
        readers=scale.choose(2, 1),
        on_gpu=scale.on_gpu,
        layers=scale.choose(28, 2),
        head_dim=scale.choose(128, 8),
        long=scale.choose(4096, 48),
        short=scale.choose(256, 16),
        rounds=scale.choose(7, 1),
    )
    with tempfile.TemporaryDirectory() as folder:
        meet = Path(folder) / "store"
        seen: list[Seen] = results(start_ranks(run, plan.writers + plan.readers, meet, plan))
    name = f"TP{plan.writers} -> TP{plan.readers}"
    found = [Figure(what="GPUs of all ranks", value=torch.cuda.device_count(), unit="GPUs")]
    for tokens in (plan.long, plan.short):
        found += _figures(f"{name}, {tokens:,} tokens, ", plan, tokens, seen)
    return [
        *found,
        Figure(what=f"{name}, the barriers of every transfer alone", value=_ms(seen, "idle")),
    ]


def _figures(name: str, plan: Plan, tokens: int, seen: Sequence[Seen]) -> Figures:
    """A request is one copy of a writer into a reader's memory.

    Times are from barrier to barrier.
    """
    pairs = max(plan.writers, plan.readers)  # each rank of the larger side has one peer
    moved = sum(each[f"staged {tokens}"].nbytes for each in seen)
    assert moved == tokens * plan.token_bytes, "a prompt's bytes, once"
    ways = (
        ("staged", "plain copy", "per token") if tokens == plan.short else ("staged", "plain copy")
    )
    requests = {way: sum(each[f"{way} {tokens}"].requests for each in seen) / pairs for way in ways}
    ms = {way: _ms(seen, f"{way} {tokens}") for way in ways}
    of_staged = {way: ms[way] / ms["staged"] for way in ways[1:]}
    return [
        Figure(what=f"{name}bytes", value=moved / MIB, unit="MiB"),
        *figures(requests, "requests a pair of ranks", name),
        *figures(ms, prefix=name),
        *figures(of_staged, "x the time of staged", name),
    ]


def _ms(seen: Sequence[Seen], way: str) -> float:
    """Median of the rounds, each as the slowest rank saw it."""
    return statistics.median(
        max(times) for times in zip(*(each[way].ms for each in seen), strict=True)
    )


# ---------------------------------------------------------------- ranks


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Writers are the first processes, then come readers.

    long, short: tokens of the prompts, whole pages.
    """

    writers: int
    readers: int
    on_gpu: bool
    layers: int
    head_dim: int
    long: int
    short: int
    rounds: int

    @property
    def token_bytes(self) -> int:
        return self.layers * 2 * HEADS * self.head_dim * 2


@dataclass(kw_only=True)
class Way:
    """What a rank saw. ms: of each round, from barrier to barrier.

    requests, nbytes: that it sent in one round.
    """

    ms: list[float]
    requests: float
    nbytes: float


Seen = dict[str, Way]


class Target(NamedTuple):
    """What a reader tells all writers: its ring and its pool, where they are, and into which slots
    a prompt goes.
    """

    ring: Any
    ring_bytes: int
    pool: Ticket
    offsets: tuple[int, int]  # of keys and of values in the pool's tag
    shape: tuple[int, ...]
    slots: Tensor  # int64, CPU


def _nothing() -> None:
    return


class Rank:
    """A process's pool; both kinds of rank take part in the same rounds in the same order."""

    def __init__(self, plan: Plan, number: int, ranks: int) -> None:
        """number: of this rank among the `ranks` of its kind."""
        self.plan, self.number = plan, number
        where = f"cuda:{number % torch.cuda.device_count()}" if plan.on_gpu else "cpu"
        self.device = torch.device(where)
        if plan.on_gpu:
            torch.cuda.set_device(self.device)
        self.heads = heads_per_rank(ranks, HEADS)
        self.saver = MemorySaver(self.device)
        pages = 2 * plan.long // PAGE_SIZE + ranks  # other slots in writers than in readers
        self.pool = make_pool(
            self.device, pages * PAGE_SIZE, self.saver,
            num_layers=plan.layers, num_kv_heads=self.heads, head_dim=plan.head_dim,
        )  # fmt: skip
        self.k, self.v = pool_layers(self.pool)
        self.slots = shuffled_slots(self.device, plan.long, pages)
        self.seen, self.writer = Seen(), MappedWriter()

    def rounds(
        self, way: str, send: Callable[[], None] = _nothing, receive: Callable[[], None] = _nothing
    ) -> None:
        """All send, then all receive; both end with their work on the device. As many barriers
        whatever is measured.
        """
        before, times = (self.writer.requests, self.writer.nbytes), list[float]()
        count = WARMUP + self.plan.rounds
        for _ in range(count):
            dist.barrier()
            started = time.perf_counter()
            send()
            dist.barrier()
            receive()
            dist.barrier()
            times.append((time.perf_counter() - started) * 1e3)
        requests, nbytes = self.writer.requests - before[0], self.writer.nbytes - before[1]
        self.seen[way] = Way(ms=times[WARMUP:], requests=requests / count, nbytes=nbytes / count)

    def content(self, part: int) -> Tensor:
        """Keys (0) or values (1) of the long prompt as int16 `[L, tokens, heads, D]`: each row is
        another one.
        """
        shape = self.plan.layers, self.plan.long, HEADS, self.plan.head_dim
        values = torch.arange(math.prod(shape), device=self.device).view(shape)
        first = self.number * self.heads
        return ((values[:, :, first : first + self.heads] + 16381 * part) % 32749).short()


@dataclass(kw_only=True)
class Peer:
    """A reader, of whom a writer sends its heads `part`. before: heads that other writers stage
    before them.
    k, v: the reader's pool as mapped here, `[L, slots, H, D]`.
    """

    number: int
    part: HeadSlice
    before: int
    target: Target
    k: Tensor
    v: Tensor


def run(rank: int, plan: Plan) -> Seen:
    """All ways, in one order on all ranks."""
    if rank < plan.writers:
        return write(Rank(plan, rank, plan.writers))
    return read(Rank(plan, rank - plan.writers, plan.readers))


# ---------------------------------------------------------------- writers


def write(me: Rank) -> Seen:
    plan = me.plan
    for part, rows in enumerate((me.k, me.v)):
        rows.view(torch.int16)[:, me.slots] = me.content(part)
    leases = contextlib.ExitStack()
    peers = _peers(me, leases)
    largest = max(staged_bytes(me.k, me.v, plan.long, peer.part.num_heads) for peer in peers)
    buffer = torch.empty(largest, dtype=torch.uint8, device=me.device)
    for tokens in (plan.long, plan.short):
        me.rounds(f"staged {tokens}", partial(_send, me, peers, buffer, tokens))
    copies = [pair for peer in peers for pair in _copies(me, peer, plan.short)]
    me.rounds(f"per token {plan.short}", partial(_copy_each, me, copies))
    me.seen[f"per token {plan.short}"].requests = len(copies)
    for tokens in (plan.long, plan.short):
        me.rounds(f"plain copy {tokens}", partial(_send, me, peers, buffer, tokens, gather=False))
    me.rounds("idle")
    copies.clear()  # they and the peers' pools dangle when the leases end
    peers.clear()
    me.writer.close()
    leases.close()
    dist.barrier()
    return me.seen


def _peers(me: Rank, leases: contextlib.ExitStack) -> list[Peer]:
    plan, peers = me.plan, []
    for number, target in enumerate(_exchange(plan, None)):
        parts = head_writers(plan.writers, plan.readers, number, HEADS)
        for part in parts:
            if part.src_tp_rank == me.number:
                me.writer.open(number, target.ring_bytes, target.ring, me.device)
                lease = leases.enter_context(attach(target.pool))
                k, v = (
                    lease.tensor(target.shape, torch.bfloat16, offset) for offset in target.offsets
                )
                before = sum(each.num_heads for each in parts if each.src_tp_rank < me.number)
                peers.append(Peer(number=number, part=part, before=before, target=target, k=k, v=v))
    return peers


def _send(
    me: Rank, peers: Sequence[Peer], buffer: Tensor, tokens: int, gather: bool = True
) -> None:
    """As an outbox does, or without the gather: one plain copy of as many bytes."""
    for peer in peers:
        staged = buffer[: staged_bytes(me.k, me.v, tokens, peer.part.num_heads)]
        me.writer.settle(peer.number)
        if gather:
            gather_staged(
                me.k, me.v, me.slots[:tokens], peer.part.src_head_start, peer.part.num_heads, staged
            )
        me.writer.put(peer.number, staged, staged_bytes(me.k, me.v, tokens, peer.before))


def _copies(me: Rank, peer: Peer, tokens: int) -> list[tuple[Tensor, Tensor]]:
    """(to, from) for every token, layer, and key or value, as without staging: the heads of a token
    lie together, those of the next one elsewhere. Views are made beforehand, so that the copies
    alone are timed.
    """
    theirs = slice(peer.part.dst_head_start, peer.part.dst_head_start + peer.part.num_heads)
    mine = slice(peer.part.src_head_start, peer.part.src_head_start + peer.part.num_heads)
    slots = list(zip(peer.target.slots.tolist(), me.slots.tolist(), strict=True))[:tokens]
    return [
        (to[layer, there, theirs], of[layer, here, mine])
        for there, here in slots
        for layer in range(me.plan.layers)
        for to, of in ((peer.k, me.k), (peer.v, me.v))
    ]


def _copy_each(me: Rank, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
    for to, of in copies:
        to.copy_(of)
    settle(me.device)


# ---------------------------------------------------------------- readers


def read(me: Rank) -> Seen:
    plan = me.plan
    parts = head_writers(plan.writers, plan.readers, me.number, HEADS)
    writers = Writers.of([(part.dst_head_start, part.num_heads) for part in parts], me.device)
    ring_bytes = staged_bytes(me.k, me.v, plan.long, writers.total)
    ring, ticket = MappedReader().ring(ring_bytes, me.saver)
    pool = me.saver.share("kv_cache", writable=True)
    offsets = (me.saver.offset_of(me.k), me.saver.offset_of(me.v))
    target = Target(
        ring=ticket,
        ring_bytes=ring_bytes,
        pool=pool,
        offsets=offsets,
        shape=tuple(me.k.shape),
        slots=me.slots.cpu(),
    )
    for rows in (me.k, me.v):
        rows.zero_()
    _exchange(plan, target)

    def receive(tokens: int) -> None:
        staged = ring[: staged_bytes(me.k, me.v, tokens, writers.total)]
        scatter_staged(staged, me.k, me.v, me.slots[:tokens], writers)
        settle(me.device)

    for tokens in (plan.long, plan.short):
        me.rounds(f"staged {tokens}", receive=partial(receive, tokens))
        _check(me, tokens)
    me.rounds(f"per token {plan.short}")
    _check(me, plan.short)
    for tokens in (plan.long, plan.short):
        me.rounds(f"plain copy {tokens}")
    me.rounds("idle")
    dist.barrier()
    return me.seen


def _check(me: Rank, tokens: int) -> None:
    """The pool holds what the writers have, and nothing else; it is zero afterwards."""
    for part, rows in enumerate((me.k.view(torch.int16), me.v.view(torch.int16))):
        assert torch.equal(rows[:, me.slots[:tokens]], me.content(part)[:, :tokens])
        rows[:, me.slots[:tokens]] = 0
        assert not rows.any(), "something was written elsewhere"
    settle(me.device)


def _exchange(plan: Plan, mine: Target | None) -> list[Target]:
    """All readers' targets, on every rank."""
    targets: list[Any] = [None] * (plan.writers + plan.readers)
    dist.all_gather_object(targets, mine)
    return targets[plan.writers :]
