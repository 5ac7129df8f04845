"""Small pools whose every slot can be told apart."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvcache import (
    BlockManager,
    KVAllocator,
    KVCacheConfig,
    KVPool,
    MHATokenToKVPool,
    PagedTokenToKVPoolAllocator,
    ReqHandle,
    ReqToTokenPool,
    SWAKVPool,
    SWATokenToKVPoolAllocator,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_pool(size: int, page_size: int, saver: Any = None, **changes: Any) -> MHATokenToKVPool:
    fields = {"num_layers": 2, "num_kv_heads": 1, "head_dim": 2, "dtype": torch.float32, "device": DEVICE} | changes
    return MHATokenToKVPool(KVCacheConfig(size=size, page_size=page_size, **fields), saver)


class CountingPool(MHATokenToKVPool):
    """Remembers how many tokens were moved, and fails on demand."""

    moves: list[int]
    fail_next_move = False

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        if self.fail_next_move:
            self.fail_next_move = False
            raise torch.OutOfMemoryError("no room for the copy")
        self.moves.append(len(tgt_loc))
        super().move_kv_cache(tgt_loc, src_loc)


@dataclass
class Blocks:
    """A BlockManager with its parts, and values written and read through `req_to_token`."""

    manager: BlockManager
    pool: CountingPool
    allocator: KVAllocator
    table: ReqToTokenPool

    def write(self, loc: torch.Tensor, values: Sequence[float]) -> None:
        """One value a token: layer l holds value + l / 4 as key and its negative as value."""
        for layer in range(self.pool.config.num_layers):
            k_like, v_like = self.pool.get_kv_buffer(layer)
            rows = torch.tensor(values, dtype=torch.float32, device=DEVICE).view(-1, 1, 1) + layer / 4
            k = rows.expand(-1, *k_like.shape[1:])
            self.pool.set_kv_buffer(layer, loc, k, -rows.expand(-1, *v_like.shape[1:]))

    def read(self, handle: ReqHandle) -> list[float]:
        """The values of a sequence; fails unless all layers, keys and values, agree on them."""
        slots = self.table.req_to_token[handle.row, : self.manager.seq_len(handle)].long()
        for layer in range(self.pool.config.num_layers):
            k, v = self.pool.get_kv_buffer(layer)
            keys = k[slots] - layer / 4
            assert torch.equal(keys, keys[:, :1, :1].expand_as(keys))
            assert torch.equal(v[slots], -k[slots])
        return keys[:, 0, 0].tolist()

    def append(self, handle: ReqHandle, *values: float) -> bool:
        loc = self.manager.extend([handle], [self.manager.seq_len(handle) + len(values)])
        if loc is None:
            return False
        self.write(loc, values)
        return True

    def pages(self, handle: ReqHandle) -> list[int]:
        """The pages of a sequence in order, as the device's table shows them."""
        row = self.table.req_to_token[handle.row, : self.manager.seq_len(handle) : self.allocator.page_size]
        return (row // self.allocator.page_size).tolist()

    def state(self) -> tuple[Any, ...]:
        """All that a refused call must leave as it was."""
        return (
            *ledger_state(self.allocator),
            self.manager._pages.tolist(),
            self.manager._lens.tolist(),
            self.table.req_to_token.tolist(),
            list(self.table._free_rows),
            list(self.table._generation),
        )


def make_blocks(pages: int, page_size: int, rows: int = 8, max_context_len: int = 64) -> Blocks:
    config = KVCacheConfig(
        num_layers=2,
        num_kv_heads=1,
        head_dim=2,
        size=pages * page_size,
        page_size=page_size,
        dtype=torch.float32,
        device=DEVICE,
    )
    pool = CountingPool(config)
    pool.moves = []
    for layer in range(2):  # reading a slot that was never written must not look right
        for buffer in pool.get_kv_buffer(layer):
            buffer.fill_(torch.nan)
    table = ReqToTokenPool(rows, max_context_len, DEVICE)
    allocator = PagedTokenToKVPoolAllocator(config.size, page_size, DEVICE)
    return Blocks(BlockManager(table, allocator, pool), pool, allocator, table)


def make_windowed(
    page_size: int, window: int, pages: int, window_pages: int | None, rows: int, max_context_len: int
) -> BlockManager:
    """Two layers that slide, over one ledger; with window_pages over two, and layer 0 is full."""

    def config(pages: int, layers: int) -> KVCacheConfig:
        shape: dict[str, Any] = {"num_layers": layers, "num_kv_heads": 1, "head_dim": 1, "dtype": torch.float32}
        return KVCacheConfig(size=pages * page_size, page_size=page_size, device=DEVICE, **shape)

    allocator: KVAllocator
    pool: KVPool
    if window_pages is None:
        allocator = PagedTokenToKVPoolAllocator(pages * page_size, page_size, DEVICE)
        pool = MHATokenToKVPool(config(pages, 2))
    else:
        allocator = SWATokenToKVPoolAllocator(pages * page_size, window_pages * page_size, page_size, DEVICE)
        pool = SWAKVPool(config(pages, 1), config(window_pages, 1), [0], [1])
        pool.register_mapping(allocator.full_to_swa_index_mapping)
    return BlockManager(ReqToTokenPool(rows, max_context_len, DEVICE), allocator, pool, window)


def ledger_state(allocator: KVAllocator) -> tuple[Any, ...]:
    """All that a refused call must leave as it was: owners, free list in order, open group, and the mapping."""
    every = np.arange(1, allocator.total_pages + 1)
    group = allocator._deferred if allocator._deferred is None else allocator._deferred_pages().tolist()
    owners = allocator.ref_counts(every).tolist()
    if isinstance(allocator, SWATokenToKVPoolAllocator):
        mapping = (allocator._swa_page.tolist(), allocator.full_to_swa_index_mapping.tolist())
        return owners, group, *mapping, ledger_state(allocator.full), ledger_state(allocator.swa)
    assert isinstance(allocator, PagedTokenToKVPoolAllocator)
    return owners, allocator._free[: allocator.available_pages].tolist(), group
