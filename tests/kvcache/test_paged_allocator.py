from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvcache import PagedTokenToKVPoolAllocator
from tests.helpers.kvcache.blocks import DEVICE, ledger_state


def make(pages: int, page_size: int) -> PagedTokenToKVPoolAllocator:
    return PagedTokenToKVPoolAllocator(pages * page_size, page_size, DEVICE)


def ids(loc: torch.Tensor | None) -> list[int]:
    assert loc is not None
    assert loc.dtype == torch.int64
    assert loc.device.type == DEVICE
    return loc.tolist()


def test_alloc_gives_whole_pages_and_never_page_0() -> None:
    allocator = make(3, 4)
    assert ids(allocator.alloc(8)) == [4, 5, 6, 7, 8, 9, 10, 11]
    assert allocator.available_size() == 4
    assert ids(allocator.alloc(0)) == []
    before = ledger_state(allocator)
    assert allocator.alloc(8) is None
    assert ledger_state(allocator) == before
    assert ids(allocator.alloc(4)) == [12, 13, 14, 15]
    allocator.check_integrity()


def test_page_size_one_issues_1_to_size() -> None:
    allocator = make(5, 1)
    assert sorted(ids(allocator.alloc(5))) == [1, 2, 3, 4, 5]
    assert allocator.alloc(1) is None


def test_extend_fills_the_partial_page_then_whole_pages_then_a_partial_one() -> None:
    allocator = make(8, 4)
    (first,) = ids(allocator.alloc_extend([0], [1], [-1], 1))
    assert first == 4
    got = ids(allocator.alloc_extend([1], [10], [first], 9))
    assert got == [5, 6, 7, 8, 9, 10, 11, 12, 13]
    assert allocator.available_pages == 5


def test_extend_of_a_mixed_batch() -> None:
    allocator = make(8, 3)  # a page size that is no power of two
    a = ids(allocator.alloc_extend([0], [3], [-1], 3))  # page 1, full
    b = ids(allocator.alloc_extend([0], [1], [-1], 1))  # page 2, one token
    # prefix on a page boundary, no growth at all, growth within the page, a new request, prefix 0 == seq
    prefix, seq = [3, 2, 1, 0, 0], [5, 2, 3, 4, 0]
    last = [a[-1], 10, b[-1], -1, -1]
    got = ids(allocator.alloc_extend(prefix, seq, last, 8))
    assert got == [9, 10, 7, 8, 12, 13, 14, 15]
    assert allocator.available_pages == 3


def test_extend_that_does_not_fit_changes_nothing() -> None:
    allocator = make(3, 4)
    last = ids(allocator.alloc_extend([0], [6], [-1], 6))[-1]
    before = ledger_state(allocator)
    assert allocator.alloc_extend([6, 0], [9, 1], [last, -1], 4) is None
    assert ledger_state(allocator) == before
    # the rest of its page costs nothing, so this fits
    assert ids(allocator.alloc_extend([6, 0], [8, 1], [last, -1], 3)) == [10, 11, 12]
    assert allocator.available_pages == 0
    assert ids(allocator.alloc_extend([8, 1], [8, 3], [11, 12], 2)) == [13, 14]


def test_empty_batch() -> None:
    assert ids(make(2, 4).alloc_extend([], [], [], 0)) == []


def test_decode_takes_a_page_only_past_a_boundary() -> None:
    allocator = make(4, 4)
    last = ids(allocator.alloc_extend([0, 0], [4, 2], [-1, -1], 6))
    got = ids(allocator.alloc_decode(np.array([5, 3]), torch.tensor([last[3], last[5]])))
    assert got == [12, 10]
    assert allocator.available_pages == 1
    assert ids(allocator.alloc_decode([6, 4], got)) == [13, 11]
    before = ledger_state(allocator)
    assert allocator.alloc_decode([9, 5], [15, 11]) is None
    assert ledger_state(allocator) == before


def test_reference_counts() -> None:
    allocator = make(3, 2)
    loc = allocator.alloc(4)
    assert loc is not None
    allocator.share([1, 2, 2])
    assert allocator.ref_counts([1, 2, 3]).tolist() == [2, 3, 0]
    allocator.free(loc)  # device ids: synchronises
    allocator.free([3])  # one token names its page
    assert allocator.ref_counts([1, 2]).tolist() == [0, 2]
    assert allocator.available_pages == 2
    allocator.free_pages([2, 2])
    assert allocator.available_pages == 3
    allocator.check_integrity()


@pytest.mark.parametrize("free", [lambda a: a.free([2]), lambda a: a.free_pages([2, 1, 2]), lambda a: a.free([4, 6])])
def test_double_free_raises_and_drops_nothing(free: Callable[[PagedTokenToKVPoolAllocator], None]) -> None:
    allocator = make(3, 2)
    allocator.alloc(6)
    allocator.free_pages([1])
    allocator.free_pages([3])
    before = ledger_state(allocator)
    with pytest.raises(ValueError, match="double free of page"):
        free(allocator)
    assert ledger_state(allocator) == before


def test_issued_pages_stay_what_they_were() -> None:
    allocator = make(4, 2)
    pages = allocator.alloc_pages(3)
    assert pages is not None
    before = pages.tolist()
    allocator.free_pages(pages[:2])
    assert pages.tolist() == before


def test_freeing_nothing_is_a_no_op() -> None:
    allocator = make(2, 2)
    allocator.free([])
    allocator.free(torch.empty(0, dtype=torch.int64, device=DEVICE))
    assert allocator.available_pages == 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: a.alloc(3), "multiple of page_size 4"),
        (lambda a: a.alloc(-4), "multiple of page_size 4"),
        (lambda a: a.alloc_pages(-1), "count >= 0"),
        (lambda a: a.alloc_extend([2], [1], [5], -1), "can't go from 2 to 1 tokens"),
        (lambda a: a.alloc_extend([-4], [1], [-1], 5), "can't go from -4"),
        (lambda a: a.alloc_extend([2], [3], [6], 1), "last_loc 6"),
        (lambda a: a.alloc_extend([0], [3], [-1], 2), "extend_num_tokens is 2, but the lengths grow by 3"),
        (lambda a: a.alloc_extend([0, 0], [3], [-1], 3), "2 prefix_lens, 1 seq_lens"),
        (lambda a: a.alloc_extend([0.5], [3], [-1], 3), "prefix_lens must be one-dimensional integers"),
        (lambda a: a.alloc_decode([[1]], [-1]), "one-dimensional"),
        (lambda a: a.alloc_decode([0], [-1]), "can't go from -1"),
        (lambda a: a.share([1]), "page 1 is free and can't be shared"),
        (lambda a: a.share([0]), "page 0 was never issued"),
        (lambda a: a.free([2]), "page 0 is padding"),
        (lambda a: a.free_pages([4]), "page 4 was never issued: pages are 1..3"),
    ],
)
def test_mistakes_raise_and_change_nothing(call: Callable[[PagedTokenToKVPoolAllocator], object], message: str) -> None:
    allocator = make(3, 4)
    with pytest.raises(ValueError, match=message):
        call(allocator)
    assert allocator.available_pages == 3
    allocator.check_integrity()


@pytest.mark.parametrize(("size", "page_size"), [(0, 4), (7, 4), (8, 0), (4, 8)])
def test_sizes_must_be_whole_pages(size: int, page_size: int) -> None:
    with pytest.raises(ValueError, match="multiple of page_size"):
        PagedTokenToKVPoolAllocator(size, page_size, DEVICE)


def test_lengths_on_another_device_are_refused() -> None:
    with pytest.raises(ValueError, match="the ledger is on the CPU"):
        make(2, 2).alloc_decode(torch.empty(1, dtype=torch.int64, device="meta"), [-1])


def test_nothing_is_taken_when_the_device_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("full")

    allocator = make(3, 4)
    allocator.alloc(12)
    allocator.free_pages([2])
    allocator.free_pages([1])
    before = ledger_state(allocator)
    monkeypatch.setattr("kvcache.allocators.base.expand_pages", fail)
    with pytest.raises(torch.OutOfMemoryError):
        allocator.alloc(8)
    assert ledger_state(allocator) == before
    allocator.check_integrity()


@pytest.mark.parametrize("harm", ["lost", "twice", "owned", "outside"])
def test_check_integrity_sees_a_damaged_ledger(harm: str) -> None:
    allocator = make(3, 4)
    allocator.alloc(4)
    if harm == "lost":
        allocator._num_free -= 1
    elif harm == "twice":
        allocator._free[0] = allocator._free[1]
    elif harm == "owned":
        allocator._free[0] = 1
    else:
        allocator._free[0] = 0
    with pytest.raises(AssertionError):
        allocator.check_integrity()
