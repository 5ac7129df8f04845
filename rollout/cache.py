"""The engine's KV cache: the pool that the model's layers ask for, and its bookkeeping."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcache import (
    BlockManager,
    HybridReqToTokenPool,
    KVLayout,
    KVPool,
    MambaPool,
    PagedTokenToKVPoolAllocator,
    ReqToTokenPool,
    layout,
)
from memsaver import MemorySaver
from rollout.config import EngineConfig
from rollout.model.config import ModelConfig
from rollout.tags import KV_CACHE


@dataclass(frozen=True, kw_only=True)
class Cache:
    """`pool` and `states` are on tag `kv_cache`; `table` (requests) and `blocks` (pages) are outside of every tag.

    states: of the linear layers, a slot a request; None for a model without such layers.
    """

    layout: KVLayout
    pool: KVPool
    states: MambaPool | None
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
        states: MambaPool | None = None
        if kept.pool == "hybrid_linear":
            states = kept.build_states(size=config.max_running, device=saver.device, saver=saver)
            table: ReqToTokenPool = HybridReqToTokenPool(config.max_running, max_context_len, saver.device, states)
        else:
            table = ReqToTokenPool(config.max_running, max_context_len, saver.device)
        allocator = PagedTokenToKVPoolAllocator(config.kv_tokens, config.page_size, saver.device)
        return cls(layout=kept, pool=pool, states=states, table=table, blocks=BlockManager(table, allocator, pool))

    def on_resume(self) -> None:
        """After every resume of the tag: contents are undefined but for what padded tokens read."""
        self.pool.on_resume()
        if self.states is not None:
            self.states.on_resume()
