"""The prefix cache at size, 41,000 leaves and keys of up to 50,000 tokens, beside SGLang's in the same process.

Leaves share long prompts, as the groups of a rollout do, so that the tree fits in little memory. Both caches take the
same keys, `array('q')`, in the same order; SGLang's allocator is one that does nothing, ours is the real one.
"""

from __future__ import annotations

import gc
import statistics
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch

from kvcache import PagedTokenToKVPoolAllocator, RadixCache
from tests.benchmarks import rival_sglang
from tests.benchmarks.kvcache.base import Figure, Scale

VOCABULARY = 150_000
TAIL = 64  # tokens of an answer
EVICTED = 100  # leaves
Times = dict[str, list[float]]


class Workload:
    """`prompts` prompts of lengths up to `longest`, each with as many answers as make `leaves` in all."""

    def __init__(self, leaves: int, prompts: int, longest: int) -> None:
        self.dice = np.random.default_rng(0)
        lengths = np.linspace(longest // 10, longest - TAIL, prompts).astype(int)
        self.prompts = [self.dice.integers(0, VOCABULARY, n - n % TAIL) for n in lengths]
        self.leaves = leaves

    def keys(self, count: int) -> Iterator[array[int]]:
        """One after the other: all of them would take gigabytes."""
        return (self._key(i) for i in range(count))

    def _key(self, i: int) -> array[int]:
        answer = self.dice.integers(0, VOCABULARY, TAIL)
        return array("q", np.concatenate([self.prompts[i % len(self.prompts)], answer]).tobytes())

    def longest(self) -> array[int]:
        return self._key(len(self.prompts) - 1)

    def grown(self, key: array[int]) -> array[int]:
        """The key and another answer."""
        return key + array("q", self.dice.integers(0, VOCABULARY, TAIL).tobytes())


class Cache(Protocol):
    def slots(self, key: array[int]) -> Any: ...

    def match(self, key: array[int]) -> tuple[int, Any]: ...

    def insert(self, key: array[int], slots: Any) -> int: ...

    def inserted(self, slots: Any, known: int) -> None: ...

    def evict(self, tokens: int) -> int: ...


class Ours:
    """RadixCache on a real ledger of pages."""

    def __init__(self, tokens: int, page_size: int) -> None:
        self.allocator = PagedTokenToKVPoolAllocator(tokens // page_size * page_size, page_size, "cpu")
        self.cache = RadixCache(self.allocator)

    def slots(self, key: array[int]) -> Any:
        pages = self.allocator.alloc_pages(len(key) // self.cache.page_size)
        assert pages is not None
        return pages

    def match(self, key: array[int]) -> tuple[int, Any]:
        found = self.cache.match_prefix(key)
        return found.length, found.pages

    def insert(self, key: array[int], slots: Any) -> int:
        return self.cache.insert(key, slots, version=0)

    def inserted(self, slots: Any, known: int) -> None:
        """Frees the duplicates."""
        self.allocator.free_pages(slots[: known // self.cache.page_size])

    def evict(self, tokens: int) -> int:
        return self.cache.evict(tokens)


def radix(scale: Scale) -> list[Figure]:
    """Match, insert and eviction of 100 leaves, medians of 50; with page sizes 1 and 16. One CPU thread."""
    found = rival_sglang.find()
    if found is None:
        print("radix: sglang is neither installed nor a wheel on PYTHONPATH, so it is not measured", flush=True)
    threads, figures = torch.get_num_threads(), list[Figure]()
    torch.set_num_threads(1)
    for page_size in (1, 16):
        load = Workload(scale.choose(41_000, 150), scale.choose(64, 4), scale.choose(50_000, 640))
        room = sum(map(len, load.prompts)) + 4 * max(map(len, load.prompts)) + 2 * load.leaves * TAIL
        ours = Ours(room, page_size)
        mine, *rivals = _rounds(
            [ours] if found is None else [ours, rival_sglang.load(found, page_size)], load, scale.choose(50, 2)
        )
        ours.cache.check_integrity()
        figures += _of_ours(f"page size {page_size}", mine)
        for theirs in rivals:
            figures += _compared(f"page size {page_size}", mine, theirs)
        del ours
        gc.collect()
    torch.set_num_threads(threads)
    return figures


def _of_ours(name: str, mine: Times) -> list[Figure]:
    figures = []
    for what, times in mine.items():
        target = "< 1" if what.startswith("evict") else ""
        figures.append(Figure(what=f"{name}, {what}", value=statistics.median(times), unit="ms", target=target))
        figures.append(Figure(what=f"{name}, {what}, worst", value=max(times), unit="ms"))
    return figures


def _compared(name: str, mine: Times, theirs: Times) -> list[Figure]:
    """Theirs, and how many times as long it takes, each and one after the other."""
    rival, figures = f"sglang {rival_sglang.version()}", list[Figure]()
    for what, times in theirs.items():
        median = statistics.median(times)
        ratio = median / statistics.median(mine[what])
        figures.append(Figure(what=f"{name}, {what}, {rival}", value=median, unit="ms"))
        figures.append(Figure(what=f"{name}, {what}", value=ratio, unit="x sglang", target=">= 5"))
    together = sum(map(statistics.median, theirs.values())) / sum(map(statistics.median, mine.values()))
    figures.append(Figure(what=f"{name}, match, insert and evict", value=together, unit="x sglang", target=">= 5"))
    return figures


def _rounds(caches: Sequence[Cache], load: Workload, rounds: int) -> list[Times]:
    """The same tree in every cache; then matches, inserts and evictions, the caches by turns. As many leaves come as
    go. Python's garbage is not collected meanwhile: it would be the trees that it walks."""
    for key in chain(load.keys(load.leaves), [longest := load.longest()]):
        for cache in caches:
            _put(cache, key, [])
    count = min(EVICTED, load.leaves // 4)
    whats = [f"match of {len(longest):,} tokens", f"insert, {len(longest):,} known and {TAIL} new"]
    whats.append(f"evict {count} leaves of {load.leaves:,}")
    results: list[Times] = [{what: [] for what in whats} for _ in caches]
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        grown, others = load.grown(longest), list(load.keys(count))
        for cache, times in zip(caches, results, strict=True):
            match, insert, evict = times.values()
            length, slots = _timed(match, lambda: cache.match(longest))  # noqa: B023
            assert length == len(longest) and len(slots) > 0
            _put(cache, grown, insert)
            dropped = _timed(evict, lambda: cache.evict(count * TAIL))  # noqa: B023
            assert dropped >= count * TAIL
            for key in others:
                _put(cache, key, [])
    gc.enable()
    return results


def _put(cache: Cache, key: array[int], times: list[float]) -> None:
    slots = cache.slots(key)
    cache.inserted(slots, _timed(times, lambda: cache.insert(key, slots)))


def _timed(times: list[float], work: Callable[[], Any]) -> Any:
    begin = time.perf_counter()
    result = work()
    times.append(1e3 * (time.perf_counter() - begin))
    return result
