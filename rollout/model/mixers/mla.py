"""Multi-head latent attention (DeepSeek-V2, V3): a token keeps one latent row for all heads.

A head's keys and values are products of the latent row and `kv_b_proj`. They are never computed:
the key half of `kv_b_proj` multiplies the query before attention, and the value half multiplies the
output of attention. Attention therefore sees one KV head that all query heads share. Ranks of a
tensor-parallel engine divide the query heads; each rank keeps all latent rows.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvcache.observed_model import ObservedAttention
from kvcache.ops import rotate_heads
from kvcache.pools import MLATokenToKVPool
from rollout.model.mixers.attention import LayerKV
from rollout.model.mixers.base import Batch, LayerParts, MixerConfig, RopeConfig
from rollout.ops.row_wise import linear, rms_norm
from rollout.weights.params import ParamGroup, Split, Splits, one, stack

MODEL_TYPES = ("deepseek_v2", "deepseek_v3")
_EPS = 1e-6  # transformers does not use the config's eps for the norms inside attention


@dataclass(frozen=True, kw_only=True)
class MLAConfig(MixerConfig):
    """Latent attention of one layer."""

    num_heads: int  # query heads
    q_rank: int | None  # width of the query's latent; None projects queries directly
    kv_rank: int  # width of the latent part of a cached row
    nope_dim: int  # elements of a query head without position
    rope_dim: int  # rotated elements of a query head and of a cached row
    value_dim: int  # elements of a head's value
    scale: float  # factor of the scores
    rope: RopeConfig
    interleaved: bool  # rotary pairs are adjacent elements, not halves
    bias: bool  # whether the projections from and to the hidden size have biases

    def __post_init__(self) -> None:
        if self.bias and self.q_rank is None:
            raise ValueError(
                "attention_bias=True is not supported with q_lora_rank=None; supported: False"
            )

    @classmethod
    def of(cls, config: Any, layer: ObservedAttention, rope: RopeConfig) -> "MLAConfig":
        """Describe an observed layer; `config` is its model's Hugging Face config."""
        assert layer.latent is not None
        kv_rank, rope_dim = layer.latent
        return cls(
            num_heads=layer.query_heads,
            q_rank=config.q_lora_rank,
            kv_rank=kv_rank,
            nope_dim=layer.key_width - rope_dim,
            rope_dim=rope_dim,
            value_dim=layer.value_width,
            scale=layer.scale,
            rope=rope,
            interleaved=config.model_type == "deepseek_v2" or bool(config.rope_interleave),
            bias=bool(config.attention_bias),
        )

    @property
    def query_width(self) -> int:
        """Return the number of elements of a token's query heads."""
        return self.num_heads * (self.nope_dim + self.rope_dim)

    @property
    def widths(self) -> tuple[int, int, int]:
        """Return the widths of the first product: query or its latent, latent row, rotary key."""
        return self.q_rank or self.query_width, self.kv_rank, self.rope_dim

    def groups(self, hidden_size: int, layer: str) -> list[ParamGroup]:
        attn = layer + "self_attn."
        first = (
            (f"{attn}{'q_a_proj' if self.q_rank else 'q_proj'}", self.widths[0]),
            (f"{attn}kv_a_proj_with_mqa", self.kv_rank + self.rope_dim),
        )
        kv_rows = self.num_heads * (self.nope_dim + self.value_dim)
        weights = [(f"{name}.weight", (n, hidden_size)) for name, n in first]
        groups = [stack(attn + "qkv_a_proj.weight", weights)]
        if self.bias:
            biases = [(f"{name}.bias", (n,)) for name, n in first]
            groups.append(stack(attn + "qkv_a_proj.bias", biases))
        if self.q_rank:
            groups.append(one(attn + "q_a_layernorm.weight", self.q_rank))
            groups.append(one(attn + "q_b_proj.weight", self.query_width, self.q_rank))
        groups.append(one(attn + "kv_a_layernorm.weight", self.kv_rank))
        groups.append(one(attn + "kv_b_proj.weight", kv_rows, self.kv_rank))
        groups.append(one(attn + "o_proj.weight", hidden_size, self.num_heads * self.value_dim))
        if self.bias:
            groups.append(one(attn + "o_proj.bias", hidden_size))
        return groups

    def splits(self) -> Splits:
        queries = [Split(dim=0, units=(self.nope_dim + self.rope_dim,))]
        return {
            "self_attn.q_proj.weight": queries,
            "self_attn.q_b_proj.weight": queries,
            "self_attn.kv_b_proj.weight": [Split(dim=0, units=(self.nope_dim + self.value_dim,))],
            "self_attn.o_proj.weight": [Split(dim=1, units=(self.value_dim,))],
        }

    def of_rank(self, size: int) -> "MLAConfig":
        return replace(self, num_heads=self.num_heads // size)

    def build(self, index: int, parts: LayerParts) -> "LatentAttention":
        return LatentAttention(self, index, parts)


class LatentAttention:
    """Latent attention over views of the weight store, valid across pause and resume."""

    def __init__(self, config: MLAConfig, index: int, parts: LayerParts) -> None:
        self.config = config
        name, store = f"model.layers.{index}.self_attn.", parts.store
        self._first = store.tensor(name + "qkv_a_proj.weight")
        self._first_bias = store.tensor(name + "qkv_a_proj.bias") if config.bias else None
        self._q_norm = store.tensor(name + "q_a_layernorm.weight") if config.q_rank else None
        self._q_b = store.tensor(name + "q_b_proj.weight") if config.q_rank else None
        self._kv_norm = store.tensor(name + "kv_a_layernorm.weight")
        kv_b = store.tensor(name + "kv_b_proj.weight").view(config.num_heads, -1, config.kv_rank)
        self._to_keys, self._to_values = kv_b.split((config.nope_dim, config.value_dim), dim=1)
        self._o = store.tensor(name + "o_proj.weight")
        self._ranks = parts.ranks
        adds_bias = config.bias and parts.ranks.rank == 0
        self._o_bias = store.tensor(name + "o_proj.bias") if adds_bias else None
        self._rotary = parts.rotary(config.rope)
        assert isinstance(parts.pool, MLATokenToKVPool)
        self._layer, self._pool = index, parts.pool
        self._kv = LayerKV(parts.pool, index)
        self._scale = config.scale
        self._stage = f"attention of layer {index}"

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        first = linear(x, self._first, self._first_bias)
        queries, latent, key = first.split(self.config.widths, dim=1)
        if self._q_norm is not None and self._q_b is not None:
            queries = linear(rms_norm(queries, self._q_norm, _EPS), self._q_b)
        key = self._rotate(key.unsqueeze(1), batch)
        query, latent = self._absorb(queries, batch), rms_norm(latent, self._kv_norm, _EPS)
        self._pool.set_mla_kv_buffer(self._layer, batch.slots, latent.unsqueeze(1), key)
        out = self._kv.attend(query, batch.plan, self._scale)
        out = linear(self._expand(out), self._o, self._o_bias)
        return self._ranks.sum(out, self._stage)

    def _absorb(self, queries: Tensor, batch: Batch) -> Tensor:
        """Map queries [T, heads * (nope + rope)] to queries of cached rows [T, heads, rank + rope].

        The first `rank` elements multiply latent rows, the others rotary keys.
        """
        config = self.config
        heads = queries.unflatten(1, (config.num_heads, -1))
        out = heads.new_empty((*heads.shape[:2], config.kv_rank + config.rope_dim))
        latent = out[..., : config.kv_rank].transpose(0, 1)
        torch.bmm(heads[..., : config.nope_dim].transpose(0, 1), self._to_keys, out=latent)
        self._rotate(heads[..., config.nope_dim :], batch, out[..., config.kv_rank :])
        return out

    def _expand(self, out: Tensor) -> Tensor:
        """Map outputs over latent rows [T, heads, rank] to values [T, heads * value_dim]."""
        values = out.new_empty((*out.shape[:2], self.config.value_dim))
        torch.bmm(out.transpose(0, 1), self._to_values.transpose(1, 2), out=values.transpose(0, 1))
        return values.flatten(1)

    def _rotate(self, x: Tensor, batch: Batch, out: Tensor | None = None) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
        cos, sin = self._rotary.cos, self._rotary.sin
        rotate_heads(x, batch.positions, cos, sin, out, interleaved=self.config.interleaved)
        return out
