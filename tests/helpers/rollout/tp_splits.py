"""Tensor-parallel splits for the parameters of a decoder with dense and expert layers."""

from __future__ import annotations

from rollout.model.decoder import ExpertsConfig, GatedConfig
from rollout.model.mixers.attention import AttentionConfig
from rollout.model.mixers.base import RopeConfig
from rollout.ops.routing import Routing
from rollout.weights.params import VOCABULARY, Splits

_EXPERTS = ExpertsConfig(
    experts=1, inner=1, routing=Routing(top_k=1, normalise=False), shared=1, shared_gate=False
)


def decoder_splits(head_dim: int, size: int, experts: int = 1) -> Splits:
    """Return the splits over `size` ranks; `experts` is `EngineConfig.expert_parallel`."""
    heads = {"num_heads": 1, "num_kv_heads": 1, "head_dim": head_dim}
    biases = {"qkv_bias": True, "o_bias": False, "qk_norm": False}
    attention = AttentionConfig(
        rope=RopeConfig(frequencies=(1.0,) * (head_dim // 2)), **heads, **biases
    )
    mlps = [GatedConfig(inner=1).splits(size, experts), _EXPERTS.splits(size, experts)]
    return {**VOCABULARY, **attention.splits(), **mlps[0], **mlps[1]}
