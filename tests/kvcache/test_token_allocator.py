"""Single tokens, and what both single-pool ledgers share: grouped frees, cost of freeing, error texts."""

import time

import numpy as np
import pytest
import torch

from kvcache import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from tests.helpers.kvcache.blocks import DEVICE, ledger_state


def test_tokens_are_1_to_size_and_never_0() -> None:
    allocator = TokenToKVPoolAllocator(5, DEVICE)
    first, second = allocator.alloc(2), allocator.alloc(3)
    assert first is not None and second is not None
    assert first.dtype == torch.int64 and first.device == allocator.device
    assert sorted(first.tolist() + second.tolist()) == [1, 2, 3, 4, 5]
    before = ledger_state(allocator)
    assert allocator.alloc(1) is None
    assert ledger_state(allocator) == before
    allocator.free(first)  # device ids: synchronises
    allocator.free(second.cpu())
    assert allocator.available_size() == 5
    allocator.check_integrity()


def test_nothing_is_a_no_op() -> None:
    allocator = TokenToKVPoolAllocator(2, DEVICE)
    before = ledger_state(allocator)
    loc = allocator.alloc(0)
    assert loc is not None and loc.tolist() == []
    allocator.free([])
    allocator.free(torch.empty(0, dtype=torch.int64, device=DEVICE))
    assert ledger_state(allocator) == before
    full = allocator.alloc(2)
    assert full is not None and allocator.alloc(0) is not None


def test_any_tokens_come_back() -> None:
    allocator = TokenToKVPoolAllocator(6, DEVICE)
    allocator.alloc(6)
    allocator.free(np.array([5, 2], dtype=np.int32))
    assert allocator.ref_counts([1, 2, 3, 4, 5, 6]).tolist() == [1, 0, 1, 1, 0, 1]
    loc = allocator.alloc_extend([3, 0], [4, 1], [4, -1], 2)  # a new token needs no neighbour of the last one
    assert loc is not None and sorted(loc.tolist()) == [2, 5]


@pytest.mark.parametrize("ids", [[3], [1, 2, 3], [1, 1], [2, 1, 2], [0], [5], [-1]])
@pytest.mark.parametrize("grouped", [False, True])
def test_double_free_raises_at_once_and_changes_nothing(ids: list[int], grouped: bool) -> None:
    allocator = TokenToKVPoolAllocator(4, DEVICE)
    allocator.alloc(4)
    if grouped:
        allocator.free_group_begin()
    allocator.free([3])
    before = ledger_state(allocator)
    with pytest.raises(ValueError, match="double free|never issued"):
        allocator.free(ids)
    assert ledger_state(allocator) == before
    if grouped:
        allocator.free_group_end()
    assert allocator.available_size() == 1
    allocator.check_integrity()


@pytest.mark.parametrize("page_size", [1, 3])
def test_a_group_gives_its_pages_back_at_its_end(page_size: int) -> None:
    allocator = PagedTokenToKVPoolAllocator(3 * page_size, page_size, DEVICE)
    loc = allocator.alloc(3 * page_size)
    assert loc is not None
    allocator.share([1])
    allocator.free_group_begin()
    allocator.free(loc[:page_size])
    allocator.free_pages([2, 1])
    assert (allocator.available_pages, allocator.alloc_pages(1)) == (0, None)
    assert allocator.ref_counts([1, 2, 3]).tolist() == [0, 0, 1]
    allocator.check_integrity()
    allocator.free_group_end()
    pages = allocator.alloc_pages(2)
    assert pages is not None and sorted(pages.tolist()) == [1, 2]
    allocator.check_integrity()


def test_groups_do_not_nest() -> None:
    allocator = TokenToKVPoolAllocator(2, DEVICE)
    with pytest.raises(ValueError, match="no free group is open"):
        allocator.free_group_end()
    allocator.free_group_begin()
    with pytest.raises(ValueError, match="open already"):
        allocator.free_group_begin()
    allocator.free_group_end()
    allocator.free_group_begin()


def test_freeing_does_not_look_at_the_whole_pool() -> None:
    """The same frees in a pool 4,096 times as large: reading all of it once a free would take over 1,000 times as
    long as a free does."""

    def seconds(size: int) -> float:
        allocator = TokenToKVPoolAllocator(size, DEVICE)
        allocator.alloc_pages(512)
        best = float("inf")
        for first in range(1, 513, 128):
            start = time.perf_counter()
            for token in range(first, first + 128):
                allocator.free([token])
            best = min(best, time.perf_counter() - start)
        return best

    assert seconds(2**22) < 20 * seconds(2**10)


def test_shortage_names_the_request_and_what_is_missing() -> None:
    allocator = PagedTokenToKVPoolAllocator(12, 4, DEVICE)
    allocator.alloc(4)
    assert allocator.shortage("request 0.3", 5) == (
        "request 0.3 needs 5 more page(s) of 4 tokens, 2 of 3 are free: 3 page(s) (12 tokens) are missing; "
        "end or preempt a request, or make the pool larger"
    )


def test_a_released_sequence_can_not_grow() -> None:
    allocator = PagedTokenToKVPoolAllocator(12, 4, DEVICE)
    loc = allocator.alloc_extend([0], [6], [-1], 6)
    assert loc is not None
    allocator.free(loc)
    before = ledger_state(allocator)
    with pytest.raises(ValueError, match="last_loc is in page 2, which is free"):
        allocator.alloc_decode([7], loc[-1:].cpu())
    assert ledger_state(allocator) == before
