"""Decode attention over every kind of storage: how fast one layer's cached tokens are read."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvcache import KVCacheConfig, KVPool, MLACacheConfig
from kvcache.config import FP4_DTYPE, TokenConfig
from kvcache.pools import MLATokenToKVPool
from rollout.model.layer_kv import FP4KV, FP8KV
from rollout.ops.attention_plan import BatchShape, KVReader, StoredKV, plan_attention
from rollout.ops.paged_attention import attend
from tests.benchmarks.common import Figures, Scale, device_us, share
from tests.benchmarks.kvcache.pools import PAGE_SIZE, pool_config, pool_of, shuffled_slots

LAYERS, LAYER = 4, 2
HEADS, KV_HEADS, DIM = 32, 8, 128  # of Llama-3.1-8B
RANK, ROPE, SCALE = 512, 64, 0.07  # of DeepSeek-V3


def read(scale: Scale) -> Figures:
    """A decode step's attention in one layer, 64 requests with 4,096 tokens each on scattered
    pages.
    """
    found = []
    for name, config in _configs(scale).items():
        if isinstance(config, MLACacheConfig):
            for heads in (16,) if scale.tiny else (16, 128):
                found += _measure(scale, f"{name}, {heads} query heads", config, heads)
        else:
            found += _measure(scale, name, config, HEADS)
    return found


def _configs(scale: Scale) -> dict[str, TokenConfig]:
    size = scale.choose(64, 2) * scale.choose(4096, 16)
    plain = pool_config(scale.device, size, num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=DIM)
    return {
        "bf16, layer-major": plain,
        "bf16, slot-major": replace(plain, slot_major=True),
        "fp8_e4m3": replace(plain, dtype=torch.float8_e4m3fn),
        "fp4_e2m1": replace(plain, dtype=FP4_DTYPE),
        "bf16, latent": MLACacheConfig(
            num_layers=LAYERS,
            size=size,
            page_size=PAGE_SIZE,
            dtype=torch.bfloat16,
            device=scale.device,
            kv_lora_rank=RANK,
            qk_rope_head_dim=ROPE,
        ),
    }


def _measure(scale: Scale, name: str, config: TokenConfig, heads: int) -> Figures:
    pool, slots = _filled(scale, config)
    batch, length = scale.choose(64, 2), scale.choose(4096, 16)
    table = torch.cat([slots.new_zeros(1, length), slots.view(batch, length)]).int()
    shape = BatchShape(
        rows=range(1, batch + 1), q_lens=[1] * batch, kv_lens=[length] * batch, num_decode=batch
    )
    width = RANK + ROPE if isinstance(config, MLACacheConfig) else DIM
    q = torch.randn(batch, heads, width, dtype=torch.bfloat16, device=scale.device)
    reader, plan = _reader(pool, config), plan_attention(shape, table, "triton")

    def run() -> torch.Tensor:
        return attend(q, reader, plan, SCALE)

    expected = attend(q, reader, plan_attention(shape, table, "torch"), SCALE)
    assert torch.allclose(run().float(), expected.float(), atol=2e-2, rtol=2e-2), name
    return share(
        scale, name, slots.numel() * pool.bytes_per_token // LAYERS, device_us(scale, run, 10)
    )


def _filled(scale: Scale, config: TokenConfig) -> tuple[KVPool, torch.Tensor]:
    """A pool with random rows in one layer, and its slots in random pages."""
    slots = shuffled_slots(scale.device, config.size, config.size // PAGE_SIZE)
    torch.manual_seed(0)
    rows = [
        torch.randn(config.size, *shape, device=scale.device).bfloat16()
        for shape in config.rows.values()
    ]
    if isinstance(config, MLACacheConfig):
        latent = MLATokenToKVPool(config)
        latent.set_kv_buffer(LAYER, slots, rows[0])
        return latent, slots
    assert isinstance(config, KVCacheConfig)
    pool = pool_of(config)
    pool.set_kv_buffer(LAYER, slots, *rows)
    return pool, slots


def _reader(pool: KVPool, config: TokenConfig) -> KVReader:
    if config.dtype == FP4_DTYPE:
        return FP4KV(pool, LAYER, DIM)
    if config.dtype == torch.float8_e4m3fn:
        return FP8KV(pool, LAYER, DIM)
    k, v = pool.get_kv_buffer(LAYER)
    return StoredKV(k=k, v=v)
