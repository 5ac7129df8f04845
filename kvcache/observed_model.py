"""The attention of transformers' model of a config, observed while the model runs without memory.

Which keys of a config a model follows is decided by its code: transformers' Llama has no window
even if the config has a key `sliding_window`. So the model is built on the meta device and runs
once, with an attention function and a mask function that record what they are given.
"""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_NAME = "memsaver_observed"
# Modules without attention. Experts choose rows by value, which the meta device has not.
_RECURRENT = ("linear_attn", "mamba")
_SKIPPED = ("mlp", "feed_forward", "block_sparse_moe", "experts", *_RECURRENT)
_FAR = 1 << 20  # a position beyond every window that is not named


@dataclass(frozen=True, kw_only=True)
class ObservedAttention:
    """What the attention function of one layer is given.

    Attributes:
        query_heads: Query heads.
        kv_heads: Heads of keys and values.
        key_width: Elements of a head's query or key.
        value_width: Elements of a head's value.
        scale: Factor of the scores.
        window: Keys that a query sees, including its own; None for all.
        latent: Elements of a token's latent and of its rotated key (latent attention), else None.
    """

    query_heads: int
    kv_heads: int
    key_width: int
    value_width: int
    scale: float
    window: int | None
    latent: tuple[int, int] | None


@dataclass(frozen=True)
class ObservedModel:
    """A model on the meta device, and its attention by layer.

    The model has the parameters of transformers' model, but cannot run again.

    Attributes:
        model: The model.
        layers: The attention of each layer; None for a layer without attention.
    """

    model: Any
    layers: tuple[ObservedAttention | None, ...]


_observed: dict[str, ObservedModel] = {}


def observe(config: Any) -> ObservedModel:
    """Build transformers' model of a config on the meta device, and record its attention.

    The result is cached by the config's text.

    Raises:
        ValueError: transformers cannot build or run the model, or its attention is of a kind that
            cannot be observed; names the model and the cause.
    """
    name = type(config).__name__
    try:
        key = name + config.to_json_string(use_diff=False)
        if key not in _observed:
            _observed[key] = _observe(deepcopy(config))
    except Exception as error:  # a wrong value of a config raises many types
        cause = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(f"transformers' model of {name} cannot be observed: {cause}") from error
    return _observed[key]


def _observe(config: Any) -> ObservedModel:
    from transformers import AutoModelForCausalLM
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(_NAME, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, _mask)
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=_NAME)
    decoder = model.get_decoder()
    _skip_what_needs_values(decoder)
    with torch.no_grad():
        x = torch.empty(1, 2, config.hidden_size, dtype=model.dtype, device="meta")
        # With a mask on the CPU, no model looks for values on the meta device.
        decoder(inputs_embeds=x, attention_mask=torch.ones(1, 2), use_cache=False)
    return ObservedModel(model, _calls(decoder, config.num_hidden_layers))


def _calls(decoder: nn.Module, count: int) -> tuple[ObservedAttention | None, ...]:
    layers: list[ObservedAttention | None] = [None] * count
    for name, module in decoder.named_modules():
        if not hasattr(module, _NAME):
            continue
        layers[module.layer_idx] = getattr(module, _NAME)  # type: ignore[index]
        layer = decoder.get_submodule(name.rpartition(".")[0])
        if any(hasattr(layer, recurrence) for recurrence in _RECURRENT):
            raise ValueError("a layer has both attention and a recurrent state")
    if not any(layers):
        raise ValueError("its attention does not use transformers' attention interface")
    return tuple(layers)


@dataclass(frozen=True)
class _Mask:
    """What the mask function returns in place of a mask.

    Models also make masks that no layer uses, so the attention function refuses those of other
    kinds than a window, or None for all keys.
    """

    window: int | None
    known: bool


def _mask(*, mask_function: Any, local_size: int | None = None, **_: Any) -> _Mask:
    def sees(query: int, key: int) -> bool:
        return bool(mask_function(*map(torch.tensor, (0, 0, query, key))))

    if local_size is None:
        return _Mask(None, known=sees(_FAR, 0))
    known = local_size >= 1 and sees(local_size, 1) and not sees(local_size, 0)
    return _Mask(local_size, known)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Record the call in the module; return an output of the right shape."""
    if not isinstance(attention_mask, _Mask) or hasattr(module, _NAME):
        raise ValueError("its attention masks do not come from transformers' mask functions")
    if not attention_mask.known:
        size = attention_mask.window
        raise ValueError(f"a mask is neither causal nor a sliding window (size {size})")
    rank = getattr(module, "kv_lora_rank", None)
    call = ObservedAttention(
        query_heads=query.shape[1],
        kv_heads=key.shape[1],
        key_width=key.shape[-1],
        value_width=value.shape[-1],
        scale=key.shape[-1] ** -0.5 if scaling is None else scaling,
        window=attention_mask.window,
        latent=None if rank is None else (rank, module.qk_rope_head_dim),
    )
    setattr(module, _NAME, call)
    return value.new_empty((1, query.shape[2], query.shape[1], value.shape[-1])), None


def _skip_what_needs_values(decoder: nn.Module) -> None:
    """Skip experts and recurrences, and keep rotary tables from depending on the positions."""
    for name, module in decoder.named_modules():
        # An MLP with a router returns a pair, so only its experts are skipped (gpt-oss).
        if name.rpartition(".")[2] in _SKIPPED and not hasattr(module, "router"):
            module.forward = _first  # type: ignore[method-assign]
        if isinstance(getattr(module, "rope_type", None), str):
            module.rope_type = "default"  # type: ignore[assignment]


def _first(*args: Tensor, **named: Tensor) -> Tensor:
    return args[0] if args else named["hidden_states"]
