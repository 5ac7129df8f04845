"""The prefix cache at size, 41,000 leaves and keys of 50,000 tokens, beside SGLang's in the same
process.

Leaves share prompts, as the groups of a rollout do, so that the tree fits in little memory. Both
caches take the same tokens in the same order, each as its own engine has them: SGLang's as
array('q'), ours as array('i'); matches of ours by array('q') are measured too. Keys are made just
before a burst of calls, as a scheduler's are for the requests that it admits; each call is timed
alone. SGLang's allocator is one that does nothing, ours is the real one.
"""

from __future__ import annotations

import gc
import statistics
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvcache import RadixCache
from kvcache.allocators import PagedTokenToKVPoolAllocator
from tests.benchmarks import rival_sglang
from tests.benchmarks.common import Figures, Scale, figures

VOCABULARY = 150_000
TAIL = 64  # tokens of an answer
BURST = 8  # calls in a row
MATCH = "match"
WITH_SLOTS = "match and its slots"
WIDE = "match, array('q')"
INSERT = "insert"
EVICT = "evict"
Times = dict[str, list[float]]
Ids = NDArray[np.int32]


class Workload:
    """`prompts` prompts, each with as many answers as make `leaves` in all; keys of `length`
    tokens.
    """

    def __init__(self, leaves: int, prompts: int, length: int) -> None:
        self.dice = np.random.default_rng(0)
        self.prompts = [_tokens(self.dice, length - TAIL) for _ in range(prompts)]
        self.known = [self.grown(prompt) for prompt in self.prompts]
        self.leaves, self.length = leaves, length

    def keys(self, count: int, seed: int) -> Iterator[Ids]:
        """Prompts with answers, the same for the same seed.

        One after the other: all of them would take gigabytes.
        """
        dice = np.random.default_rng(seed)
        return (
            np.concatenate([self.prompts[i % len(self.prompts)], _tokens(dice, TAIL)])
            for i in range(count)
        )

    def grown(self, key: Ids) -> Ids:
        """The key and an answer."""
        return np.concatenate([key, _tokens(self.dice, TAIL)])

    def picked(self) -> list[Ids]:
        return [self.known[i] for i in self.dice.permutation(len(self.known))[:BURST]]


def _tokens(dice: np.random.Generator, count: int) -> Ids:
    return dice.integers(0, VOCABULARY, count, dtype=np.int32)


class Ours:
    """RadixCache on a real ledger of pages."""

    def __init__(self, tokens: int, page_size: int) -> None:
        self.allocator = PagedTokenToKVPoolAllocator(
            tokens // page_size * page_size, page_size, "cpu"
        )
        self.cache = RadixCache(self.allocator)

    def key(self, tokens: Ids) -> array[int]:
        return array("i", tokens.tobytes())

    def slots(self, tokens: int) -> Any:
        pages = self.allocator.alloc_pages(tokens // self.cache.page_size)
        assert pages is not None
        return pages

    def match(self, key: array[int]) -> int:
        return self.cache.match_prefix(key).length

    def match_slots(self, key: array[int]) -> Any:
        return self.cache.match_prefix(key).pages

    def insert(self, key: array[int], slots: Any) -> int:
        return self.cache.insert(key, slots, version=0)

    def inserted(self, slots: Any, known: int) -> None:
        """Frees the duplicates."""
        self.allocator.free_pages(slots[: known // self.cache.page_size])

    def evict(self, tokens: int) -> int:
        return self.cache.evict(tokens)


Cache = Ours | rival_sglang.SGLangRadix


def radix(scale: Scale) -> Figures:
    """Medians of 50 rounds of 8 matches, 8 inserts and an eviction of 100 leaves; page sizes 1 and
    16. One thread.
    """
    found = rival_sglang.find()
    if found is None:
        print(
            "radix: sglang is neither installed nor a wheel on PYTHONPATH, so it is not measured",
            flush=True,
        )
    threads, done = torch.get_num_threads(), Figures()
    torch.set_num_threads(1)
    for page_size in (1, 16):
        load = Workload(
            scale.choose(41_000, 150), scale.choose(64, 8), scale.choose(50_000, 640) // TAIL * TAIL
        )
        ours = Ours((len(load.prompts) + BURST) * load.length + 2 * load.leaves * TAIL, page_size)
        caches: list[Cache] = (
            [ours] if found is None else [ours, rival_sglang.load(found, page_size)]
        )
        mine, *rivals = ({what: statistics.median(times) for what, times in each.items()}
                         for each in _rounds(caches, load, scale.choose(50, 2)))  # fmt: skip
        ours.cache.check_integrity()
        name = f"page size {page_size}, "
        done += figures(mine, prefix=name)
        for theirs in rivals:
            done += _compared(name, mine, theirs)
        del ours, caches
        gc.collect()
    torch.set_num_threads(threads)
    return done


def _compared(name: str, mine: dict[str, float], theirs: dict[str, float]) -> Figures:
    """Theirs, and how many times as long it takes, each and one after the other."""
    ratios = {what: ms / mine[what] for what, ms in theirs.items()}
    both = [sum(each[what] for what in (MATCH, INSERT, EVICT)) for each in (theirs, mine)]
    ratios["one of each, without slots"] = both[0] / both[1]
    rival = f"{name}sglang {rival_sglang.version()}, "
    return figures(theirs, prefix=rival) + figures(ratios, "x sglang", name)


def _rounds(caches: Sequence[Cache], load: Workload, rounds: int) -> list[Times]:
    """The same tree in every cache; then matches, inserts and evictions, the caches by turns. As
    many leaves come as go. Python's garbage is not collected meanwhile: it would be the trees that
    it walks.
    """
    # one after the other, or what they allocate lies in between and breaks gigabytes into pieces
    for cache in caches:
        for tokens in chain(load.keys(load.leaves - len(load.known), 1), load.known):
            _put(cache, [tokens], [])
    results: list[Times] = [
        {what: [] for what in (MATCH, WITH_SLOTS, INSERT, EVICT)} for _ in caches
    ]
    results[0][WIDE] = []
    evicted = min(100, load.leaves // 4)
    gc.collect()
    gc.disable()
    for turn in range(rounds):
        both = list(zip(caches, results, strict=True))[:: 1 if turn % 2 else -1]
        for what in (MATCH, WITH_SLOTS, WIDE, INSERT):
            picked = load.picked()
            if what == INSERT:
                picked = [load.grown(tokens) for tokens in picked]
            for cache, times in both:
                if what in times:
                    _burst(cache, what, picked, times[what])
        others = list(load.keys(evicted, 2 + turn))
        for cache, times in both:
            assert _timed(times[EVICT], lambda: cache.evict(evicted * TAIL)) >= evicted * TAIL  # noqa: B023
            for tokens in others:
                _put(cache, [tokens], [])
    gc.enable()
    return results


def _burst(cache: Cache, what: str, picked: Sequence[Ids], times: list[float]) -> None:
    if what == INSERT:
        assert _put(cache, picked, times) == [len(tokens) - TAIL for tokens in picked]
        return
    for key in [
        array("q", tokens.tolist()) if what == WIDE else cache.key(tokens) for tokens in picked
    ]:
        if what == WITH_SLOTS:
            assert len(_timed(times, lambda: cache.match_slots(key))) > 0  # noqa: B023
        else:
            assert _timed(times, lambda: cache.match(key)) == len(key)  # noqa: B023


def _put(cache: Cache, picked: Sequence[Ids], times: list[float]) -> list[int]:
    """Inserts keys with new slots; how much of each was known."""
    slots = [cache.slots(len(tokens)) for tokens in picked]
    keys = [cache.key(tokens) for tokens in picked]
    known = [_timed(times, lambda: cache.insert(*entry)) for entry in zip(keys, slots, strict=True)]  # noqa: B023
    for each, length in zip(slots, known, strict=True):
        cache.inserted(each, length)
    return known


def _timed(times: list[float], work: Callable[[], Any]) -> Any:
    begin = time.perf_counter()
    result = work()
    times.append(1e3 * (time.perf_counter() - begin))
    return result
