"""Bookkeeping never waits for the kernels under way, however much it sends."""

import pytest
import torch

from kvcache import BlockManager, PagedTokenToKVPoolAllocator, ReqToTokenPool, SWATokenToKVPoolAllocator
from tests.helpers.kvcache.blocks import make_pool
from tests.helpers.no_wait import check_no_wait

TOKENS = 64 * 1024  # ids of half a MiB: CUDA takes 64 KiB from pageable memory without waiting
DEVICE = torch.device("cuda:0")


@pytest.mark.gpu
@pytest.mark.parametrize("window", [False, True])
def test_alloc_extend(window: bool) -> None:
    size = 4 * TOKENS
    allocator = (
        SWATokenToKVPoolAllocator(size, size, 1, DEVICE) if window else PagedTokenToKVPoolAllocator(size, 1, DEVICE)
    )

    def run() -> None:
        assert allocator.alloc_extend([0], [TOKENS], [-1], TOKENS) is not None

    run()  # compiles
    check_no_wait(run)


@pytest.mark.gpu
def test_extend_and_a_copy_on_write() -> None:
    pool = make_pool(4 * TOKENS, 16)
    manager = BlockManager(
        ReqToTokenPool(4, 2 * TOKENS, DEVICE),
        PagedTokenToKVPoolAllocator(pool.size, 16, DEVICE),
        pool,
    )

    def run() -> None:
        parent = manager.admit()
        assert parent is not None and manager.extend([parent], [TOKENS + 3]) is not None
        child = manager.fork(parent)
        assert child is not None and manager.extend([parent, child], [TOKENS + 4] * 2) is not None
        manager.release(parent)
        manager.release(child)

    run()  # compiles
    check_no_wait(run)
