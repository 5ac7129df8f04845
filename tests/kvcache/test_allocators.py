"""Page ledgers: worked steps, mistakes, failing devices, error texts. Against a model: test_ledgers_stateful.py."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvcache import PagedTokenToKVPoolAllocator, SWATokenToKVPoolAllocator, TokenToKVPoolAllocator
from kvcache.allocators.base import Int64Array
from memsaver import MemorySaver
from tests.helpers.kvcache.blocks import DEVICE, ledger_state, make_pool


def one(pages: int, page_size: int) -> PagedTokenToKVPoolAllocator:
    return PagedTokenToKVPoolAllocator(pages * page_size, page_size, DEVICE)


def two(pages: int, swa_pages: int, page_size: int) -> SWATokenToKVPoolAllocator:
    return SWATokenToKVPoolAllocator(pages * page_size, swa_pages * page_size, page_size, DEVICE)


def ids(loc: torch.Tensor | None) -> list[int]:
    assert loc is not None
    assert loc.dtype == torch.int64
    assert loc.device.type == DEVICE
    return loc.tolist()


def fail(*_: object) -> None:
    raise torch.OutOfMemoryError("full")


def test_pages_go_out_whole_ascending_and_never_page_0() -> None:
    allocator = one(3, 4)
    first = allocator.alloc(8)
    assert ids(first) == [4, 5, 6, 7, 8, 9, 10, 11]
    assert ids(allocator.alloc(0)) == []
    assert allocator.alloc(8) is None and ids(allocator.alloc(4)) == [12, 13, 14, 15]
    assert first is not None
    allocator.free(first)  # device ids: synchronises
    allocator.free([13])  # one token names its page
    allocator.free([])
    allocator.free(torch.empty(0, dtype=torch.int64, device=DEVICE))
    assert (allocator.available_pages, allocator.available_size()) == (3, 12)
    tokens = TokenToKVPoolAllocator(5, DEVICE)
    assert sorted(ids(tokens.alloc(5))) == [1, 2, 3, 4, 5]
    tokens.free(np.array([5, 2], dtype=np.int32))
    # a new token needs no neighbour of the last one
    assert sorted(ids(tokens.alloc_extend([3, 0], [4, 1], [4, -1], 2))) == [2, 5]


def test_extend_of_a_mixed_batch() -> None:
    allocator = one(8, 3)  # a page size that is no power of two
    a = ids(allocator.alloc_extend([0], [3], [-1], 3))  # page 1, full
    b = ids(allocator.alloc_extend([0], [1], [-1], 1))  # page 2, one token
    # prefix on a page boundary, no growth at all, growth within the page, a new request, prefix 0 == seq
    prefix, seq = [3, 2, 1, 0, 0], [5, 2, 3, 4, 0]
    last = [a[-1], 10, b[-1], -1, -1]
    got = ids(allocator.alloc_extend(prefix, seq, last, 8))
    assert got == [9, 10, 7, 8, 12, 13, 14, 15]
    assert allocator.available_pages == 3
    assert ids(allocator.alloc_extend([], [], [], 0)) == []
    # tensors will do; the partial page costs nothing
    assert ids(allocator.alloc_decode(np.array([6, 4]), torch.tensor([got[1], got[3]]))) == [11, 18]


def test_issued_pages_stay_what_they_were() -> None:
    allocator = one(4, 2)
    pages = allocator.alloc_pages(3)
    assert pages is not None
    before = pages.tolist()
    allocator.free_pages(pages[:2])
    assert pages.tolist() == before


def three_pages() -> PagedTokenToKVPoolAllocator:
    return one(3, 4)


def three_of_four_pages() -> SWATokenToKVPoolAllocator:
    """The first of them has left the window."""
    allocator = two(4, 4, 2)
    allocator.alloc(6)
    allocator.free_swa([2, 3])
    return allocator


MISTAKES: list[tuple[Callable[[], Any], Callable[[Any], object], str]] = [
    (three_pages, lambda a: a.alloc(3), "multiple of page_size 4"),
    (three_pages, lambda a: a.alloc(-4), "multiple of page_size 4"),
    (three_pages, lambda a: a.alloc_pages(-1), "count >= 0"),
    (three_pages, lambda a: a.alloc_extend([2], [1], [5], -1), "can't go from 2 to 1 tokens"),
    (three_pages, lambda a: a.alloc_extend([-4], [1], [-1], 5), "can't go from -4"),
    (three_pages, lambda a: a.alloc_extend([2], [3], [6], 1), "last_loc 6"),
    (three_pages, lambda a: a.alloc_extend([2], [3], [5], 1), "last_loc is in page 1, which is free"),
    (three_pages, lambda a: a.alloc_extend([0], [3], [-1], 2), "extend_num_tokens is 2, but the lengths grow by 3"),
    (three_pages, lambda a: a.alloc_extend([0, 0], [3], [-1], 3), "2 prefix_lens, 1 seq_lens"),
    (three_pages, lambda a: a.alloc_extend([0.5], [3], [-1], 3), "prefix_lens must be one-dimensional integers"),
    (three_pages, lambda a: a.alloc_decode([[1]], [-1]), "one-dimensional"),
    (three_pages, lambda a: a.alloc_decode([0], [-1]), "can't go from -1"),
    (three_pages, lambda a: a.alloc_decode(torch.empty(1, device="meta"), [-1]), "the ledger is on the CPU"),
    (three_pages, lambda a: a.share([1]), "page 1 is free and can't be shared"),
    (three_pages, lambda a: a.share([0]), "page 0 was never issued"),
    (three_pages, lambda a: a.free([2]), "page 0 is padding"),
    (three_pages, lambda a: a.free([-1]), "never issued"),
    (three_pages, lambda a: a.free_pages([4]), "page 4 was never issued: pages are 1..3"),
    (three_of_four_pages, lambda a: a.free_swa([4, 5, 6]), "names 1 of the 2 tokens of page 3"),
    (three_of_four_pages, lambda a: a.free_swa([4, 5, 4]), "double free of token 4"),
    (three_of_four_pages, lambda a: a.free_swa([2, 3]), "double free of the window slots of page 1: 0 owner"),
    (three_of_four_pages, lambda a: a.free_swa_pages([2, 3, 2]), "double free of the window slots of page 2: 1 owner"),
    (three_of_four_pages, lambda a: a.free_swa([0, 1]), "page 0 was never issued"),
    (three_of_four_pages, lambda a: a.free_swa([8, 9]), "window slots of page 4"),
    (three_of_four_pages, lambda a: a.free([2, 3, 8]), "double free of page 4"),
    (three_of_four_pages, lambda a: a.free_pages([3, 3]), "double free of page 3"),
    (three_of_four_pages, lambda a: a.share([2, 4]), "page 4 is free"),
    (three_of_four_pages, lambda a: a.alloc_decode([2], [2]), "page 1, whose window slots were freed"),
    (three_of_four_pages, lambda a: a.alloc_decode([2], [8]), "page 4, which is free"),
]


@pytest.mark.parametrize("grouped", [False, True])
def test_mistakes_raise_and_change_nothing(grouped: bool) -> None:
    for make, call, message in MISTAKES:
        allocator = make()
        if grouped:
            allocator.free_group_begin()
        before = ledger_state(allocator)
        with pytest.raises(ValueError, match=message):
            call(allocator)
        assert ledger_state(allocator) == before, message
        allocator.check_integrity()


@pytest.mark.parametrize(("size", "page_size"), [(0, 4), (7, 4), (8, 0), (4, 8)])
def test_sizes_must_be_whole_pages(size: int, page_size: int) -> None:
    for make in (
        lambda: PagedTokenToKVPoolAllocator(size, page_size, DEVICE),
        lambda: SWATokenToKVPoolAllocator(size, 8, page_size, DEVICE),
        lambda: SWATokenToKVPoolAllocator(8, size, page_size, DEVICE),
    ):
        with pytest.raises(ValueError, match="multiple of page_size"):
            make()


def test_groups_do_not_nest() -> None:
    allocator = TokenToKVPoolAllocator(2, DEVICE)
    with pytest.raises(ValueError, match="no free group is open"):
        allocator.free_group_end()
    allocator.free_group_begin()
    with pytest.raises(ValueError, match="open already"):
        allocator.free_group_begin()
    allocator.free_group_end()
    allocator.free_group_begin()


def test_nothing_is_taken_when_the_device_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = one(3, 4)
    allocator.alloc(12)
    allocator.free_pages([2])
    allocator.free_pages([1])
    before = ledger_state(allocator)
    monkeypatch.setattr("kvcache.allocators.base.expand_pages", fail)
    with pytest.raises(torch.OutOfMemoryError):
        allocator.alloc(8)
    assert ledger_state(allocator) == before
    allocator.check_integrity()


def test_a_failing_device_leaves_both_ledgers_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = two(4, 3, 2)
    loc = allocator.alloc(4)
    assert loc is not None
    before = ledger_state(allocator)
    for where in ("base.expand_pages", "swa.to_device"):
        with monkeypatch.context() as patch:
            patch.setattr(f"kvcache.allocators.{where}", fail)
            with pytest.raises(torch.OutOfMemoryError):
                allocator.alloc(2)
            if where == "swa.to_device":
                for call in (allocator.free, allocator.free_swa):
                    with pytest.raises(torch.OutOfMemoryError):
                        call(loc.tolist())
        assert ledger_state(allocator) == before
    allocator.free_group_begin()
    allocator.free([2])
    with monkeypatch.context() as patch:
        patch.setattr("kvcache.allocators.swa.to_device", fail)
        with pytest.raises(torch.OutOfMemoryError):
            allocator.free_group_end()
    allocator.check_integrity()
    allocator.free_group_end()
    assert allocator.swa.available_pages == 2
    allocator.check_integrity()


class LosesPages(PagedTokenToKVPoolAllocator):
    def _give_back(self, pages: Int64Array) -> None:
        pass


@pytest.mark.parametrize("harm", ["lost", "twice", "owned", "outside", "negative"])
def test_check_integrity_sees_a_damaged_ledger(harm: str) -> None:
    allocator = LosesPages(12, 4, DEVICE) if harm == "lost" else one(3, 4)
    allocator.alloc(4)
    allocator.check_integrity()
    times = {"lost": [1], "negative": [2]}.get(harm, [0])  # no owner is dropped of a page without owners: freed again
    allocator.drop(np.array([{"lost": 1, "negative": 1, "outside": 0}.get(harm, 2)]), np.array(times))
    if harm == "owned":
        allocator.alloc_pages(1)  # page 2, which is free a second time
    with pytest.raises(AssertionError):
        allocator.check_integrity()


@pytest.mark.parametrize(
    "harm",
    [
        lambda a: a.full_to_swa_index_mapping[3].zero_(),
        lambda a: a.full_to_swa_index_mapping[0].fill_(2),
        lambda a: a.swa.alloc_pages(1),  # a window page without a full page
        lambda a: a.swa.free_pages([1]),  # or the reverse
        lambda a: a.swa.share([1]),  # more window owners than owners
    ],
)
def test_check_integrity_sees_two_ledgers_that_disagree(harm: Callable[[SWATokenToKVPoolAllocator], object]) -> None:
    allocator = two(3, 3, 2)
    allocator.alloc(4)
    allocator.check_integrity()
    harm(allocator)
    with pytest.raises(AssertionError):
        allocator.check_integrity()


def test_freeing_does_not_look_at_the_whole_pool() -> None:
    """The same frees in a pool 4,096 times as large: reading all of it once a free would take over 1,000 times as
    long as a free does."""

    def seconds(size: int) -> float:
        allocator = TokenToKVPoolAllocator(size, DEVICE)
        allocator.alloc_pages(512)
        best = float("inf")
        for first in range(1, 513, 128):
            start = time.thread_time()  # of this thread's CPU: others may be busy
            for token in range(first, first + 128):
                allocator.free([token])
            best = min(best, time.thread_time() - start)
        return best

    assert seconds(2**22) < 20 * seconds(2**10)


def test_shortage_names_the_request_and_what_is_missing() -> None:
    paged = one(3, 4)
    paged.alloc(4)
    assert paged.shortage("request 0.3", 5) == (
        "request 0.3 needs 5 more page(s) of 4 tokens, 2 of 3 are free: 3 page(s) (12 tokens) are missing; "
        "end or preempt a request, or make the pool larger"
    )
    allocator = two(4, 2, 3)
    allocator.alloc(3)
    text = allocator.shortage("request 7", 3)
    assert text.startswith("sliding-window attention: request 7 needs 3 more page(s) of 3 tokens, 1 of 2 are free")
    assert "2 page(s) (6 tokens) are missing" in text
    assert "full attention" not in text
    assert "full attention: request 7 needs 9" in allocator.shortage("request 7", 9)


# ---------------------------------------------------------------- two pools


def test_ledgers_and_mapping_work_while_the_pools_are_paused() -> None:
    saver = MemorySaver(device="cuda:0" if DEVICE == "cuda" else "cpu")
    try:
        allocator = two(8, 4, 4)
        make_pool(32, 4, saver), make_pool(16, 4, saver)
        loc = allocator.alloc(8)
        assert loc is not None
        saver.pause("kv_cache")
        allocator.check_integrity()
        allocator.free_swa(loc[:4])
        more = allocator.alloc(4)
        assert more is not None and allocator.to_swa(more.view(2, 2)).tolist() == [[4, 5], [6, 7]]
        assert (allocator.full_available_size(), allocator.swa_available_size(), allocator.available_size()) == (
            20,
            8,
            8,
        )
        saver.resume("kv_cache")
        allocator.check_integrity()
        assert allocator.to_swa(loc).tolist() == [0, 0, 0, 0, 8, 9, 10, 11]
    finally:
        saver.close()
