"""Names and shapes of a decoder's parameters in memory order, fused where the model multiplies once."""

from collections.abc import Sequence
from dataclasses import dataclass

from rollout.model.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Param:
    """A checkpoint parameter."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Group:
    """Parameters stored without a gap; stacked along the first dimension they are the tensor `fused` (None: one)."""

    params: tuple[Param, ...]
    fused: str | None = None


def parameter_groups(config: ModelConfig) -> list[Group]:
    """Every stored parameter, in memory order."""
    groups = [_one("model.embed_tokens.weight", config.vocab_size, config.hidden_size)]
    for layer in range(config.num_layers):
        groups += _layer_groups(config, f"model.layers.{layer}.")
    groups.append(_one("model.norm.weight", config.hidden_size))
    if not config.tie_word_embeddings:
        groups.append(_one("lm_head.weight", config.vocab_size, config.hidden_size))
    return groups


def aliases(config: ModelConfig) -> dict[str, str]:
    """Tied names -> stored names."""
    return {"lm_head.weight": "model.embed_tokens.weight"} if config.tie_word_embeddings else {}


def _layer_groups(config: ModelConfig, layer: str) -> list[Group]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attn, mlp = layer + "self_attn.", layer + "mlp."
    qkv = (("q_proj", q), ("k_proj", kv), ("v_proj", kv))
    groups = [
        _one(layer + "input_layernorm.weight", hidden),
        _stack(attn + "qkv_proj.weight", [(f"{attn}{name}.weight", (rows, hidden)) for name, rows in qkv]),
    ]
    if config.qkv_bias:
        groups.append(_stack(attn + "qkv_proj.bias", [(f"{attn}{name}.bias", (rows,)) for name, rows in qkv]))
    if config.qk_norm:
        groups += [_one(attn + "q_norm.weight", config.head_dim), _one(attn + "k_norm.weight", config.head_dim)]
    groups.append(_one(attn + "o_proj.weight", hidden, q))
    if config.o_bias:
        groups.append(_one(attn + "o_proj.bias", hidden))
    gate_up = [(f"{mlp}{name}.weight", (inner, hidden)) for name in ("gate_proj", "up_proj")]
    return [
        *groups,
        _one(layer + "post_attention_layernorm.weight", hidden),
        _stack(mlp + "gate_up_proj.weight", gate_up),
        _one(mlp + "down_proj.weight", hidden, inner),
    ]


def _one(name: str, *shape: int) -> Group:
    return Group(params=(Param(name=name, shape=shape),))


def _stack(fused: str, parts: Sequence[tuple[str, tuple[int, ...]]]) -> Group:
    return Group(params=tuple(Param(name=name, shape=shape) for name, shape in parts), fused=fused)
