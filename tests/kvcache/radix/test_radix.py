"""Prefix caches, by worked examples; test_radix_stateful.py has a model."""

import inspect
import random
import sys
from array import array
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvcache import RadixCache
from kvcache.allocators import PagedTokenToKVPoolAllocator
from kvcache.radix import MambaRadixCache
from kvcache.radix.cache import POLICIES
from kvcache.radix.node import TOKEN_BYTES, EvictionQueue, Generation, as_run, common_prefix
from tests.helpers.kvcache.pools import make_states


def make_cache(pages: int, page_size: int = 1, policy: str = "lru") -> RadixCache:
    return RadixCache(PagedTokenToKVPoolAllocator(pages * page_size, page_size, "cpu"), policy)


def put(
    cache: RadixCache, key: Sequence[int], *, salt: Hashable = None, priority: int = 0
) -> list[int]:
    """Insert a key with new pages, free the duplicates and return the new pages."""
    pages = cache.allocator.alloc_pages(len(key) // cache.page_size)  # type: ignore[attr-defined]
    assert pages is not None
    kept = cache.insert(key, pages, version=cache.version, extra_key=salt, priority=priority)
    cache.allocator.free_pages(pages[: kept // cache.page_size])  # type: ignore[attr-defined]
    cache.check_integrity()
    return pages.tolist()


def held(cache: RadixCache, key: Sequence[int], salt: Hashable = None) -> int:
    """Return how many tokens of a key are cached, without counting as a use."""
    return cache.peek(key, extra_key=salt)[0]


KINDS = [
    list,
    tuple,
    lambda key: array("i", key),
    lambda key: array("q", key),
    np.asarray,
    lambda key: np.array(key, np.int32),
    lambda key: np.repeat(key, 2)[::2],  # strided
]


@pytest.mark.parametrize("kind", KINDS)
def test_keys_may_have_any_integer_type_and_layout(kind: Callable[[list[int]], Any]) -> None:
    cache = make_cache(4)
    put(cache, kind([7, 2**31 - 1, 5]))
    assert cache.match_prefix(kind([7, 2**31 - 1, 6])).length == 2
    assert cache.match_prefix([]).pages.dtype == np.int64


def test_insert_refuses_wrong_entries_without_changes() -> None:
    cache = make_cache(4, page_size=2)
    wrong: list[tuple[Any, Any, int]] = [
        ([1, 2, 3], [1, 2], 0),  # one page too many
        ([1, 2], [1], 1),  # a newer version than the cache's
        ([1.5, 2], [1], 0),
        (np.array([[1, 2]]), [1], 0),
        ([1, 2], [1.0], 0),
        ([1, 2**31], [1], 0),
        (np.array([-(2**31) - 1, 1]), [1], 0),
        (np.array([1, 2**32 - 1], np.uint32), [1], 0),
    ]
    for key, pages, version in wrong:
        with pytest.raises((AssertionError, TypeError, OverflowError)):
            cache.insert(key, pages, version=version)
        assert cache.total_size == 0 and not cache.generations()[-1].roots
    with pytest.raises(ValueError, match="eviction_policy='best' is unknown; use one of lru"):
        make_cache(1, policy="best")


def test_match_keeps_its_pages_after_a_split_and_an_eviction() -> None:
    cache = make_cache(10)
    pages = put(cache, [1, 2, 3, 4])
    match = cache.match_prefix([1, 2, 3, 4])
    put(cache, [1, 2, 9])  # splits after 2
    cache.allocator.share(pages[:1])  # type: ignore[attr-defined]
    assert cache.evict(5) == 5
    assert cache.allocator.available_pages == 9, "a page that a sequence shares was freed"  # type: ignore[attr-defined]
    assert match.pages.tolist() == pages and match.pages is match.pages


def test_unlock_without_a_lock_and_lock_of_an_evicted_node_are_refused() -> None:
    cache = make_cache(10)
    put(cache, [1, 2])
    put(cache, [1, 3])
    above, leaf = cache.match_prefix([1]).node, cache.match_prefix([1, 2]).node
    cache.inc_lock_ref(leaf)
    with pytest.raises(AssertionError, match="no lock of its own"):
        cache.dec_lock_ref(above)  # locked only through the leaf
    cache.check_integrity()
    cache.dec_lock_ref(leaf)
    cache.reset()
    with pytest.raises(ValueError, match="was evicted since"):
        cache.inc_lock_ref(leaf)
    nothing = cache.match_prefix([5]).node
    cache.inc_lock_ref(nothing)  # the node of a miss has no tokens
    cache.dec_lock_ref(nothing)
    assert cache.protected_size == 0


def test_raise_version_visits_no_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache(400)
    for token in range(400):
        cache.insert([token], cache.allocator.alloc_pages(1), version=0)  # type: ignore[attr-defined]
    monkeypatch.setattr(Generation, "nodes", "not to be called")
    cache.raise_version(1)
    leaves = [(generation.version, len(generation.leaves)) for generation in cache.generations()]
    assert leaves == [(0, 400), (1, 0)]


@pytest.mark.parametrize(
    ("policy", "victim"), [("lru", 2), ("mru", 1), ("fifo", 1), ("lfu", 3), ("priority", 2)]
)
def test_policy_chooses_the_victim(policy: str, victim: int) -> None:
    cache = make_cache(4, policy=policy)
    for token, priority in ((1, 5), (2, 0), (3, 1)):
        put(cache, [token], priority=priority)
    for token in (1, 2, 2, 3, 1):
        cache.match_prefix([token])
    cache.evict(1)
    assert [token for token in (1, 2, 3) if not held(cache, [token])] == [victim]


@pytest.mark.parametrize("policy", POLICIES)
def test_victims_equal_those_of_a_full_scan(policy: str) -> None:
    dice = random.Random(1)
    cache = make_cache(200, policy=policy)
    for _ in range(400):
        key = [dice.randint(0, 2) for _ in range(dice.randint(1, 7))]
        if dice.random() < 0.5:
            cache.match_prefix(key)
        elif cache.total_size < 150:
            put(cache, key, priority=dice.randint(0, 3))
        if dice.random() < 0.3 and cache.total_size:
            leaves = {
                n: POLICIES[policy](n) for n in cache.generations()[-1].nodes() if not n.children
            }
            cache.evict(1)
            gone = [node for node in leaves if node.parent is None]
            assert len(gone) == 1 and leaves[gone[0]] == min(leaves.values())
    cache.check_integrity()


def test_queue_keeps_at_most_two_entries_per_item() -> None:
    ranks = dict.fromkeys(range(50), 0)
    queue = EvictionQueue[int](lambda item: (ranks[item],))
    for _ in range(200):
        for item in ranks:
            ranks[item] -= 1
            queue.push(item)
    assert 50 < queue.entries <= 2 * 50 + 64
    assert [queue.pop() for _ in ranks] == [*ranks]


@pytest.mark.parametrize("policy", sorted(POLICIES.keys() - {"mru"}))
def test_match_adds_no_queue_entry(policy: str) -> None:
    cache = make_cache(3, policy=policy)
    for token in range(3):
        put(cache, [token])
    leaves = cache.generations()[-1].leaves
    before = leaves.entries
    for _ in range(5):
        cache.match_prefix([0])
    assert leaves.entries == before
    assert cache.evict(1) == 1
    assert held(cache, [0]) == (policy != "fifo")  # its entry was corrected when it came up
    cache.check_integrity()


@pytest.mark.parametrize("length", [0, 1, 255, 256, 257, 2304, 2305, 50_000])
def test_common_prefix_is_exact_at_chunk_boundaries(length: int) -> None:
    a = np.arange(50_001, dtype=np.int32)
    b = a.copy()
    b[length] = -1
    expected = length * TOKEN_BYTES
    assert (
        common_prefix(a.tobytes(), as_run(b))
        == common_prefix(b.tobytes(), as_run(a[:50_000]))
        == expected
    )
    assert common_prefix(a[:length].tobytes(), as_run(a)) == expected
    assert common_prefix(a.tobytes(), as_run(a[:length])) == expected


@pytest.mark.parametrize("damage", ["tokens", "lock", "page", "queue", "rank", "free"])
def test_check_integrity_detects_damage(damage: str) -> None:
    cache = make_cache(9)
    put(cache, [1, 2, 3])
    put(cache, [1, 5])
    node = cache.match_prefix([1, 2, 3]).node
    generation = cache.generations()[-1]
    if damage == "tokens":
        generation.tokens += 1
    elif damage == "lock":
        node.lock_ref += 1
    elif damage == "page":
        node.pages[0] = cache.match_prefix([1]).pages[0]
    elif damage == "queue":
        generation.leaves.discard(node)
    elif damage == "rank":
        node.last_access = 0  # its entry would come up too late
    else:
        cache.allocator.free_pages(node.pages)
    with pytest.raises(AssertionError):
        cache.check_integrity()


# ---------------------------------------------------------------- models with states


def make_mamba(*keys: tuple[int, ...], page_size: int = 1) -> MambaRadixCache:
    """Build a cache of the given keys, each with a state."""
    ledger, states = PagedTokenToKVPoolAllocator(24 * page_size, page_size, "cpu"), make_states(6)
    cache = MambaRadixCache(ledger, states)
    for key in keys:
        pages, state = ledger.alloc_pages(len(key) // page_size), states.alloc()
        done = cache.insert(key, pages, state, version=0)
        assert done.state_taken
        ledger.free_pages(pages[: done.length // page_size])  # type: ignore[index]
    return cache


def test_states_are_evicted_by_their_own_use_unless_locked() -> None:
    cache = make_mamba((1,), (2,), (1, 3))
    above = cache.match_prefix((1,)).node
    cache.match_prefix((2,))
    cache.match_prefix((1, 3))  # uses the pages of (1,) but not its state
    assert cache.evict_states(1) == 1
    assert [cache.match_prefix(key).length for key in ((1,), (2,), (1, 3))] == [0, 1, 2]
    assert cache.total_size == 3  # (1,) has become a tombstone
    with pytest.raises(ValueError, match="state of .* was evicted"):
        cache.inc_lock_ref(above)
    cache.inc_lock_ref(cache.match_prefix((1, 3)).node)
    assert cache.protected_size == 2
    assert (cache.evict_states(5), cache.evict(5)) == (1, 0)
    cache.check_integrity()


@pytest.mark.parametrize("last", ["evict_states", "evict", "reset"])
def test_chain_of_nodes_without_states_deeper_than_the_recursion_limit_is_removed(
    last: str, request: pytest.FixtureRequest
) -> None:
    """Build a conversation of one page, and thus one node, per turn, and evict its states."""
    limit = sys.getrecursionlimit()
    turns = len(inspect.stack()) + 400
    request.addfinalizer(partial(sys.setrecursionlimit, limit))
    sys.setrecursionlimit(turns - 100)
    ledger = PagedTokenToKVPoolAllocator(turns, 1, "cpu")
    cache = MambaRadixCache(ledger, states := make_states(turns))
    key = np.arange(turns, dtype=np.int32)
    for turn in range(1, turns + 1):
        match = cache.match_prefix(key[:turn])
        fresh = ledger.alloc_pages(turn - match.length)
        assert fresh is not None
        slot = states.alloc()
        cache.insert(key[:turn], np.concatenate([match.pages, fresh]), slot, version=0)
    cache.evict_states(turns - 1)
    call = getattr(cache, last)
    call() if last == "reset" else call(1)
    cache.check_integrity()
    assert (ledger.available_pages, cache.total_size) == (turns, 0)
