"""Block tables and request tables, by worked examples; test_forest.py has a model."""

import time
from timeit import repeat
from typing import Any

import pytest
import torch

from kvcache import ReqHandle, ReqToTokenPool
from kvcache.allocators import pages_across, pages_behind
from tests.helpers.kvcache.blocks import DEVICE, make_blocks


def test_failed_copy_leaves_sequences_unchanged() -> None:
    blocks = make_blocks(pages=8, page_size=4)
    a = blocks.admit()
    blocks.append(a, 0, 1, 2, 3, 4, 5)
    b = blocks.fork(a)
    before = blocks.state([a, b])
    blocks.fail_next_move = True
    with pytest.raises(torch.OutOfMemoryError):
        blocks.manager.extend([a], [7])
    blocks.manager.check_integrity()
    assert blocks.state([a, b]) == before
    assert blocks.values(a) == blocks.values(b) == [0, 1, 2, 3, 4, 5]
    assert blocks.append(a, 6)
    assert blocks.values(a) == [0, 1, 2, 3, 4, 5, 6]


def test_extend_refuses_wrong_batches_without_changes() -> None:
    blocks = make_blocks(pages=40, page_size=4, max_context_len=20)
    a, b = blocks.admit(), blocks.admit()
    blocks.append(a, 0, 1, 2)
    before = blocks.state([a, b])
    for handles, lens in (([a, b], [2, 4]), ([b, a], [4, 21]), ([a, b, a], [4, 4, 5])):
        with pytest.raises(AssertionError):
            blocks.manager.extend(handles, lens)
    for start, stop in ((-1, 2), (3, 2), (0, 4)):
        with pytest.raises(AssertionError, match=r"holds \[0, 3\), asked for"):
            blocks.manager.token_ids(a, start, stop)
    assert blocks.state([a, b]) == before
    assert blocks.manager.extend([a], [20]) is not None
    assert blocks.manager.token_ids(a, 4, 4).tolist() == []


def test_check_integrity_detects_a_changed_table_and_surplus_owners() -> None:
    blocks = make_blocks(pages=6, page_size=2)
    a = blocks.admit()
    blocks.append(a, 0, 1, 2)
    blocks.allocator.share([blocks.pages(a)[0]])
    with pytest.raises(AssertionError, match="counts other owners"):
        blocks.manager.check_integrity()
    blocks.table.req_to_token[a.row, 1].add_(1)
    with pytest.raises(AssertionError, match="differs from its page table"):
        blocks.manager.check_integrity()


def test_extend_of_64_sequences_takes_less_than_2_ms_of_cpu_time() -> None:
    blocks = make_blocks(pages=400, page_size=16, rows=64, max_context_len=1024)
    handles = [blocks.admit() for _ in range(64)]
    blocks.manager.extend(handles, [20] * 64)
    lengths = iter(range(21, 61))

    def step() -> None:
        assert blocks.manager.extend(handles, [next(lengths)] * 64) is not None

    # A step takes about 0.15 ms on an idle core.
    assert min(repeat(step, timer=time.thread_time, number=1, repeat=40)) < 2e-3


# ---------------------------------------------------------------- windows


@pytest.mark.parametrize("window", [1, 2, 5, 9])
@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_pages_behind_and_pages_across_equal_brute_force(page_size: int, window: int) -> None:
    for length in range(30):  # the query at `length` sees itself and window - 1 positions before
        assert pages_behind(length, window, page_size) == max(0, length - window + 1) // page_size
    most = max(len({p // page_size for p in range(s, s + window)}) for s in range(page_size))
    assert pages_across(window, page_size) == most


# ---------------------------------------------------------------- request table


def test_stale_and_forged_handles_raise_value_error() -> None:
    table: Any = ReqToTokenPool(1, 5, DEVICE)
    old = table.alloc()
    table.free(old)
    new = table.alloc()
    assert new.row == old.row
    for wrong in (old, ReqHandle(0, 0), ReqHandle(-1, 0), ReqHandle(2, 0), ReqHandle(1, 9)):
        for use, handles in ((table.row, wrong), (table.free, wrong), (table.rows, [new, wrong])):
            with pytest.raises(ValueError, match="stale"):
                use(handles)
    assert table.rows([new]).tolist() == [1]
