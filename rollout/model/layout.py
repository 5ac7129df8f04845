"""Names and shapes of a decoder's parameters in memory order, fused where the model multiplies
once.
"""

from rollout.model.config import ModelConfig
from rollout.model.params import Group, one


def parameter_groups(config: ModelConfig) -> list[Group]:
    """Every stored parameter, in memory order."""
    groups = [one("model.embed_tokens.weight", config.vocab_size, config.hidden_size)]
    for index in range(config.num_layers):
        groups += _layer_groups(config, index)
    groups.append(one("model.norm.weight", config.hidden_size))
    if not config.tie_word_embeddings:
        groups.append(one("lm_head.weight", config.vocab_size, config.hidden_size))
    return groups


def constants(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what is no parameter: see `MLPConfig.constants`."""
    found: dict[str, tuple[int, ...]] = {}
    for index, mlp in enumerate(config.mlps):
        found |= mlp.constants(f"model.layers.{index}.mlp.")
    return found


def aliases(config: ModelConfig) -> dict[str, str]:
    """Tied names -> stored names."""
    return {"lm_head.weight": "model.embed_tokens.weight"} if config.tie_word_embeddings else {}


def _layer_groups(config: ModelConfig, index: int) -> list[Group]:
    hidden, layer = config.hidden_size, f"model.layers.{index}."
    return [
        one(layer + "input_layernorm.weight", hidden),
        *config.mixers[index].groups(hidden, layer),
        one(layer + "post_attention_layernorm.weight", hidden),
        *config.mlps[index].groups(hidden, layer + "mlp."),
    ]
