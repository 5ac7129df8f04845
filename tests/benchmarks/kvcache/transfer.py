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

from tests.benchmarks.common import MIB, Figure, Figures, Scale, figures
from tests.benchmarks.kvcache.transfer_ranks import Plan, Seen, run
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
    return [*found, Figure(what=f"{name}, the barriers of every transfer alone", value=_ms(seen, "idle"))]


def _figures(name: str, plan: Plan, tokens: int, seen: Sequence[Seen]) -> Figures:
    """A request is one copy of a writer into a reader's memory. Times are from barrier to barrier."""
    pairs = max(plan.writers, plan.readers)  # each rank of the larger side has one peer
    moved = sum(each[f"staged {tokens}"].nbytes for each in seen)
    assert moved == tokens * plan.token_bytes, "a prompt's bytes, once"
    ways = ("staged", "plain copy", "per token") if tokens == plan.short else ("staged", "plain copy")
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
    return statistics.median(max(times) for times in zip(*(each[way].ms for each in seen), strict=True))
