"""Four prefill ranks to two decode ranks without engines: staged, against one copy a token, layer, and key or value.

Every rank is a process with a pool of its own heads; ranks share GPUs where there are fewer than ranks. The floor,
"plain copy", takes as many bytes by each pair of ranks from a contiguous buffer into the ring.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.benchmarks.kvcache.base import MIB, Figure, Scale
from tests.benchmarks.kvcache.transfer_ranks import Plan, Seen, run
from tests.helpers.ranks import results, start_ranks


def transfer(scale: Scale) -> list[Figure]:
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
    figures = [Figure(what="GPUs of all ranks", value=float(torch.cuda.device_count()), unit="GPUs")]
    for tokens in (plan.long, plan.short):
        figures += _requests(f"{name}, {tokens:,} tokens", plan, tokens, seen)
        figures += _times(f"{name}, {tokens:,} tokens", plan, tokens, seen)
    idle = statistics.median(_whole(plan, seen, "idle"))
    return [*figures, Figure(what=f"{name}, the barriers of every transfer alone", value=idle, unit="ms")]


def _ways(plan: Plan, tokens: int) -> tuple[str, ...]:
    return ("staged", "plain copy", "per token") if tokens == plan.short else ("staged", "plain copy")


def _requests(name: str, plan: Plan, tokens: int, seen: Sequence[Seen]) -> list[Figure]:
    """A request is one copy of a writer into a reader's memory."""
    pairs = max(plan.writers, plan.readers)  # each rank of the larger side has one peer
    moved = sum(each[f"staged {tokens}"].nbytes for each in seen)
    assert moved == tokens * plan.token_bytes, "a prompt's bytes, once"
    figures = [Figure(what=f"{name}, bytes", value=moved / MIB, unit="MiB")]
    for way in _ways(plan, tokens):
        count = sum(each[f"{way} {tokens}"].requests for each in seen) / pairs
        target = "1" if way == "staged" else ""
        figures.append(Figure(what=f"{name}, {way}, a pair of ranks", value=count, unit="requests", target=target))
    return figures


def _times(name: str, plan: Plan, tokens: int, seen: Sequence[Seen]) -> list[Figure]:
    """Medians of the rounds, from barrier to barrier and without the barriers, and what others take of staged's."""
    figures = []
    for how, times in (("", _whole), (", without barriers", _work)):
        ms = {way: statistics.median(times(plan, seen, f"{way} {tokens}")) for way in _ways(plan, tokens)}
        figures += [Figure(what=f"{name}, {way}{how}", value=value, unit="ms") for way, value in ms.items()]
        figures += [
            Figure(what=f"{name}, {way}{how}, of the time of staged", value=value / ms["staged"], unit="x")
            for way, value in ms.items()
            if way != "staged"
        ]
    return figures


def _whole(plan: Plan, seen: Sequence[Seen], way: str) -> list[float]:
    """Of each round, as the slowest rank saw it."""
    return [max(times) for times in zip(*(each[way].ms for each in seen), strict=True)]


def _work(plan: Plan, seen: Sequence[Seen], way: str) -> list[float]:
    """Of each round, the slowest writer's part and then the slowest reader's."""
    rounds = zip(*(each[way].work for each in seen), strict=True)
    return [max(times[: plan.writers]) + max(times[plan.writers :]) for times in rounds]
