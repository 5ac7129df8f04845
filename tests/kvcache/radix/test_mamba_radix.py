"""MambaRadixCache: whose state goes, and what is refused. Against a model: test_radix_stateful.py."""

import pytest

from kvcache import MambaRadixCache, PagedTokenToKVPoolAllocator
from tests.helpers.kvcache.radix import Slots


def make(*keys: tuple[int, ...], page_size: int = 1) -> MambaRadixCache:
    """A cache of these keys, each with a state: slot 1 for the first."""
    ledger, slots = PagedTokenToKVPoolAllocator(24 * page_size, page_size, "cpu"), Slots(6)
    cache = MambaRadixCache(ledger, slots)
    for key in keys:
        pages, state = ledger.alloc_pages(len(key) // page_size), slots.take()
        assert pages is not None and state is not None
        done = cache.insert(key, pages, state, version=0)
        assert done.state_taken
        ledger.free_pages(pages[: done.length // page_size])
    return cache


def lengths(cache: MambaRadixCache, *keys: tuple[int, ...]) -> list[int]:
    cache.check_integrity()
    return [cache.match_prefix(key).length for key in keys]


def test_a_match_ends_at_the_deepest_state() -> None:
    cache = make((1, 2), (1, 2, 3, 4, 5, 6), page_size=2)
    assert lengths(cache, (1, 2, 3, 4), (1, 2, 3, 4, 5, 6, 7)) == [2, 6]  # inside a node: its state is for all of it
    assert cache.match_prefix((1, 2)).state == 1


def test_states_go_by_their_own_use() -> None:
    cache = make((1,), (2,), (1, 3))
    cache.match_prefix((1, 3))  # uses the pages of (1,), not its state
    assert cache.evict_states(1) == 1
    assert lengths(cache, (1,), (2,), (1, 3)) == [0, 1, 2]
    assert cache.total_size == 3  # (1,) has become a tombstone


def test_a_leaf_that_loses_its_state_goes_with_the_tombstones_above() -> None:
    cache = make((1,), (1, 2, 3), (1, 2, 4))  # (1, 2) is a tombstone from the beginning
    cache.match_prefix((1,))
    assert cache.evict_states(1) == 1
    assert lengths(cache, (1, 2, 3), (1, 2, 4)) == [1, 3]
    assert cache.evict(1) == 2  # (1, 2) led nowhere any more
    assert cache.pages().tolist() == [1] and lengths(cache, (1, 2)) == [1]


def test_a_lock_keeps_pages_of_the_path_but_one_state() -> None:
    cache = make((1,), (1, 2))
    node = cache.match_prefix((1, 2)).node
    above = cache.match_prefix((1,)).node
    cache.inc_lock_ref(node)
    assert (cache.protected_size, cache.protected_states, cache.evictable_states) == (2, 1, 1)
    assert (cache.evict_states(5), cache.evict(5)) == (1, 0)
    with pytest.raises(ValueError, match="state of .* was evicted"):
        cache.inc_lock_ref(above)
    cache.dec_lock_ref(node)
    assert cache.evict(1) == 2 and cache.total_size == 0
    cache.check_integrity()


def test_what_is_wrong_is_named() -> None:
    cache = make(page_size=2)
    for key, pages, state, text in (
        ([1, 2, 3], [1], 1, "align the key"),
        ([], [], 1, "align the key"),
        ([1, 2], [1], 0, "slots begin at 1"),
    ):
        with pytest.raises(ValueError, match=text):
            cache.insert(key, pages, state, version=0)
    with pytest.raises(ValueError, match="can't evict -1 states"):
        cache.evict_states(-1)
    assert cache.total_size == 0
