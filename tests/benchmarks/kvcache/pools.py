"""Pools of Qwen2.5-7B's shape, unless told otherwise, and slots of them in random order."""

from __future__ import annotations

from typing import Any

import torch

from kvcache import KVCacheConfig
from kvcache.config import FP4_DTYPE
from kvcache.pools import MHATokenToKVPool, MHATokenToKVPoolFP4
from memsaver import MemorySaver

LAYERS, HEADS, DIM, PAGE_SIZE = 28, 4, 128, 16


def pool_config(device: torch.device, tokens: int, **changes: Any) -> KVCacheConfig:
    shape = {"num_layers": LAYERS, "num_kv_heads": HEADS, "head_dim": DIM, "dtype": torch.bfloat16}
    return KVCacheConfig(
        **{"size": tokens, "page_size": PAGE_SIZE, "device": device, **shape, **changes}
    )  # type: ignore[arg-type]


def make_pool(
    device: torch.device, tokens: int, saver: MemorySaver | None = None, **changes: Any
) -> MHATokenToKVPool:
    return pool_of(pool_config(device, tokens, **changes), saver)


def pool_of(config: KVCacheConfig, saver: MemorySaver | None = None) -> MHATokenToKVPool:
    return (MHATokenToKVPoolFP4 if config.dtype == FP4_DTYPE else MHATokenToKVPool)(config, saver)


def shuffled_slots(
    device: torch.device, tokens: int, pages: int, page_size: int = PAGE_SIZE
) -> torch.Tensor:
    """Slots int64 `[tokens]` of whole pages out of 1..pages in random order."""
    chosen = (
        torch.randperm(pages, generator=torch.Generator().manual_seed(0))[: tokens // page_size] + 1
    )
    slots = chosen[:, None] * page_size + torch.arange(page_size)
    return slots.flatten().to(device)
