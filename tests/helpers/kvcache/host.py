"""Pools of every kind, with other bytes in every slot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvcache import (
    DoubleSparseTokenToKVPool,
    KVCacheConfig,
    MHATokenToKVPool,
    MHATokenToKVPoolFP4,
    MLACacheConfig,
    MLATokenToKVPool,
    MLATokenToKVPoolFP4,
)
from kvcache.config import FP4_DTYPE
from kvcache.pools.token import TokenPool
from kvcache.tiers import HostCacheConfig, HostKVCache
from memsaver.ops.dispatch import Impl

LAYERS, PAGES = 3, 8
LAYOUTS = ["layer_first", "page_first"]


def mha(device: str, page_size: int, dtype: torch.dtype = torch.bfloat16, **fields: Any) -> KVCacheConfig:
    size = PAGES * page_size
    fields = {"num_layers": LAYERS, "num_kv_heads": 2, "head_dim": 16, "size": size} | fields
    return KVCacheConfig(page_size=page_size, dtype=dtype, device=device, **fields)


def mla(device: str, page_size: int, dtype: torch.dtype = torch.bfloat16, **fields: Any) -> MLACacheConfig:
    fields = {"num_layers": LAYERS, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "size": PAGES * page_size} | fields
    return MLACacheConfig(page_size=page_size, dtype=dtype, device=device, **fields)


POOLS: dict[str, Callable[[str, int], TokenPool]] = {
    "mha": lambda device, ps: MHATokenToKVPool(mha(device, ps)),
    "odd heads": lambda device, ps: MHATokenToKVPool(mha(device, ps, num_kv_heads=3, head_dim=5, v_head_dim=7)),
    "slot-major": lambda device, ps: MHATokenToKVPool(mha(device, ps, v_head_dim=8, slot_major=True)),
    "fp32": lambda device, ps: MHATokenToKVPool(mha(device, ps, torch.float32, v_head_dim=3)),
    "fp8": lambda device, ps: MHATokenToKVPool(mha(device, ps, torch.float8_e4m3fn)),
    "fp8 odd": lambda device, ps: MHATokenToKVPool(mha(device, ps, torch.float8_e5m2, head_dim=7, v_head_dim=3)),
    "fp4": lambda device, ps: MHATokenToKVPoolFP4(mha(device, ps, FP4_DTYPE)),
    "mla": lambda device, ps: MLATokenToKVPool(mla(device, ps)),
    "mla fp8": lambda device, ps: MLATokenToKVPool(mla(device, ps, torch.float8_e4m3fn, qk_rope_head_dim=5)),
    "mla fp4": lambda device, ps: MLATokenToKVPoolFP4(mla(device, ps, FP4_DTYPE)),
    "double-sparse": lambda device, ps: DoubleSparseTokenToKVPool(mha(device, ps, torch.float8_e4m3fn), 5),
}


def poison(pool: TokenPool, seed: int) -> None:
    """Random bytes everywhere, NaN patterns among them."""
    generator = torch.Generator().manual_seed(seed)
    for part in pool.stored.values():
        raw = part.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=generator))


def contents(pool: TokenPool) -> list[torch.Tensor]:
    """All bytes, `[L, N, row bytes]` a part on the CPU: a copy."""
    return [part.flatten(2).view(torch.uint8).cpu().clone() for part in pool.stored.values()]


def make(name: str, device: str, page_size: int = 3, impl: Impl = "auto", **fields: Any) -> HostKVCache:
    fields = {"ratio": 1.0} | fields
    return HostKVCache(POOLS[name](device, page_size), HostCacheConfig(**fields), impl)
