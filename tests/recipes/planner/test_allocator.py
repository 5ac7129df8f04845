"""The caching allocator: by hand where torch's rules are known, and what must always hold."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.planner.allocator import MIB, CachingAllocator


@pytest.mark.parametrize(
    ("nbytes", "taken"),
    [(1, 2), (MIB, 2), (MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (10 * MIB + 1, 12), (33 * MIB, 34)],
)
def test_a_first_request_takes_a_segment_of_torchs_size(nbytes: int, taken: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate("a", nbytes)
    assert allocator.reserved == allocator.peak == taken * MIB


def test_a_freed_block_serves_the_next_request_and_the_rest_of_it_another() -> None:
    allocator = CachingAllocator()
    allocator.allocate("a", 40 * MIB)
    allocator.free("a")
    allocator.allocate("b", 30 * MIB)
    allocator.allocate("c", 10 * MIB)
    assert allocator.reserved == 40 * MIB
    allocator.allocate("d", 10 * MIB)
    assert allocator.reserved == 50 * MIB


def test_less_than_a_mebibyte_is_not_split_off_a_large_block() -> None:
    allocator = CachingAllocator()
    allocator.allocate("a", 40 * MIB)
    allocator.free("a")
    allocator.allocate("b", 39 * MIB)
    allocator.allocate("c", MIB + 512)  # the mebibyte beside it is lost to it
    assert allocator.reserved == 60 * MIB


def test_the_smallest_block_that_suffices_is_taken() -> None:
    allocator = CachingAllocator()
    for name, size in (("a", 60), ("b", 40)):
        allocator.allocate(name, size * MIB)
    for name in ("a", "b"):
        allocator.free(name)
    allocator.allocate("c", 40 * MIB)
    allocator.allocate("d", 60 * MIB)
    assert allocator.reserved == 100 * MIB


def test_free_neighbours_become_one() -> None:
    allocator = CachingAllocator()
    allocator.allocate("whole", 60 * MIB)
    allocator.free("whole")
    for name in "abc":
        allocator.allocate(name, 20 * MIB)
    for name in "acb":
        allocator.free(name)
    allocator.allocate("again", 60 * MIB)
    assert allocator.reserved == 60 * MIB


def test_a_stream_is_not_served_from_anothers_cache() -> None:
    allocator = CachingAllocator()
    allocator.allocate("a", 40 * MIB, stream=0)
    allocator.free("a")
    allocator.allocate("b", 40 * MIB, stream=1)
    assert allocator.reserved == 80 * MIB


def test_one_small_block_keeps_a_whole_segment() -> None:
    """Why torch's cache is emptied together with cuBLAS's workspaces."""
    allocator = CachingAllocator()
    allocator.allocate("logits", 2374 * MIB)
    allocator.free("logits")
    allocator.allocate("workspace", 32 * MIB)
    allocator.empty_cache()
    assert allocator.reserved == 2374 * MIB
    allocator.free("workspace")
    allocator.empty_cache()
    assert allocator.reserved == 0


steps = st.lists(
    st.tuples(st.integers(0, 7), st.sampled_from([300, MIB, 3 * MIB, 11 * MIB + 5]), st.integers(0, 1)), max_size=60
)


@settings(max_examples=80)
@given(steps, st.booleans())
def test_what_is_held_covers_what_lives_and_all_of_it_comes_back(
    requests: list[tuple[int, int, int]], empty: bool
) -> None:
    allocator, most = CachingAllocator(), 0
    live: dict[int, int] = {}
    for key, size, stream in requests:
        if key in live:
            allocator.free(key)
            del live[key]
        else:
            allocator.allocate(key, size, stream)
            live[key] = size
        if empty:
            allocator.empty_cache()
        most = max(most, allocator.reserved)
        assert allocator.reserved >= sum(live.values())
        assert allocator.peak >= most
    for key in live:
        allocator.free(key)
    allocator.empty_cache()
    assert allocator.reserved == 0
