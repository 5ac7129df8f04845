"""The pool's bytes on a memsaver tag: what a pause takes, and what stays outside it."""

from collections.abc import Iterator

import pytest
import torch

from kvcache import BlockManager, KVCacheConfig, MHATokenToKVPool, PagedTokenToKVPoolAllocator, ReqToTokenPool
from memsaver import MemorySaver
from tests.helpers.kvcache.blocks import DEVICE, Blocks, CountingPool, make_pool

PAGE_SIZE = 16
SIZE = 128 * 1024  # with two layers of 2 x 2 fp32 elements: 4 MiB and a padding page


@pytest.fixture
def saver() -> Iterator[MemorySaver]:
    saver = MemorySaver(device="cuda:0" if DEVICE == "cuda" else "cpu")
    yield saver
    saver.close()


def blocks_on(saver: MemorySaver) -> Blocks:
    config = KVCacheConfig(
        num_layers=2,
        num_kv_heads=1,
        head_dim=2,
        size=SIZE,
        page_size=PAGE_SIZE,
        dtype=torch.float32,
        device=DEVICE,
    )
    pool = CountingPool(config, saver)
    pool.moves = []
    table = ReqToTokenPool(8, 256, DEVICE)
    allocator = PagedTokenToKVPoolAllocator(SIZE, PAGE_SIZE, DEVICE)
    return Blocks(BlockManager(table, allocator, pool), pool, allocator, table)


def test_all_bytes_are_on_the_tag(saver: MemorySaver) -> None:
    pool = blocks_on(saver).pool
    report = saver.report().tags["kv_cache"]
    assert saver.tags == ["kv_cache"]
    assert report.content == "discard"
    assert pool.nbytes <= report.live_bytes <= pool.nbytes + 4096
    assert report.committed_bytes >= pool.nbytes
    for layer in range(2):
        for view in pool.get_kv_buffer(layer):
            first = saver.offset_of(view)
            assert 0 <= first <= first + view.numel() * view.element_size() <= report.committed_bytes


def test_another_tag(saver: MemorySaver) -> None:
    config = KVCacheConfig(
        num_layers=1, num_kv_heads=1, head_dim=8, size=16, page_size=4, dtype=torch.bfloat16, device=DEVICE
    )
    MHATokenToKVPool(config, saver, tag="draft_kv")
    assert saver.tags == ["draft_kv"]


def test_pause_and_resume_keep_ledger_and_address_and_zero_page_0(saver: MemorySaver) -> None:
    blocks = blocks_on(saver)
    a = blocks.manager.admit()
    assert a is not None
    blocks.append(a, *range(20))
    b = blocks.manager.fork(a)
    assert b is not None
    addresses = [view.data_ptr() for layer in range(2) for view in blocks.pool.get_kv_buffer(layer)]
    ledger = blocks.allocator.ref_counts([1, 2, 3]).tolist()
    for _ in range(3):
        for layer in range(2):
            for view in blocks.pool.get_kv_buffer(layer):
                view[:PAGE_SIZE] = torch.nan
        nbytes = blocks.pool.nbytes
        saver.pause("kv_cache")
        assert saver.report().tags["kv_cache"].committed_bytes == 0
        assert blocks.pool.nbytes == nbytes
        blocks.manager.check_integrity()  # tables and ledger are readable while the pool is paused
        saver.resume("kv_cache")
        blocks.pool.on_resume()
        assert addresses == [view.data_ptr() for layer in range(2) for view in blocks.pool.get_kv_buffer(layer)]
        assert blocks.allocator.ref_counts([1, 2, 3]).tolist() == ledger == [2, 2, 0]
        for layer in range(2):
            for view in blocks.pool.get_kv_buffer(layer):
                assert not view[:PAGE_SIZE].any()
    # contents are gone, the sequences go on: write them again through the table and diverge
    slots = blocks.table.req_to_token[a.row, :20].long()
    blocks.write(slots, range(20))
    assert blocks.append(a, 100)
    assert blocks.append(b, 200)
    assert blocks.read(a) == [*range(20), 100]
    assert blocks.read(b) == [*range(20), 200]


def test_requests_come_and_go_while_the_pool_is_paused(saver: MemorySaver) -> None:
    """Bookkeeping without page copies touches no paged memory: aborting a request works at any time."""
    blocks = blocks_on(saver)
    a = blocks.manager.admit()
    assert a is not None
    blocks.append(a, *range(20))
    saver.pause("kv_cache")
    blocks.manager.release(a)
    b = blocks.manager.admit()
    assert b is not None
    assert blocks.manager.extend([b], [33]) is not None
    blocks.manager.check_integrity()
    saver.resume("kv_cache")
    blocks.pool.on_resume()
    blocks.write(blocks.table.req_to_token[b.row, :33].long(), range(33))
    assert blocks.read(b) == list(range(33))


def test_saver_of_another_device_is_refused(saver: MemorySaver) -> None:
    with pytest.raises(ValueError, match="use one device for both"):
        make_pool(size=8, page_size=4, saver=saver, device="meta")
