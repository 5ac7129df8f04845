"""The engine's KV cache: the pool that the model's layers ask for, and its bookkeeping."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcache import BlockManager, KVLayout, KVPool, PagedTokenToKVPoolAllocator, ReqToTokenPool, layout
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
        pool = kept.build(
            size=config.kv_tokens, page_size=config.page_size, device=saver.device, saver=saver, tag=KV_CACHE
        )
        table = ReqToTokenPool(config.max_running, max_context_len, saver.device)
        allocator = PagedTokenToKVPoolAllocator(config.kv_tokens, config.page_size, saver.device)
        return cls(layout=kept, pool=pool, table=table, blocks=BlockManager(table, allocator, pool))

    def on_resume(self) -> None:
        """After every resume of the tag: contents are undefined but for what padded tokens read."""
        self.pool.on_resume()
