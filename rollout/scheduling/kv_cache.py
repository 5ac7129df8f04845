"""The engine's KV cache: the pools for the model's layers, and their bookkeeping."""

import logging
from typing import Any

import torch
from torch import Tensor

from kvcache import (
    BlockManager,
    KVAllocator,
    KVCacheConfig,
    KVLayout,
    RadixCache,
    ReqToTokenPool,
    layout,
    pages_across,
)
from kvcache.allocators import PagedTokenToKVPoolAllocator, SWATokenToKVPoolAllocator
from kvcache.config import FP4_DTYPE, FP8_DTYPES
from kvcache.pools import DoubleSparseTokenToKVPool, MambaPool, SWAKVPool, TokenPool
from kvcache.request_tables import HybridReqToTokenPool
from memsaver import MemorySaver
from memsaver.ops.layout import round_up
from rollout.config import DoubleSparsity, EngineConfig, first_tokens, why_one_size
from rollout.model.decoder import ModelConfig, rank_layout
from rollout.scheduling.prefix import Elastic, PrefixBlocks, StatePrefixBlocks
from rollout.scheduling.tiers import TieredBlocks
from rollout.tag_names import KV_CACHE

_log = logging.getLogger("rollout")


class Cache:
    """KV cache of one engine: pools on tag `kv_cache`, bookkeeping outside of every tag.

    Attributes:
        pool: Keys and values, on the tag.
        states: States of the linear layers, on the tag: a slot per running sample, and
            `EngineConfig.prefix_states` slots for prefixes. None in a model without such layers.
        elastic: Grows and shrinks the pool; None if it has a fixed size.
        window: Number of keys that a query attends to, if that is the same in all layers; None:
            all keys, or the layers differ.
        sliding: With a separate pool for sliding layers, their window, and the map from slots of
            the full pool to slots of theirs, int64.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        max_context_len: int,
        dtype: torch.dtype,
        saver: MemorySaver,
    ) -> None:
        kv_layout = layout(model.hf_config, config.kv_cache_dtype, dtype)
        self.layout = rank_layout(kv_layout, config.tensor_parallel_size)
        self.sparsity = config.double_sparsity
        _check_dtype(self.layout, config)
        tokens, page, device = config.kv_tokens, config.page_size, saver.device
        assert tokens is not None, "the engine sizes the pool"
        window, grows = window_tokens(self.layout, config, tokens), _grows(self.layout, config)
        size: dict[str, Any] = {"size": tokens, "page_size": page, "device": device}
        if self.sparsity is None:
            size |= {"window_size": window, "slot_major": grows}
            self.pool = self.layout.build(**size, saver=saver, tag=KV_CACHE)
        else:
            self.pool = _sparse_pool(self.layout, self.sparsity, size, saver)
        self.states: MambaPool | None = None
        rows = config.max_running, max_context_len, device
        if self.layout.pool == "hybrid_linear":
            slots = config.state_slots
            self.states = self.layout.build_states(size=slots, device=device, saver=saver)
            self.table: ReqToTokenPool = HybridReqToTokenPool(*rows, self.states)
        else:
            self.table = ReqToTokenPool(*rows)
        allocator: KVAllocator
        self.elastic: Elastic | None = None
        self.sliding: tuple[int, Tensor] | None = None
        if isinstance(self.pool, SWAKVPool) and window is not None:
            allocator = SWATokenToKVPoolAllocator(tokens, window, page, device)
            self.pool.register_mapping(allocator.full_to_swa_index_mapping)
            assert self.layout.sliding_window is not None
            self.sliding = self.layout.sliding_window, allocator.full_to_swa_index_mapping
        else:
            allocator = PagedTokenToKVPoolAllocator(tokens, page, device)
            if grows:
                assert isinstance(self.pool, TokenPool)
                least = first_tokens(max_context_len, tokens, page)
                self.elastic = Elastic(self.pool, allocator, saver, least, tokens)
        self.window = None if self.sliding else self.layout.sliding_window
        self.blocks = BlockManager(self.table, allocator, self.pool, self.layout.sliding_window)

    def prefix_blocks(self, config: EngineConfig) -> PrefixBlocks:
        """Build the scheduler's block manager, with a prefix cache if it is wanted and safe.

        It is not safe with sliding layers, whose windows of a prefix are gone when its sequence
        ends, nor with double sparsity, whose decode computes other values than its prefill. In
        these cases, and with linear layers, tiers raise a ValueError.
        """
        safe = self.layout.pages_tell_all and self.sparsity is None
        if config.tiers is not None:
            if not safe:
                raise ValueError(
                    "tiers need full or latent attention in every layer and no double sparsity: "
                    "otherwise a sequence consists of more than its pages; leave tiers out"
                )
            return TieredBlocks(self.blocks, config.tiers)
        if self.states is not None and config.state_slots > config.max_running:
            return StatePrefixBlocks(self.blocks)
        wanted = config.prefix_cache and safe
        return PrefixBlocks(self.blocks, RadixCache(self.blocks.allocator) if wanted else None)

    @property
    def withheld_pages(self) -> int:
        """Return the number of pages of an elastic pool that have no memory now."""
        if self.elastic is None:
            return 0
        return (self.elastic.most - self.elastic.pool.size) // self.elastic.pool.page_size

    @property
    def capturable(self) -> bool:
        """Return whether CUDA graphs can read the cache; with FP4 the host counts rows."""
        return self.layout.dtype != FP4_DTYPE

    def on_resume(self, partly: bool = False) -> None:
        """Zero the padding pages after a resume of the tag; all other content is undefined.

        With `partly`, an elastic pool starts small; otherwise it allocates all of its memory.
        """
        self.pool.on_resume()
        if self.states is not None:
            self.states.on_resume()
        if self.elastic is not None:
            (self.elastic.begin if partly else self.elastic.fill)()


def _grows(kv_layout: KVLayout, config: EngineConfig) -> bool:
    """Return whether the pool is elastic; log the reason if it was wanted and is impossible."""
    if not config.elastic:
        return False
    tiers, sparse = config.tiers is not None, config.double_sparsity is not None
    why = why_one_size(kv_layout.pages_tell_all, config.tensor_parallel_size, tiers, sparse)
    if why is not None:
        _log.warning("elastic=True: the KV pool has a fixed size and wakes up whole: %s", why)
    return why is None


def _check_dtype(kv_layout: KVLayout, config: EngineConfig) -> None:
    if kv_layout.dtype not in (kv_layout.model_dtype, *FP8_DTYPES, FP4_DTYPE):
        raise ValueError(
            f"kv_cache_dtype={config.kv_cache_dtype!r} with a model in {kv_layout.model_dtype} is "
            "not supported; use 'auto', 'fp8_e4m3', 'fp8_e5m2' or 'fp4_e2m1'"
        )


def _sparse_pool(
    kv_layout: KVLayout, sparsity: DoubleSparsity, size: dict[str, Any], saver: MemorySaver
) -> DoubleSparseTokenToKVPool:
    if set(kv_layout.kinds) != {"full"}:
        kinds = sorted(set(kv_layout.kinds))
        raise ValueError(
            f"double_sparsity needs full attention in every layer, the model has {kinds}"
        )
    sparsity.check(len(kv_layout.kinds), *kv_layout.rows["k"])
    pool_config = kv_layout.token_config(num_layers=len(kv_layout.kinds), **size)
    assert isinstance(pool_config, KVCacheConfig)
    return DoubleSparseTokenToKVPool(pool_config, sparsity.heavy_channel_num, saver, KV_CACHE)


def window_tokens(kv_layout: KVLayout, config: EngineConfig, tokens: int) -> int | None:
    """Return the tokens of the pool of sliding layers; None if the model needs no such pool.

    `tokens` are those of the pool of the full layers.
    """
    if kv_layout.pool != "swa" or kv_layout.sliding_window is None:
        if config.window_tokens is not None:
            raise ValueError(
                f"window_tokens={config.window_tokens} is for models that mix full and sliding "
                f"layers; leave it out"
            )
        return None
    if config.window_tokens is not None:
        return config.window_tokens
    windows = config.max_running * pages_across(kv_layout.sliding_window, config.page_size)
    chunk = round_up(config.max_prefill_tokens, config.page_size)
    return min(tokens, windows * config.page_size + chunk)
