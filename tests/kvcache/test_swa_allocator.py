from collections.abc import Callable

import pytest
import torch

from kvcache import BlockManager, MHATokenToKVPool, ReqToTokenPool, SWATokenToKVPoolAllocator
from memsaver import MemorySaver
from tests.helpers.kvcache.blocks import DEVICE, ledger_state, make_pool


def make(pages: int, swa_pages: int, page_size: int) -> SWATokenToKVPoolAllocator:
    return SWATokenToKVPoolAllocator(pages * page_size, swa_pages * page_size, page_size, DEVICE)


def test_every_token_gets_a_slot_in_both_pools() -> None:
    allocator = make(6, 4, 2)
    assert allocator.full_to_swa_index_mapping.dtype == torch.int64
    assert allocator.full_to_swa_index_mapping.tolist() == [0] * 14
    allocator.swa.alloc_pages(1)  # so that the halves have different numbers
    loc = allocator.alloc_extend([0, 0], [3, 1], [-1, -1], 4)
    assert loc is not None and loc.tolist() == [2, 3, 4, 6]
    assert allocator.to_swa(loc).tolist() == [4, 5, 6, 8]
    assert allocator.to_swa(torch.zeros(2, 3, dtype=torch.int64, device=DEVICE)).tolist() == [[0] * 3] * 2
    grown = allocator.alloc_decode([4, 2], [4, 6])
    assert grown is not None
    assert allocator.to_swa(grown).tolist() == [7, 9]
    assert (allocator.full_available_size(), allocator.swa_available_size(), allocator.available_size()) == (6, 0, 0)


@pytest.mark.parametrize(("pages", "swa_pages"), [(5, 2), (2, 5)])
def test_exhaustion_of_either_side_leaves_both_untouched(pages: int, swa_pages: int) -> None:
    allocator = make(pages, swa_pages, 3)
    allocator.alloc(3)
    before = ledger_state(allocator)
    assert allocator.alloc(6) is None
    assert allocator.alloc_pages(2) is None
    assert allocator.alloc_extend([0], [4], [-1], 4) is None
    assert allocator.alloc_decode([4, 1], [5, -1]) is None
    assert ledger_state(allocator) == before
    assert allocator.alloc(3) is not None
    allocator.check_integrity()


def test_tokens_that_leave_the_window_keep_their_full_slots() -> None:
    allocator = make(6, 3, 2)
    loc = allocator.alloc(6)
    assert loc is not None
    assert allocator.alloc(2) is None
    allocator.free_swa(loc[:4].cpu())
    assert allocator.to_swa(loc).tolist() == [0, 0, 0, 0, 6, 7]
    assert allocator.ref_counts([1, 2, 3]).tolist() == [1, 1, 1]
    assert allocator.swa_ref_counts([1, 2, 3]).tolist() == [0, 0, 1]
    assert (allocator.full.available_pages, allocator.swa.available_pages) == (3, 2)
    allocator.free_swa(loc[4:])  # device ids: synchronises
    allocator.free_swa([])
    allocator.check_integrity()
    again = allocator.alloc(6)
    assert again is not None
    assert sorted(allocator.to_swa(again).tolist()) == [2, 3, 4, 5, 6, 7]
    allocator.free(loc)
    allocator.free(again)
    assert (allocator.full.available_pages, allocator.swa.available_pages) == (6, 3)
    assert not allocator.full_to_swa_index_mapping.any()
    allocator.check_integrity()


def test_single_tokens() -> None:
    allocator = make(5, 3, 1)
    loc = allocator.alloc(3)
    assert loc is not None and loc.tolist() == [1, 2, 3]
    allocator.free_swa([2])
    assert allocator.to_swa(loc).tolist() == [1, 0, 3]
    assert allocator.alloc(2) is None
    more = allocator.alloc(1)
    assert more is not None and allocator.to_swa(more).tolist() == [2]
    with pytest.raises(ValueError, match="window slots of page 2: 0 owner"):
        allocator.free_swa([2])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: a.free_swa([4, 5, 6]), "names 1 of the 2 tokens of page 3"),
        (lambda a: a.free_swa([4, 5, 4]), "double free of token 4"),
        (lambda a: a.free_swa([2, 3]), "double free of the window slots of page 1: 0 owner"),
        (lambda a: a.free_swa_pages([2, 3, 2]), "double free of the window slots of page 2: 1 owner"),
        (lambda a: a.free_swa([0, 1]), "page 0 was never issued"),
        (lambda a: a.free_swa([8, 9]), "window slots of page 4"),
        (lambda a: a.free([2, 3, 8]), "double free of page 4"),
        (lambda a: a.free_pages([3, 3]), "double free of page 3"),
        (lambda a: a.share([2, 4]), "page 4 is free"),
        (lambda a: a.alloc_decode([2], [2]), "page 1, whose window slots were freed"),
        (lambda a: a.alloc_decode([2], [8]), "page 4, which is free"),
        (lambda a: a.alloc_pages(-1), "count >= 0"),
        (lambda a: a.alloc(1), "multiple of page_size 2"),
    ],
)
@pytest.mark.parametrize("grouped", [False, True])
def test_mistakes_raise_and_change_nothing(
    call: Callable[[SWATokenToKVPoolAllocator], object], message: str, grouped: bool
) -> None:
    allocator = make(4, 4, 2)
    allocator.alloc(6)
    allocator.free_swa([2, 3])
    if grouped:
        allocator.free_group_begin()
    before = ledger_state(allocator)
    with pytest.raises(ValueError, match=message):
        call(allocator)
    assert ledger_state(allocator) == before
    allocator.check_integrity()


def test_a_failing_device_leaves_both_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("full")

    allocator = make(4, 3, 2)
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


def test_a_shared_page_leaves_the_window_of_each_owner_by_itself() -> None:
    allocator = make(3, 3, 2)
    allocator.alloc_pages(1)
    allocator.share([1, 1])  # three owners
    allocator.free_swa([2, 3])
    assert (allocator.ref_counts([1]), allocator.swa_ref_counts([1])) == ([3], [2])
    allocator.free_pages([1])  # taken for the one that has left it
    assert (allocator.ref_counts([1]), allocator.swa_ref_counts([1])) == ([2], [2])
    allocator.free_swa([2, 3])
    allocator.free_swa([2, 3])
    assert allocator.swa.available_pages == 3
    allocator.share([1])  # nothing of it is in a window any more
    assert (allocator.ref_counts([1]), allocator.swa_ref_counts([1])) == ([3], [0])
    allocator.free_pages([1, 1, 1])
    assert allocator.full.available_pages == 3
    allocator.check_integrity()


def test_who_knows_frees_the_window_share_first() -> None:
    allocator = make(3, 3, 2)
    allocator.alloc_pages(1)
    allocator.share([1])
    allocator.free_swa_pages([1])  # a has left
    allocator.free_swa_pages([1])  # b ends without having left it
    allocator.free_pages([1])
    assert allocator.swa.available_pages == 3
    assert allocator.ref_counts([1]) == [1]
    allocator.check_integrity()


def test_a_group_holds_both_sides_back() -> None:
    allocator = make(4, 2, 2)
    loc = allocator.alloc(4)
    assert loc is not None
    allocator.free_group_begin()
    allocator.free_swa([2, 3])
    allocator.free([2, 4])
    assert allocator.alloc_pages(1) is None
    assert allocator.to_swa(loc).tolist() == [2, 3, 4, 5]  # until the group ends
    allocator.check_integrity()
    allocator.free_group_end()
    assert allocator.to_swa(loc).tolist() == [0, 0, 0, 0]
    assert (allocator.full.available_pages, allocator.swa.available_pages) == (4, 2)
    allocator.check_integrity()


def test_shortage_names_the_side_that_is_short() -> None:
    allocator = make(4, 2, 3)
    allocator.alloc(3)
    text = allocator.shortage("request 7", 3)
    assert text.startswith("sliding-window attention: request 7 needs 3 more page(s) of 3 tokens, 1 of 2 are free")
    assert "2 page(s) (6 tokens) are missing" in text
    assert "full attention" not in text
    assert "full attention: request 7 needs 9" in allocator.shortage("request 7", 9)


@pytest.mark.parametrize("harm", ["mapping", "shared", "lost", "padding"])
def test_check_integrity_sees_a_damaged_ledger(harm: str) -> None:
    allocator = make(3, 3, 2)
    allocator.alloc(4)
    if harm == "mapping":
        allocator.full_to_swa_index_mapping[3] = 0
    elif harm == "shared":
        allocator._swa_page[2] = allocator._swa_page[1]
    elif harm == "lost":
        allocator._swa_page[2] = 0
    else:
        allocator.full_to_swa_index_mapping[0] = 2
    with pytest.raises(AssertionError):
        allocator.check_integrity()


class BothPools(MHATokenToKVPool):
    """A full pool that moves its window pool along, through the mapping: what a pool for such models does."""

    window: MHATokenToKVPool
    allocator: SWATokenToKVPoolAllocator

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        super().move_kv_cache(tgt_loc, src_loc)
        self.window.move_kv_cache(self.allocator.to_swa(tgt_loc), self.allocator.to_swa(src_loc))


def test_block_manager_forks_and_copies_over_both_ledgers() -> None:
    allocator = make(6, 4, 4)
    full = make_pool(24, 4)
    pool = BothPools(full.config)
    pool.window, pool.allocator = make_pool(16, 4), allocator
    manager = BlockManager(ReqToTokenPool(4, 24, DEVICE), allocator, pool)
    a = manager.admit()
    assert a is not None
    loc = manager.extend([a], [6])
    assert loc is not None
    rows = torch.arange(1, 7, device=DEVICE).float().view(-1, 1, 1).expand(-1, 1, 2)
    pool.set_kv_buffer(0, loc, rows, rows)
    pool.window.set_kv_buffer(0, allocator.to_swa(loc), rows, -rows)
    b = manager.fork(a)
    assert b is not None
    assert allocator.swa_ref_counts([1, 2]).tolist() == [2, 2]
    assert manager.extend([a, b], [7, 7]) is not None  # a copies the partial page, b keeps it
    for handle in (a, b):
        slots = torch.from_numpy(manager.token_ids(handle, 0, 6)).to(DEVICE)
        assert pool.get_kv_buffer(0)[0][slots, 0, 0].tolist() == [1, 2, 3, 4, 5, 6]
        assert pool.window.get_kv_buffer(0)[1][allocator.to_swa(slots), 0, 0].tolist() == [-1, -2, -3, -4, -5, -6]
    assert allocator.swa.available_pages == 1
    for handle in (a, b):
        allocator.free_swa(manager.token_ids(handle, 0, 4))
    assert allocator.swa.available_pages == 2
    manager.check_integrity()
    for handle in (a, b):
        manager.release(handle)
    assert (allocator.full.available_pages, allocator.swa.available_pages) == (6, 4)
    manager.check_integrity()


def test_ledgers_and_mapping_work_while_the_pools_are_paused() -> None:
    saver = MemorySaver(device="cuda:0" if DEVICE == "cuda" else "cpu")
    try:
        allocator = make(8, 4, 4)
        make_pool(32, 4, saver), make_pool(16, 4, saver)
        loc = allocator.alloc(8)
        assert loc is not None
        for _ in range(2):
            saver.pause("kv_cache")
            allocator.check_integrity()
            allocator.free_swa(loc[:4])
            more = allocator.alloc(4)
            assert more is not None and allocator.to_swa(more).tolist() == [4, 5, 6, 7]
            saver.resume("kv_cache")
            allocator.check_integrity()
            allocator.free(loc)
            allocator.free(more)
            loc = allocator.alloc(8)
            assert loc is not None and allocator.to_swa(loc).tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
    finally:
        saver.close()


@pytest.mark.parametrize(("size", "size_swa"), [(0, 4), (8, 0), (7, 4), (8, 7)])
def test_sizes_must_be_whole_pages(size: int, size_swa: int) -> None:
    with pytest.raises(ValueError, match="multiple of page_size"):
        SWATokenToKVPoolAllocator(size, size_swa, 4, DEVICE)
