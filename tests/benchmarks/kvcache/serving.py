"""The real scheduler and block manager without a model: requests with made-up tokens and lengths drawn beforehand.

What is left out is arithmetic only. Rows are four bytes a token, and are copied on write like any others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvcache import BlockManager, PagedTokenToKVPoolAllocator, RadixCache, ReqToTokenPool
from rollout.prefix import PrefixBlocks
from rollout.samples import Sample
from rollout.scheduler import Scheduler
from rollout.types import SamplingParams
from tests.benchmarks.kvcache.pools import PAGE_SIZE, make_pool

LONGEST = 2048  # tokens of a prompt, and of an answer
STOP, WORD = 0, 1
SIGMA = 0.8  # of the log-normal lengths


@dataclass(frozen=True, kw_only=True)
class Request:
    prompt: list[int]
    answers: list[int]  # lengths, one a sample


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Of all running sequences after a step. pages: in use, each once; unshared: what they would take without sharing;
    tokens: slots of those pages that hold a token."""

    pages: int
    unshared: int
    tokens: int

    @property
    def filled(self) -> float:
        return self.tokens / (self.pages * PAGE_SIZE)

    @property
    def saved(self) -> float:
        return 1 - self.pages / self.unshared


def lengths(dice: np.random.Generator, median: float, count: int) -> list[int]:
    """Log-normal, in 1..LONGEST."""
    drawn = dice.lognormal(np.log(median), SIGMA, count)
    return np.clip(np.rint(drawn), 1, LONGEST).astype(int).tolist()


def usage(prefixes: PrefixBlocks, running: Sequence[Sample]) -> Usage | None:
    """None while nobody holds a page. What only the prefix cache holds does not count: it is free for the asking."""
    blocks = prefixes.blocks
    filled = np.zeros(blocks.total_pages + 1, dtype=np.int64)
    unshared = 0
    for handle in (sample.handle for sample in running if sample.handle is not None):
        pages, length = blocks.pages(handle), blocks.seq_len(handle)
        unshared += len(pages)
        held = np.minimum(length - PAGE_SIZE * np.arange(len(pages)), PAGE_SIZE)
        filled[pages] = np.maximum(filled[pages], held)
    (ledger,) = prefixes.ledgers
    pages = ledger.total - ledger.available
    assert pages == np.count_nonzero(filled), "pages are in use that no sequence names"
    return Usage(pages=pages, unshared=unshared, tokens=int(filled.sum())) if pages else None


def make_scheduler(kv_tokens: int, max_running: int, prefix_cache: bool) -> Scheduler:
    pool = make_pool(torch.device("cpu"), kv_tokens, num_layers=1, num_kv_heads=1, head_dim=1)
    allocator = PagedTokenToKVPoolAllocator(kv_tokens, PAGE_SIZE, "cpu")
    blocks = BlockManager(ReqToTokenPool(max_running, 2 * LONGEST, "cpu"), allocator, pool)
    prefixes = PrefixBlocks(blocks, RadixCache(allocator) if prefix_cache else None)
    return Scheduler(prefixes, page_size=PAGE_SIZE, max_running=max_running, max_prefill_tokens=2048)


def serve(scheduler: Scheduler, requests: Sequence[Request], after_step: Callable[[], None]) -> None:
    """All requests to their ends, in order of arrival, all waiting at the start."""
    ends: dict[Sample, int] = {}
    for number, request in enumerate(requests):
        params = SamplingParams(max_tokens=LONGEST, n=len(request.answers))
        samples = [
            Sample(request=number, index=i, prompt=request.prompt, params=params, seed=0, stop_ids=frozenset([STOP]))
            for i in range(len(request.answers))
        ]
        ends |= zip(samples, request.answers, strict=True)
        scheduler.check_fits(f"request {number}", len(request.prompt), params)
        scheduler.add(samples)
    while scheduler.unfinished:
        step = scheduler.schedule()
        scheduler.computed(step)
        due = list(step.decode)
        for chunk in step.chunks:
            if chunk.last:
                due += [chunk.sample, *scheduler.fork_siblings(chunk.sample)]
        after_step()
        for sample in due:
            scheduler.append(sample, STOP if len(sample.output) + 1 == ends[sample] else WORD, 0.0, 0)
    assert all(len(sample.output) == end for sample, end in ends.items())
