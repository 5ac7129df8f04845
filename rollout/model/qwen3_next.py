"""What a Qwen3-Next config says of its mixers: gated delta nets and gated attention, dense MLPs
only.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rollout.model.mixers.attention import AttentionConfig
from rollout.model.mixers.base import MixerConfig
from rollout.model.mixers.delta_net import DeltaNetConfig

LAYER_TYPES = ("full_attention", "linear_attention")


def mixers(config: Any, attention: AttentionConfig) -> tuple[MixerConfig, ...]:
    """One a layer; `attention` is what the model's attention has in common with Qwen3's.

    ValueError for experts.
    """
    if sparse := _expert_layers(config):
        raise ValueError(
            f"num_experts={config.num_experts}: layers {sparse} are mixtures of experts, which are not supported; "
            f"supported: dense MLPs (num_experts=0, or every layer in mlp_only_layers)"
        )
    if unknown := sorted(set(config.layer_types) - set(LAYER_TYPES)):
        raise ValueError(
            f"layer_types={unknown} are not supported; supported: {', '.join(LAYER_TYPES)}"
        )
    gated = replace(
        attention,
        qk_norm=True,
        output_gate=True,
        rotary_dim=int(
            attention.head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0)
        ),
    )
    linear = DeltaNetConfig(
        num_key_heads=config.linear_num_key_heads,
        num_value_heads=config.linear_num_value_heads,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
        kernel=config.linear_conv_kernel_dim,
    )
    return tuple(linear if kind == "linear_attention" else gated for kind in config.layer_types)


def _expert_layers(config: Any) -> list[int]:
    """Transformers' rule for which layers are mixtures of experts."""
    if not config.num_experts:
        return []
    return [
        layer
        for layer in range(config.num_hidden_layers)
        if layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0
    ]
