"""Small pools with block tables, written and read through the request table."""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch

from kvcache import BlockManager, KVAllocator, KVCacheConfig, KVPool, ReqHandle, ReqToTokenPool
from kvcache.allocators import PagedTokenToKVPoolAllocator, SWATokenToKVPoolAllocator
from kvcache.pools import MHATokenToKVPool, SWAKVPool

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_pool(size: int, page_size: int, saver: Any = None, **changes: Any) -> MHATokenToKVPool:
    fields = {
        "num_layers": 2,
        "num_kv_heads": 1,
        "head_dim": 2,
        "dtype": torch.float32,
        "device": DEVICE,
    } | changes
    return MHATokenToKVPool(KVCacheConfig(size=size, page_size=page_size, **fields), saver)


class Blocks:
    """A `BlockManager` over two layers, with methods to write and read one number per token.

    It records how many tokens each copy moves, and makes a copy fail on demand.
    """

    def __init__(self, manager: BlockManager) -> None:
        self.manager, self.table = manager, manager.req_to_token
        self.allocator, self.pool = manager.allocator, manager.pool
        self.moves: list[int] = []
        self.fail_next_move = False
        self._move = self.pool.move_kv_cache
        self.pool.move_kv_cache = self._counted_move  # type: ignore[method-assign]
        for layer in range(2):  # NaN reveals a read of a slot that was never written
            for buffer in self.pool.get_kv_buffer(layer):
                buffer[self.allocator.page_size :] = torch.nan

    def _counted_move(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        if self.fail_next_move:
            self.fail_next_move = False
            raise torch.OutOfMemoryError("no room for the copy")
        self.moves.append(len(tgt_loc))
        self._move(tgt_loc, src_loc)

    def admit(self) -> ReqHandle:
        handle = self.manager.admit()
        assert handle is not None
        return handle

    def fork(self, parent: ReqHandle) -> ReqHandle:
        handle = self.manager.fork(parent)
        assert handle is not None
        return handle

    def write(self, loc: torch.Tensor, values: Sequence[float]) -> None:
        """Write a number per token: layer l stores number + l / 4 as key, its negative as value."""
        for layer in range(2):
            k_like, v_like = self.pool.get_kv_buffer(layer)
            rows = (
                torch.tensor(values, dtype=torch.float32, device=DEVICE).view(-1, 1, 1) + layer / 4
            )
            k = rows.expand(-1, *k_like.shape[1:])
            self.pool.set_kv_buffer(layer, loc, k, -rows.expand(-1, *v_like.shape[1:]))

    def read(
        self, handles: Sequence[ReqHandle], firsts: Sequence[Sequence[int]]
    ) -> list[list[list[float]]]:
        """Read the numbers of sequences as [layer][sequence].

        Sequence i is read from position `firsts[i][layer]` on. Fail unless keys and values agree.
        """
        by_layer: list[list[list[float]]] = []
        for layer in range(2):
            parts = [
                self.table.req_to_token[handle.row, first[layer] : self.manager.seq_len(handle)]
                for handle, first in zip(handles, firsts, strict=True)
            ]
            k, v = self.pool.get_rows(layer, torch.cat(parts).long())
            assert torch.equal(k, k[:, :1, :1].expand_as(k)) and torch.equal(v, -k)
            numbers = iter((k[:, 0, 0] - layer / 4).tolist())
            by_layer.append([list(islice(numbers, len(part))) for part in parts])
        return by_layer

    def values(self, handle: ReqHandle) -> list[float]:
        """Read a sequence's numbers, which must be the same in both layers."""
        [first], [second] = self.read([handle], [(0, 0)])
        assert first == second
        return first

    def append(self, handle: ReqHandle, *values: float) -> bool:
        loc = self.manager.extend([handle], [self.manager.seq_len(handle) + len(values)])
        if loc is None:
            return False
        self.write(loc, values)
        return True

    def pages(self, handle: ReqHandle) -> list[int]:
        """Return the pages of a sequence according to the table on the device."""
        row = self.table.req_to_token[
            handle.row, : self.manager.seq_len(handle) : self.allocator.page_size
        ]
        return (row // self.allocator.page_size).tolist()

    def state(self, handles: Iterable[ReqHandle]) -> tuple[Any, ...]:
        """Return the state that a refused call must not change, for the given sequences."""
        return (
            ledger_state(self.allocator),
            [
                (self.manager.seq_len(handle), self.manager.pages(handle).tolist())
                for handle in handles
            ],
            self.table.req_to_token.tolist(),
            self.table.available_size(),
        )


def make_blocks(
    pages: int,
    page_size: int,
    rows: int = 8,
    max_context_len: int = 64,
    *,
    window: int | None = None,
    window_pages: int | None = None,
    saver: Any = None,
) -> Blocks:
    """Build block tables over two layers.

    With `window`, the layers slide. With `window_pages` too, only layer 1 slides, and there are two
    ledgers.
    """
    allocator: KVAllocator
    pool: KVPool
    if window_pages is None:
        allocator = PagedTokenToKVPoolAllocator(pages * page_size, page_size, DEVICE)
        pool = make_pool(pages * page_size, page_size, saver)
    else:
        allocator = SWATokenToKVPoolAllocator(
            pages * page_size, window_pages * page_size, page_size, DEVICE
        )
        full, half = (
            make_pool(n * page_size, page_size, num_layers=1).config for n in (pages, window_pages)
        )
        pool = SWAKVPool(full, half, [0], [1], saver)
        pool.register_mapping(allocator.full_to_swa_index_mapping)
    return Blocks(
        BlockManager(ReqToTokenPool(rows, max_context_len, DEVICE), allocator, pool, window)
    )


def make_windowed(
    page_size: int,
    window: int,
    pages: int,
    window_pages: int | None,
    rows: int,
    max_context_len: int,
) -> BlockManager:
    return make_blocks(
        pages, page_size, rows, max_context_len, window=window, window_pages=window_pages
    ).manager


def ledger_state(allocator: KVAllocator) -> tuple[Any, ...]:
    """Return owners, free pages in order and the mapping, which a refused call must not change."""
    owners = allocator.ref_counts(np.arange(1, allocator.total_pages + 1)).tolist()
    if isinstance(allocator, SWATokenToKVPoolAllocator):
        mapping = allocator.full_to_swa_index_mapping.tolist()
        return owners, mapping, ledger_state(allocator.full), ledger_state(allocator.swa)
    free = allocator.next_pages(allocator.available_pages)
    assert free is not None
    return owners, free.tolist()
