"""RadixCache: the design's cases one by one."""

import random
from array import array
from typing import Any

import numpy as np
import pytest

from kvcache.radix.keys import TOKEN_BYTES, as_run, common_prefix
from kvcache.radix.policies import FALLING, POLICIES
from tests.helpers.kvcache.radix import held, make_cache, put


def test_match_is_page_aligned_and_in_order() -> None:
    cache = make_cache(10, page_size=3)
    pages = put(cache, range_key(0, 9))
    assert cache.match_prefix(range_key(0, 9)).pages.tolist() == pages
    assert cache.match_prefix(range_key(0, 8)).length == 6  # the third page is not whole
    assert cache.match_prefix([0, 1, 2, 3, 4, 99]).pages.tolist() == pages[:1]
    assert cache.match_prefix([0, 1]).length == 0
    assert cache.match_prefix([]).pages.dtype == np.int64
    cache.check_integrity()


def range_key(start: int, stop: int) -> list[int]:
    return list(range(start, stop))


def test_insert_returns_what_was_there_and_takes_the_rest() -> None:
    cache = make_cache(10, page_size=2)
    first = put(cache, [1, 2, 3, 4])
    second = cache.allocator.alloc_pages(3)  # type: ignore[attr-defined]
    assert cache.insert([1, 2, 3, 4, 5, 6, 7], second, version=0) == 4
    cache.allocator.free_pages(second[:2])
    assert cache.match_prefix([1, 2, 3, 4, 5, 6]).pages.tolist() == [*first, second[2]]
    assert cache.allocator.available_pages == 7  # type: ignore[attr-defined]
    assert cache.insert([1], [], version=0) == 0  # less than a page: nothing to keep


@pytest.mark.parametrize(
    "kind",
    [list, tuple, lambda k: array("i", k), lambda k: array("q", k), np.asarray, lambda k: np.array(k, np.int32)],
)
def test_keys_may_be_of_any_kind_of_integers(kind: Any) -> None:
    cache = make_cache(4)
    put(cache, kind([7, 2**31 - 1, 5]))
    assert cache.match_prefix(kind([7, 2**31 - 1, 6])).length == 2


def test_a_key_is_copied() -> None:
    cache = make_cache(4)
    key, pages = np.array([1, 2, 3]), cache.allocator.alloc_pages(3)  # type: ignore[attr-defined]
    cache.insert(key, pages, version=0)
    kept = pages.copy()
    key[:], pages[:] = 9, 9
    assert cache.match_prefix([1, 2, 3]).pages.tolist() == kept.tolist()


@pytest.mark.parametrize(
    ("key", "pages", "version", "text"),
    [
        ([1, 2, 3], [1, 2], 0, "fill 1 page"),
        ([1, 2], [1], 1, "call raise_version first"),
        ([1.5, 2], [1], 0, "key must be"),
        ([[1, 2]], [1], 0, "key must be"),
        ([1, 2], [1.0], 0, "pages must be"),
        ([1, 2**31], [1], 0, "key must be integers of 32 bits"),
        (np.array([1, 2**31]), [1], 0, "key must be integers of 32 bits, got 1 to 2147483648"),
        (np.array([-(2**31) - 1, 1]), [1], 0, "key must be integers of 32 bits"),
        (np.array([1, 2**32 - 1], np.uint32), [1], 0, "key must be integers of 32 bits"),
    ],
)
def test_a_wrong_insert_raises_and_changes_nothing(key: Any, pages: Any, version: int, text: str) -> None:
    cache = make_cache(4, page_size=2)
    with pytest.raises(ValueError, match=text):
        cache.insert(key, pages, version=version)
    assert cache.total_size == 0 and not cache._current.roots


def test_pages_that_are_read_late_are_those_of_the_match() -> None:
    cache = make_cache(10)
    pages = put(cache, [1, 2, 3, 4])
    match = cache.match_prefix([1, 2, 3, 4])
    put(cache, [1, 2, 9])  # splits after 2
    cache.evict(5)
    assert match.pages.tolist() == pages and match.pages is match.pages


def test_a_split_keeps_locks_and_handles() -> None:
    cache = make_cache(10)
    put(cache, [1, 2, 3, 4])
    whole = cache.match_prefix([1, 2, 3, 4]).node
    cache.inc_lock_ref(whole)
    put(cache, [1, 2, 9])  # splits after 2
    assert (cache.protected_size, cache.evictable_size) == (4, 1)
    cache.dec_lock_ref(whole)
    assert cache.protected_size == 0
    cache.check_integrity()
    cache.inc_lock_ref(cache.match_prefix([1, 2]).node)
    assert cache.protected_size == 2
    assert cache.evict(100) == 3
    assert held(cache, [1, 2, 3]) == 2
    cache.check_integrity()


def test_locks_are_checked() -> None:
    cache = make_cache(10)
    put(cache, [1, 2])
    put(cache, [1, 3])
    above, leaf = cache.match_prefix([1]).node, cache.match_prefix([1, 2]).node
    with pytest.raises(ValueError, match="no lock of its own"):
        cache.dec_lock_ref(leaf)
    cache.inc_lock_ref(leaf)
    with pytest.raises(ValueError, match="no lock of its own"):
        cache.dec_lock_ref(above)  # locked, but by the leaf
    cache.check_integrity()
    cache.dec_lock_ref(leaf)
    cache.evict(3)
    with pytest.raises(ValueError, match="was evicted since"):
        cache.inc_lock_ref(leaf)
    nothing = cache.match_prefix([5]).node
    cache.inc_lock_ref(nothing)  # a miss has nothing to keep
    cache.dec_lock_ref(nothing)
    assert cache.protected_size == 0


def test_namespaces_share_nothing() -> None:
    cache = make_cache(10)
    put(cache, [1, 2], salt="lora")
    assert cache.match_prefix([1, 2]).length == 0
    assert cache.match_prefix([1, 2], extra_key="other").length == 0
    assert cache.match_prefix([1, 2], extra_key="lora").length == 2
    assert list(cache._current.roots) == ["lora"]  # misses leave nothing behind
    cache.evict(2)
    assert not cache._current.roots


def test_a_new_version_hits_nothing_and_old_entries_go_first() -> None:
    cache = make_cache(10)
    put(cache, [1, 2])
    put(cache, [5, 6])
    request = cache.match_prefix([5, 6]).node
    cache.inc_lock_ref(request)
    cache.raise_version(3)
    assert cache.match_prefix([1, 2]).length == 0
    fresh = put(cache, [1, 2])
    assert (cache.evictable_size, cache.protected_size) == (4, 2)
    assert cache.evict(1) == 2  # the old [1, 2]
    assert cache.match_prefix([1, 2]).pages.tolist() == fresh
    cache.dec_lock_ref(request)
    assert cache.evict(1) == 2  # the old [5, 6], though the fresh [1, 2] was used before it was unlocked
    assert held(cache, [1, 2]) == 2
    assert not cache._garbage
    cache.check_integrity()


def test_what_old_weights_computed_is_not_taken() -> None:
    cache = make_cache(4)
    cache.raise_version(1)
    pages = cache.allocator.alloc_pages(2)  # type: ignore[attr-defined]
    assert cache.insert([1, 2], pages, version=0) == 2
    cache.allocator.free_pages(pages)
    assert cache.total_size == 0
    for version in (1, 0):
        with pytest.raises(ValueError, match="only grow"):
            cache.raise_version(version)


def test_raising_the_version_walks_nothing() -> None:
    cache = make_cache(400)
    for token in range(400):
        put_quietly(cache, token)
    cache._current.nodes = None  # type: ignore[method-assign,assignment]
    old = cache._current
    cache.raise_version(1)
    assert cache._garbage == {0: old} and len(old.leaves) == 400


def put_quietly(cache: Any, token: int) -> None:
    cache.insert([token], cache.allocator.alloc_pages(1), version=cache.version)


def test_reset_gives_all_pages_back_unless_some_are_locked() -> None:
    cache = make_cache(4)
    put(cache, [1, 2])
    cache.raise_version(1)
    put(cache, [1, 3])
    node = cache.match_prefix([1, 3]).node
    cache.inc_lock_ref(node)
    with pytest.raises(ValueError, match="2 tokens are locked"):
        cache.reset()
    cache.dec_lock_ref(node)
    cache.reset()
    assert (cache.total_size, cache.version) == (0, 1)
    assert cache.allocator.available_pages == 4  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="evicted"):
        cache.inc_lock_ref(node)
    cache.check_integrity()


def test_an_evicted_page_stays_with_the_sequence_that_shares_it() -> None:
    cache = make_cache(2)
    pages = put(cache, [1, 2])
    cache.allocator.share(pages[:1])  # type: ignore[attr-defined]
    assert cache.evict(2) == 2
    assert cache.allocator.available_pages == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(("policy", "victim"), [("lru", 2), ("mru", 1), ("fifo", 1), ("lfu", 3), ("priority", 2)])
def test_policies(policy: str, victim: int) -> None:
    cache = make_cache(4, policy=policy)
    for token, priority in ((1, 5), (2, 0), (3, 1)):
        put(cache, [token], priority=priority)
    for token in (1, 2, 2, 3, 1):
        cache.match_prefix([token])
    cache.evict(1)
    assert [token for token in (1, 2, 3) if not held(cache, [token])] == [victim]


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="no eviction policy 'best'; there are lru"):
        make_cache(1, policy="best")
    with pytest.raises(ValueError, match="can't evict -1"):
        make_cache(1).evict(-1)


@pytest.mark.parametrize("policy", POLICIES)
def test_victims_are_those_of_a_full_scan(policy: str) -> None:
    dice = random.Random(1)
    cache = make_cache(200, policy=policy)
    for _ in range(600):
        key = [dice.randint(0, 2) for _ in range(dice.randint(1, 7))]
        if dice.random() < 0.5:
            cache.match_prefix(key)
        elif cache.total_size < 150:
            put(cache, key, priority=dice.randint(0, 3))
        if dice.random() < 0.3 and cache.total_size:
            leaves = {n: POLICIES[policy](n) for n in cache._current.nodes() if not n.children}
            cache.evict(1)
            gone = [node for node in leaves if node.parent is None]
            assert len(gone) == 1 and leaves[gone[0]] == min(leaves.values())
    cache.check_integrity()


def test_the_heap_stays_in_proportion_to_the_leaves() -> None:
    cache = make_cache(50, policy="mru")  # the only one whose entries are replaced by matches
    for token in range(50):
        put_quietly(cache, token)
    for _ in range(200):
        for token in range(50):
            cache.match_prefix([token])
    assert 50 < len(cache._current.leaves._heap) <= 2 * 50 + 64


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy not in FALLING])
def test_a_match_leaves_the_heap_alone(policy: str) -> None:
    cache = make_cache(3, policy=policy)
    for token in range(3):
        put(cache, [token])
    before = list(cache._current.leaves._heap)
    cache.match_prefix([0])
    assert cache._current.leaves._heap == before
    assert cache.evict(1) == 1
    assert held(cache, [0]) == (policy != "fifo")  # put right when it came up
    cache.check_integrity()


@pytest.mark.parametrize("length", [0, 1, 255, 256, 257, 2304, 2305, 50_000])
def test_common_prefix_at_every_stretch(length: int) -> None:
    a = np.arange(50_001, dtype=np.int32)
    b = a.copy()
    b[length] = -1
    agree = length * TOKEN_BYTES
    assert common_prefix(a.tobytes(), as_run(b, "b")) == common_prefix(b.tobytes(), as_run(a[:50_000], "a")) == agree
    assert common_prefix(a[:length].tobytes(), as_run(a, "a")) == agree
    assert common_prefix(a.tobytes(), as_run(a[:length], "a")) == agree


def test_keys_of_any_layout_and_type() -> None:
    cache = make_cache(20, page_size=2)
    every = np.arange(40)
    put(cache, every[::2].tolist())
    for key in (every[::2], every[::2].astype(np.int32), tuple(every[::2].tolist()), every[::-1][1::2][::-1]):
        assert cache.match_prefix(key).length == 20
    assert cache.match_prefix(every[::2][:7]).length == 6
    mine = every[::2].copy()
    node = cache.match_prefix(mine).node
    mine[:] = -1  # the cache has a copy
    assert cache.match_prefix(every[::2]).node is node


@pytest.mark.parametrize("break_it", ["counter", "lock", "page", "queue", "rank", "free"])
def test_check_integrity_notices(break_it: str) -> None:
    cache = make_cache(9)
    put(cache, [1, 2, 3])
    put(cache, [1, 5])
    node = cache.match_prefix([1, 2, 3]).node
    if break_it == "counter":
        cache._evictable += 1
    elif break_it == "lock":
        node.lock_ref += 1
    elif break_it == "page":
        node.pages[0] = cache.match_prefix([1]).pages[0]
    elif break_it == "queue":
        cache._current.leaves.discard(node)
    elif break_it == "rank":
        node.last_access = 0  # its entry would come up too late
    else:
        cache.allocator.free_pages(node.pages)
    with pytest.raises(AssertionError):
        cache.check_integrity()
