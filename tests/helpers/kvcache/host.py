"""Pools of every kind, with other bytes in every slot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvcache import DoubleSparseTokenToKVPool
from kvcache.config import FP4_DTYPE
from kvcache.pools.token import TokenPool
from kvcache.tiers import HostCacheConfig, HostKVCache
from memsaver.ops.dispatch import Impl
from tests.helpers.kvcache.pools import FP8, mha, mla, pool_of

LAYERS, PAGES = 3, 8
LAYOUTS = ["layer_first", "page_first"]


# with the page size and the device to come; some rows are no multiple of a wide access
POOLS: dict[str, Callable[..., TokenPool]] = {
    "mha": lambda **fields: pool_of(mha(torch.bfloat16, **fields)),
    "odd heads": lambda **fields: pool_of(mha(torch.bfloat16, num_kv_heads=3, head_dim=5, v_head_dim=7, **fields)),
    "slot-major": lambda **fields: pool_of(mha(torch.bfloat16, slot_major=True, **fields)),
    "fp32": lambda **fields: pool_of(mha(v_head_dim=3, **fields)),
    "fp8": lambda **fields: pool_of(mha(FP8, **fields)),
    "fp8 odd": lambda **fields: pool_of(mha(torch.float8_e5m2, head_dim=7, v_head_dim=3, **fields)),
    "fp4": lambda **fields: pool_of(mha(FP4_DTYPE, **fields)),
    "mla": lambda **fields: pool_of(mla(**fields)),
    "mla fp8": lambda **fields: pool_of(mla(FP8, qk_rope_head_dim=5, **fields)),
    "mla fp4": lambda **fields: pool_of(mla(FP4_DTYPE, **fields)),
    "double-sparse": lambda **fields: DoubleSparseTokenToKVPool(mha(FP8, **fields), 5),
}


def make_pool(name: str, device: str, page_size: int) -> TokenPool:
    return POOLS[name](device=device, page_size=page_size, layers=LAYERS, size=PAGES * page_size)


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
    return HostKVCache(make_pool(name, device, page_size), HostCacheConfig(**fields), impl)
