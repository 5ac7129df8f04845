"""Sequences that share pages with a prefix cache, without a model."""

import pytest
import torch

from kvcache import (
    BlockManager,
    KVCacheConfig,
    MHATokenToKVPool,
    PagedTokenToKVPoolAllocator,
    RadixCache,
    ReqToTokenPool,
)
from rollout.prefix import PrefixBlocks

PAGE = 4


def blocks_of(pages: int, rows: int = 4) -> PrefixBlocks:
    size = pages * PAGE
    config = KVCacheConfig(
        num_layers=1, num_kv_heads=1, head_dim=2, size=size, page_size=PAGE, dtype=torch.float32, device="cpu"
    )
    allocator = PagedTokenToKVPoolAllocator(size, PAGE, "cpu")
    blocks = BlockManager(ReqToTokenPool(rows, size, "cpu"), allocator, MHATokenToKVPool(config))
    return PrefixBlocks(blocks, RadixCache(allocator))


def test_equal_prompts_computed_side_by_side_keep_pages_of_their_own() -> None:
    """Only one of them is kept; the other must not lock it, or one alone could lack the pages to go on."""
    prefixes, tokens = blocks_of(pages=8), list(range(12))
    handles = []
    for _ in range(2):
        admitted = prefixes.admit(tokens)
        assert admitted is not None and admitted[1] == 0
        handles.append(admitted[0])
    assert prefixes.extend(handles, [12, 12]) is not None
    for handle in handles:
        prefixes.keep(handle, tokens)
        prefixes.check_integrity()
    (ledger,) = prefixes.ledgers
    assert ledger.available == 2
    prefixes.release(handles[0], tokens)
    prefixes.check_integrity()
    assert prefixes.ledgers[0].available == 5  # the kept ones are nobody's now
    assert prefixes.extend(handles[1:], [32]) is not None  # the whole pool: the kept ones are evicted
    prefixes.release(handles[1], list(range(31)))
    prefixes.check_integrity()
    assert prefixes.ledgers[0].available == 8


def test_pages_that_a_fork_goes_on_with_are_not_kept_without_its_lock() -> None:
    prefixes, tokens = blocks_of(pages=8), list(range(12))
    first, second = prefixes.admit(tokens), prefixes.admit(tokens)
    assert first is not None and second is not None
    assert prefixes.extend([first[0], second[0]], [12, 12]) is not None
    prefixes.keep(first[0], tokens)
    prefixes.keep(second[0], tokens)  # too late: its pages are its own
    fork = prefixes.fork(second[0])
    assert fork is not None
    prefixes.release(first[0], tokens)
    assert prefixes.extend([fork], [32]) is not None  # evicts what the first had kept
    prefixes.release(second[0], tokens)
    prefixes.check_integrity()
    assert prefixes.ledgers[0].available == 0  # all are the fork's, none can be evicted
    prefixes.release(fork, list(range(32)))
    prefixes.check_integrity()
    assert prefixes.ledgers[0].available == 8


def test_admit_with_pages_shares_them_or_changes_nothing() -> None:
    prefixes = blocks_of(pages=4)
    blocks = prefixes.blocks
    first = blocks.admit()
    assert first is not None and blocks.extend([first], [8]) is not None
    second = blocks.admit(blocks.pages(first))
    assert second is not None and blocks.seq_len(second) == 8
    blocks.check_integrity()
    assert blocks.available_pages == 2
    with pytest.raises(ValueError, match="is free and can't be shared"):
        blocks.admit(blocks.allocator.next_pages(1))  # type: ignore[arg-type]
    blocks.release(first)
    blocks.release(second)
    blocks.check_integrity()
    assert blocks.available_pages == 4
