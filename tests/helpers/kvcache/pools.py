"""One small pool of every kind, and rows to write to it."""

from collections.abc import Callable
from typing import Any

import torch

from kvcache import KVCacheConfig, KVPool, MLACacheConfig
from kvcache.config import FP4_DTYPE
from kvcache.pools import (
    DoubleSparseTokenToKVPool,
    HybridLinearKVPool,
    MambaConfig,
    MambaPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    SWAKVPool,
    TokenPool,
)
from memsaver import MemorySaver
from tests.helpers.kvcache.blocks import DEVICE

PS, SIZE = 4, 64
SLOTS = PS + SIZE
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
ODD = {"num_kv_heads": 3, "head_dim": 5, "v_head_dim": 7}


def mha(
    dtype: torch.dtype = torch.float32, layers: int = 2, size: int = SIZE, **fields: Any
) -> KVCacheConfig:
    fields = {"num_kv_heads": 2, "head_dim": 32, "v_head_dim": 16} | fields
    fields = {"page_size": PS, "device": DEVICE} | fields
    return KVCacheConfig(num_layers=layers, size=size, dtype=dtype, **fields)


def mla(
    dtype: torch.dtype = torch.bfloat16, layers: int = 2, size: int = SIZE, **fields: Any
) -> MLACacheConfig:
    fields = {"kv_lora_rank": 48, "qk_rope_head_dim": 16} | fields
    fields = {"page_size": PS, "device": DEVICE} | fields
    return MLACacheConfig(num_layers=layers, size=size, dtype=dtype, **fields)


def pool_of(config: KVCacheConfig | MLACacheConfig, saver: MemorySaver | None = None) -> TokenPool:
    if isinstance(config, MLACacheConfig):
        return MLATokenToKVPool(config, saver)
    return MHATokenToKVPool(config, saver)


def swa(saver: MemorySaver | None = None) -> SWAKVPool:
    pool = SWAKVPool(mha(layers=1), mha(layers=1, size=16), [1], [0], saver)
    mapping = torch.zeros(SLOTS, dtype=torch.int64, device=DEVICE)
    mapping[PS:20] = torch.arange(PS, 20, device=DEVICE).flip(0)
    pool.register_mapping(mapping)
    return pool


def kind(config: Callable[..., Any], dtype: torch.dtype, **fixed: Any) -> Callable[..., Any]:
    """Return a function that builds pools of one kind, given a saver and further fields."""
    return lambda saver=None, **fields: pool_of(config(dtype, **fixed, **fields), saver)


def double_sparse(saver: MemorySaver | None = None, **fields: Any) -> TokenPool:
    return DoubleSparseTokenToKVPool(mha(FP8, **fields), 5, saver)


# Builder and bytes per token. All but the last two builders accept other sizes. Rows of some pools
# are not a multiple of a wide memory access.
POOLS: dict[str, tuple[Callable[..., Any], int]] = {
    "mha": (kind(mha, torch.float32), 2 * 2 * 48 * 4),
    "slot-major": (kind(mha, BF16, slot_major=True), 2 * 2 * 48 * 2),
    "odd": (kind(mha, BF16, **ODD), 2 * 3 * 12 * 2),
    "fp8": (kind(mha, FP8), 2 * 2 * 48),
    "fp8-odd": (kind(mha, torch.float8_e5m2, **ODD), 2 * 3 * 12),
    "fp4": (kind(mha, FP4_DTYPE), 2 * 2 * (24 + 3)),
    "mla": (kind(mla, BF16), 2 * 64 * 2),
    "mla-fp8": (kind(mla, FP8, qk_rope_head_dim=5), 2 * 53),
    "mla-fp4": (kind(mla, FP4_DTYPE, slot_major=True), 2 * (32 + 4)),
    "double-sparse": (double_sparse, 2 * 2 * (48 + 5 * 2)),
    "swa": (swa, 2 * 2 * 48 * 4),
    "hybrid": (lambda saver=None: HybridLinearKVPool(mha(), [1, 0], saver), 2 * 2 * 48 * 4),
}


def make(name: str, saver: MemorySaver | None = None, **fields: Any) -> Any:
    return POOLS[name][0](saver, **fields)


def make_states(size: int) -> MambaPool:
    """Build a pool of states that take little memory."""
    shapes: dict[str, Any] = {"conv_shapes": (), "temporal_shape": (1,), "conv_dtype": BF16}
    return MambaPool(MambaConfig(num_layers=1, size=size, device="cpu", **shapes))


def stored(pool: Any) -> list[torch.Tensor]:
    """Return all tensors [L, slots, ...] of a pool and its sub-pools, as bytes."""
    return [
        part.view(torch.uint8) for p in getattr(pool, "pools", [pool]) for part in p.stored.values()
    ]


def rows_for(pool: KVPool, n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = pool.get_rows(0, torch.zeros(n, dtype=torch.int64, device=DEVICE))
    return tuple(torch.randn(x.shape, generator=generator).to(x.dtype).to(DEVICE) for x in (k, v))  # type: ignore


def write(pool: KVPool, loc: torch.Tensor, seed: int = 0) -> None:
    for layer in range(2):
        k, v = rows_for(pool, len(loc), seed + layer)
        pool.set_kv_buffer(
            layer, loc, k, k[..., : v.shape[-1]] if isinstance(pool, MLATokenToKVPool) else v
        )


def at(*slots: int) -> torch.Tensor:
    return torch.tensor(slots, device=DEVICE)
