"""The engine's KV cache: the pool that the model's layers ask for, and its bookkeeping."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvcache import (
    BlockManager,
    KVAllocator,
    KVCacheConfig,
    KVLayout,
    KVPool,
    RadixCache,
    ReqToTokenPool,
    layout,
    pages_across,
)
from kvcache.allocators import PagedTokenToKVPoolAllocator, SWATokenToKVPoolAllocator
from kvcache.config import FP4_DTYPE, FP8_DTYPES
from kvcache.pools import DoubleSparseTokenToKVPool, MambaPool, SWAKVPool, TokenPool
from kvcache.requests import HybridReqToTokenPool
from memsaver import LeaseError, MemorySaver, OutOfMemory
from rollout.config import DoubleSparsity, EngineConfig, first_tokens, why_one_size
from rollout.model.decoder import ModelConfig, rank_layout
from rollout.serving.prefix import PrefixBlocks, StatePrefixBlocks
from rollout.serving.tiers import TieredBlocks
from rollout.tag_names import KV_CACHE

_log = logging.getLogger("rollout")
# Left free beside a pool that grows on a GPU: what the steps of the engine itself may take.
_SPARE = 2**30  # bytes
_ASKED = 0.02  # seconds between two looks at what is free


class Elastic:
    """A pool that may have memory behind its first tokens alone; `EngineConfig.elastic`."""

    def __init__(
        self,
        pool: TokenPool,
        allocator: PagedTokenToKVPoolAllocator,
        saver: MemorySaver,
        least: int,
        most: int,
    ) -> None:
        """least, most: tokens."""
        self.pool, self.allocator, self.saver = pool, allocator, saver
        self.least, self.most = least, most
        self.winding_down = False  # who waits for memory gets what no request wants
        self._ask_at = 0.0
        self._left = most  # tokens that were left to the pool when it last gave some back

    def shrink(self) -> None:
        """Keeps memory for one sequence; no page may have an owner."""
        self.allocator.limit(0)
        self._resize(self.least)

    def fill(self) -> None:
        """Takes all memory; OutOfMemory changes nothing."""
        self._resize(self.most)

    def hurry(self) -> None:
        """Has the next step look, whenever one looked last: there are new requests."""
        self._ask_at, self._left = 0.0, self.most

    def fit(self, wanted: Callable[[], int], compact: Callable[[int], bool]) -> None:
        """Takes what is free now, up to the tokens that are wanted, in steps worth a call of the
        driver, which is asked now and then: while another process pins or maps memory, it takes its
        time to answer. While winding down it gives back what is not wanted any more, in such steps.

        compact: moves what is used to so many first pages, if it has room there.
        """
        if (began := time.monotonic()) < self._ask_at:
            return
        tokens = max(self.pool.page_size, min(wanted(), self.most))
        if tokens > self.pool.size:
            self._take(tokens - self.pool.size)
        elif self.winding_down and min(self._left, self.pool.size) - tokens >= self.most // 16:
            self._give_back(tokens, compact)
        now = time.monotonic()
        self._ask_at = now + max(_ASKED, 10 * (now - began))

    def _take(self, missing: int) -> None:
        spare = _SPARE if self.saver.device.type == "cuda" else 0
        more = min((self.saver.free_bytes - spare) // self.pool.bytes_per_token, missing)
        if more >= min(missing, self.most // 16):
            with contextlib.suppress(OutOfMemory):  # somebody else was faster
                self._resize(self.pool.size + more)

    def _give_back(self, tokens: int, compact: Callable[[int], bool]) -> None:
        """Leaves the pool as it is where that cannot be."""
        self._left = tokens  # on a GPU it may keep more: the rest of an extent
        with contextlib.suppress(OutOfMemory, LeaseError, torch.OutOfMemoryError):
            if compact(tokens // self.pool.page_size):
                self.allocator.limit(tokens)
                try:
                    self.pool.resize(tokens)
                finally:
                    self.follow()

    def _resize(self, tokens: int) -> None:
        self.pool.resize(tokens)
        self.follow()

    def follow(self) -> None:
        """Hands out the pages that have memory."""
        self.allocator.limit(self.pool.size)

    def begin(self) -> None:
        """Hands out the pages that have memory, and takes more where one sequence needs it."""
        self._resize(self.least) if self.pool.size < self.least else self.follow()


@dataclass(frozen=True, kw_only=True)
class Cache:
    """`pool` and `states` are on tag `kv_cache`, `table` and `blocks` outside of every tag.

    states: of the linear layers, a slot a request and `EngineConfig.prefix_states` for prefixes;
    None for a model without such layers. elastic: None where the pool has one size.
    """

    layout: KVLayout
    pool: KVPool
    states: MambaPool | None
    table: ReqToTokenPool
    blocks: BlockManager
    sparsity: DoubleSparsity | None
    elastic: Elastic | None

    @classmethod
    def build(
        cls,
        model: ModelConfig,
        config: EngineConfig,
        max_context_len: int,
        dtype: torch.dtype,
        saver: MemorySaver,
    ) -> Cache:
        kv_layout = rank_layout(
            layout(model.hf_config, config.kv_cache_dtype, dtype), config.tensor_parallel_size
        )
        _check_dtype(kv_layout, config)
        window_size = window_tokens(kv_layout, config)
        size: dict[str, Any] = {
            "size": config.kv_tokens,
            "page_size": config.page_size,
            "device": saver.device,
        }
        fixed = why_one_size(
            kv_layout.pages_tell_all,
            config.tensor_parallel_size,
            config.tiers is not None,
            config.double_sparsity is not None,
        )
        grows = config.elastic and fixed is None
        if config.elastic and fixed:
            _log.warning("elastic=True: the KV pool has one size and wakes whole: %s", fixed)
        if config.double_sparsity is None:
            size["slot_major"] = grows
            pool = kv_layout.build(**size, window_size=window_size, saver=saver, tag=KV_CACHE)
        else:
            pool = _sparse_pool(kv_layout, config.double_sparsity, size, saver)
        states: MambaPool | None = None
        if kv_layout.pool == "hybrid_linear":
            states = kv_layout.build_states(
                size=config.state_slots, device=saver.device, saver=saver
            )
            table: ReqToTokenPool = HybridReqToTokenPool(
                config.max_running, max_context_len, saver.device, states
            )
        else:
            table = ReqToTokenPool(config.max_running, max_context_len, saver.device)
        allocator: KVAllocator
        if isinstance(pool, SWAKVPool) and window_size is not None:
            allocator = SWATokenToKVPoolAllocator(
                config.kv_tokens, window_size, config.page_size, saver.device
            )
            pool.register_mapping(allocator.full_to_swa_index_mapping)
        else:
            allocator = PagedTokenToKVPoolAllocator(
                config.kv_tokens, config.page_size, saver.device
            )
        blocks = BlockManager(table, allocator, pool, kv_layout.sliding_window)
        elastic = None
        if grows:
            assert isinstance(pool, TokenPool)
            assert isinstance(allocator, PagedTokenToKVPoolAllocator)
            least = first_tokens(max_context_len, config.kv_tokens, config.page_size)
            elastic = Elastic(pool, allocator, saver, least, config.kv_tokens)
        return cls(
            layout=kv_layout,
            pool=pool,
            states=states,
            table=table,
            blocks=blocks,
            sparsity=config.double_sparsity,
            elastic=elastic,
        )

    def prefix_blocks(self, config: EngineConfig) -> PrefixBlocks:
        """The blocks as the scheduler takes them, with a prefix cache if one is wanted and safe:
        windows of a prefix are gone when its sequence ends, states need slots of their own, and
        double sparsity decodes otherwise than it prefills.
        """
        safe = self.layout.pages_tell_all and self.sparsity is None
        if config.tiers is not None:
            if not safe:
                raise ValueError(
                    "tiers need full or latent attention in every layer and no double sparsity: "
                    "elsewhere pages are not all that a sequence is made of; leave tiers out"
                )
            return TieredBlocks(self.blocks, config.tiers)
        if self.states is not None and config.state_slots > config.max_running:
            return StatePrefixBlocks(self.blocks)
        return PrefixBlocks(
            self.blocks, RadixCache(self.blocks.allocator) if config.prefix_cache and safe else None
        )

    @property
    def withheld_pages(self) -> int:
        """Counts pages of an elastic pool that have no memory now."""
        if self.elastic is None:
            return 0
        return (self.elastic.most - self.elastic.pool.size) // self.elastic.pool.page_size

    @property
    def capturable(self) -> bool:
        """Tells whether a CUDA graph can read it: rows of FP4 are counted on the host."""
        return self.layout.dtype != FP4_DTYPE

    @property
    def window(self) -> int | None:
        """Keys that a query sees in every layer; None: all, or it differs (see `sliding`)."""
        return None if self.sliding else self.layout.sliding_window

    @property
    def sliding(self) -> tuple[int, Tensor] | None:
        """The window of sliding layers, and slot -> slot of their pool, int64; None without."""
        allocator = self.blocks.allocator
        if self.layout.sliding_window is None or not isinstance(
            allocator, SWATokenToKVPoolAllocator
        ):
            return None
        return self.layout.sliding_window, allocator.full_to_swa_index_mapping

    def on_resume(self, partly: bool = False) -> None:
        """Zeroes what padded tokens read after each resume of the tag; all else is undefined.

        An elastic pool takes the rest of its memory, unless it is to begin with a part of it.
        """
        self.pool.on_resume()
        if self.states is not None:
            self.states.on_resume()
        if self.elastic is not None:
            (self.elastic.begin if partly else self.elastic.fill)()


def _check_dtype(kv_layout: KVLayout, config: EngineConfig) -> None:
    if kv_layout.dtype not in (kv_layout.model_dtype, *FP8_DTYPES, FP4_DTYPE):
        raise ValueError(
            f"kv_cache_dtype={config.kv_cache_dtype!r} with a model in {kv_layout.model_dtype} "
            "is not "
            f"supported; use 'auto', 'fp8_e4m3', 'fp8_e5m2' or 'fp4_e2m1'"
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


def window_tokens(kv_layout: KVLayout, config: EngineConfig) -> int | None:
    """Size of the pool of sliding layers, None without; ValueError if asked for in vain."""
    if kv_layout.pool != "swa" or kv_layout.sliding_window is None:
        if config.window_tokens is not None:
            raise ValueError(
                f"window_tokens={config.window_tokens} is for models that mix full and sliding "
                f"layers; leave it out"
            )
        return None
    if config.window_tokens is not None:
        return config.window_tokens
    page = config.page_size
    pages = config.max_running * pages_across(kv_layout.sliding_window, page) + -(
        -config.max_prefill_tokens // page
    )
    return min(config.kv_tokens, pages * page)
