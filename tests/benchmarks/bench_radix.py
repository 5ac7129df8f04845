"""Prefix cache at size: 41,000 leaves, keys of up to 50,000 tokens. `python -m tests.benchmarks.bench_radix`.

Leaves share long prompts, as the groups of a rollout do, so that the tree fits in little memory: what is timed are the
walk over a whole key, the tree's own work, and eviction of 100 leaves from a heap of 41,000. No GPU.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvcache import PagedTokenToKVPoolAllocator, RadixCache
from kvcache.radix.keys import Int64Array
from tests.benchmarks.common import conditions, print_table

VOCABULARY = 150_000


class Workload:
    """`prompts` prompts of lengths up to `longest` - `tail` tokens, each with as many answers of `tail` tokens as make
    `leaves` in all."""

    def __init__(self, leaves: int, prompts: int, longest: int, tail: int) -> None:
        self.dice = np.random.default_rng(0)
        lengths = np.linspace(longest // 10, longest - tail, prompts).astype(int)
        self.prompts = [self.dice.integers(0, VOCABULARY, n - n % tail) for n in lengths]
        self.leaves, self.tail = leaves, tail

    def key(self, i: int) -> Int64Array:
        return np.concatenate([self.prompts[i % len(self.prompts)], self.dice.integers(0, VOCABULARY, self.tail)])


def put(cache: RadixCache, allocator: PagedTokenToKVPoolAllocator, key: Int64Array) -> None:
    pages = allocator.alloc_pages(len(key) // cache.page_size)
    assert pages is not None
    kept = cache.insert(key, pages, version=cache.version)
    allocator.free_pages(pages[: kept // cache.page_size])


def timed(times: list[float], work: Callable[[], Any]) -> Any:
    begin = time.perf_counter()
    result = work()
    times.append(1e3 * (time.perf_counter() - begin))
    return result


def measure(load: Workload, page_size: int, rounds: int) -> list[list[str]]:
    room = sum(map(len, load.prompts)) + (load.leaves + rounds) * load.tail + 200_000
    allocator = PagedTokenToKVPoolAllocator(room // page_size * page_size, page_size, "cpu")
    cache = RadixCache(allocator)
    samples: dict[str, list[float]] = {}
    keys: list[Int64Array] = []
    begin = time.perf_counter()
    for i in range(load.leaves):
        key = load.key(i)
        put(cache, allocator, key)
        keys += [key] if i >= load.leaves - len(load.prompts) else []  # one a prompt
    build = time.perf_counter() - begin
    longest = max(keys, key=len)
    as_list = longest.tolist()
    for _ in range(rounds):
        timed(samples.setdefault(f"match of {len(longest):,} tokens", []), lambda: cache.match_prefix(longest))
        timed(samples.setdefault("the same, key as a list", []), lambda: cache.match_prefix(as_list))
        grown = np.concatenate([longest, load.dice.integers(0, VOCABULARY, load.tail)])
        pages = allocator.alloc_pages(len(grown) // page_size)
        insert = samples.setdefault(f"insert of {len(grown):,} tokens, {load.tail} new", [])
        kept = timed(insert, lambda k=grown, p=pages: cache.insert(k, p, version=0))
        allocator.free_pages(pages[: kept // page_size])
        evict = samples.setdefault(f"evict 100 leaves ({100 * load.tail:,} tokens)", [])
        dropped = timed(evict, lambda: cache.evict(100 * load.tail))
        assert dropped >= 100 * load.tail  # more where answers begin alike, so that a leaf is shorter
        for _ in range(100):
            put(cache, allocator, load.key(int(load.dice.integers(len(load.prompts)))))
    timed(samples.setdefault("raise_version", []), lambda: cache.raise_version(1))
    rows = [[str(page_size), f"build, {load.leaves:,} leaves", f"{1e3 * build / load.leaves:.3f} a leaf", ""]]
    return rows + [[str(page_size), n, f"{statistics.median(t):.3f}", f"{max(t):.3f}"] for n, t in samples.items()]


def sglang_evict(load: Workload) -> str:
    """Milliseconds that sglang's RadixCache takes for the same eviction; its constructor differs between versions."""
    if importlib.util.find_spec("sglang") is None:
        return "sglang is not installed: not compared"
    import torch
    from sglang.srt.mem_cache.radix_cache import RadixCache as Theirs

    try:
        theirs = Theirs.create_simulated() if hasattr(Theirs, "create_simulated") else Theirs(None, None, 1)
        for i in range(load.leaves):
            key = load.key(i).tolist()
            theirs.insert(key, torch.arange(len(key)))
        times: list[float] = []
        timed(times, lambda: theirs.evict(100 * load.tail))
    except Exception as error:
        return f"sglang is installed, but could not be compared: {error!r}"
    return f"sglang evict of 100 leaves: {times[0]:.3f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leaves", type=int, default=41_000)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--longest", type=int, default=50_000)
    parser.add_argument("--tail", type=int, default=64, help="tokens of an answer, a multiple of 16")
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    load = Workload(args.leaves, args.prompts, args.longest, args.tail)
    rows: list[list[str]] = []
    for page_size in (1, 16):
        rows += measure(load, page_size, args.rounds)
        gc.collect()
    print(conditions())
    print_table(["page size", "what", "median ms", "worst ms"], rows)
    print(sglang_evict(load))


if __name__ == "__main__":
    main()
