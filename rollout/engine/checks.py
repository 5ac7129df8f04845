"""Checks at the start of an engine: whether the model, the options and the device fit together."""

import torch

from kvcache.config import check_option
from memsaver.memory import empty_torch_cache
from rollout.config import EngineConfig
from rollout.model.adapter_params import adaptable
from rollout.model.decoder import ModelConfig
from rollout.ops.product_probe import define_products, is_probed, probe_products
from rollout.weights.params import ParamGroup
from rollout.weights.store import WeightStore


def check_options(
    model: ModelConfig, config: EngineConfig, dtype: torch.dtype, device: torch.device
) -> None:
    """Raise a ValueError for an option that the model, the dtype or the device does not allow."""
    for key in ("fp32_router", "return_routed_experts", "expert_parallel"):
        asked = getattr(config, key) != getattr(EngineConfig, key)
        rule = "is for mixtures of experts, and this model is dense; leave it out"
        check_option(config, key, model.has_experts or not asked, rule)
    if config.adapters is not None:
        layers = adaptable(model)
        rule = "is for models with plain attention; leave it out"
        check_option(config, "adapters", bool(layers), rule)
        rule = f"names layers that an adapter of this model cannot have; it can: {layers}"
        known = {*config.adapters.target_modules} <= {*layers}
        check_option(config.adapters, "target_modules", known, rule)
    if config.exact:  # a trainer must be able to compute the same bits
        rule = "is for models with plain attention; use exact=False"
        check_option(config, "exact", model.is_plain, rule)
        rule = "needs dtype bfloat16 or float16 on a GPU; use exact=False"
        check_option(config, "exact", device.type != "cuda" or dtype != torch.float32, rule)


def context_len(model: ModelConfig, config: EngineConfig) -> int:
    """Return the maximum tokens of prompt and answer together.

    Args:
        model: The model, whose number of positions is the limit.
        config: The configuration, with the tokens of the pool.

    Returns:
        `max_context_len`, or without it the most tokens for which model and pool have room.

    Raises:
        ValueError: `max_context_len` exceeds the model's positions.
    """
    most = model.max_position_embeddings
    if config.max_context_len is None:
        assert config.kv_tokens is not None, "the engine sizes the pool"
        return min(most, config.kv_tokens)
    rule = f"exceeds the model's max_position_embeddings={most}; lower it"
    check_option(config, "max_context_len", config.max_context_len <= most, rule)
    return config.max_context_len


def probe(
    store: WeightStore,
    groups: list[ParamGroup],
    model: ModelConfig,
    config: EngineConfig,
    dtype: torch.dtype,
) -> str:
    """Define the bits of matrix products, or warn about those that depend on the batch.

    Devices whose products follow a rule are not measured. The measurement overwrites the weights,
    which are still undefined.

    Args:
        store: The weights.
        groups: The parameters of this rank.
        model: The model's configuration.
        config: The configuration, which may ask for exact products.
        dtype: Dtype of weights and computation.

    Returns:
        What was found about exact products, see `Engine.product_report`; otherwise empty.

    Raises:
        ValueError: The bits of exact products depend on the number of rows on this GPU.
    """
    device = store.arena.device
    if not is_probed(device, dtype):
        return ""
    products = store.products(groups)
    if not config.exact:
        probe_products(products)
        return ""
    strict = config.exact != "warn"
    found = define_products(products, routers=model.has_experts, strict=strict)
    empty_torch_cache(device)
    return found
