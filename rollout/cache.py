"""The engine's KV cache: the pool that the model's layers ask for, and its bookkeeping."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcache import (
    BlockManager,
    KVAllocator,
    KVLayout,
    KVPool,
    PagedTokenToKVPoolAllocator,
    ReqToTokenPool,
    SWAKVPool,
    SWATokenToKVPoolAllocator,
    layout,
    pages_across,
)
from memsaver import MemorySaver
from rollout.config import EngineConfig
from rollout.model.config import ModelConfig
from rollout.tags import KV_CACHE


@dataclass(frozen=True, kw_only=True)
class Cache:
    """`pool` is on tag `kv_cache`; `table` (requests) and `blocks` (pages) are outside of every tag."""

    layout: KVLayout
    pool: KVPool
    table: ReqToTokenPool
    blocks: BlockManager

    @classmethod
    def build(
        cls, model: ModelConfig, config: EngineConfig, max_context_len: int, dtype: torch.dtype, saver: MemorySaver
    ) -> Cache:
        kept = layout(model.hf_config, config.kv_cache_dtype, dtype)
        window_size = window_tokens(kept, config)
        pool = kept.build(
            size=config.kv_tokens,
            page_size=config.page_size,
            device=saver.device,
            window_size=window_size,
            saver=saver,
            tag=KV_CACHE,
        )
        table = ReqToTokenPool(config.max_running, max_context_len, saver.device)
        allocator: KVAllocator
        if isinstance(pool, SWAKVPool) and window_size is not None:
            allocator = SWATokenToKVPoolAllocator(config.kv_tokens, window_size, config.page_size, saver.device)
            pool.register_mapping(allocator.full_to_swa_index_mapping)
        else:
            allocator = PagedTokenToKVPoolAllocator(config.kv_tokens, config.page_size, saver.device)
        blocks = BlockManager(table, allocator, pool, kept.sliding_window)
        return cls(layout=kept, pool=pool, table=table, blocks=blocks)

    @property
    def window(self) -> int | None:
        """Keys that a query sees in every layer; None: all, or not the same in all layers (see `sliding`)."""
        return None if self.sliding else self.layout.sliding_window

    @property
    def sliding(self) -> tuple[int, Tensor] | None:
        """Of sliding layers with a pool of their own: the window, and slot -> slot of that pool, int64."""
        allocator = self.blocks.allocator
        if self.layout.sliding_window is None or not isinstance(allocator, SWATokenToKVPoolAllocator):
            return None
        return self.layout.sliding_window, allocator.full_to_swa_index_mapping

    def on_resume(self) -> None:
        """After every resume of the tag: contents are undefined but for what padded tokens read."""
        self.pool.on_resume()


def window_tokens(kept: KVLayout, config: EngineConfig) -> int | None:
    """Size of the pool of sliding layers, None where there is none; ValueError where one is asked for in vain."""
    if kept.pool != "swa" or kept.sliding_window is None:
        if config.window_tokens is not None:
            raise ValueError(
                f"window_tokens={config.window_tokens} is for models that mix full and sliding layers; leave it out"
            )
        return None
    if config.window_tokens is not None:
        return config.window_tokens
    page = config.page_size
    pages = config.max_running * pages_across(kept.sliding_window, page) + -(-config.max_prefill_tokens // page)
    return min(config.kv_tokens, pages * page)
