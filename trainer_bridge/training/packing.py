"""Attention over sequences end to end, each seeing itself alone, and models that may use it."""

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

PACKED = "packed"
"""Transformers' name of `packed_attention`, once it is registered."""
_PROBE = "packed_probe"
_PLAIN = "plain"  # stands for a causal mask
_HARMLESS = ("scaling", "position_ids", "is_causal")


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Says where sequences lie in a row of T tokens.

    lengths: of each of S sequences. bounds: int32 [S + 1], 0 and the position after each.
    position_ids: int64 [1, T], from 0 in each.
    """

    lengths: tuple[int, ...]
    bounds: Tensor
    position_ids: Tensor


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    packing: Packing,
    scaling: float | None = None,
    flash: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Returns causal attention inside each sequence, [1, T, heads, value width], as transformers
    asks an attention for it.

    query: [1, heads, T, width]; key, value: [1, key heads, T, their width]. flash: there is
    FlashAttention (None: as the device has it), one kernel for all sequences, if that takes the
    dtype and the width of heads; else there is one for each length.
    """
    if flash is None:
        flash = query.is_cuda and torch.cuda.get_device_capability(query.device) >= (8, 0)
    width, half = query.shape[-1], query.dtype in (torch.bfloat16, torch.float16)
    by = _flash if flash and half and width <= 256 and width % 8 == 0 else _length_by_length
    return by(query, key, value, packing, scaling), None


def _flash(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None
) -> Tensor:
    """Takes fewer key heads as they are; narrower values (latent attention) are padded."""
    width = value.shape[-1]
    if width != key.shape[-1]:
        value = F.pad(value, (0, key.shape[-1] - width))
    tokens = (each[0].transpose(0, 1) for each in (query, key, value))
    bounds, longest = packing.bounds, max(packing.lengths)
    # Not `varlen_attn`: that of torch 2.11 takes no fewer key heads.
    out = torch.ops.aten._flash_attention_forward.default(
        *tokens, bounds, bounds, longest, longest, 0.0, True, False, scale=scaling
    )[0]
    return out[None, ..., :width]


def _length_by_length(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None
) -> Tensor:
    """Sequences of one length that lie side by side, as those of a chunk do, are one batch."""
    runs = [(len([*run]), length) for length, run in groupby(packing.lengths)]
    sizes = [count * length for count, length in runs]
    shared, out = query.shape[1] != key.shape[1], list[Tensor]()
    parts = zip(*(each[0].split(sizes, dim=1) for each in (query, key, value)), strict=True)
    for run, part in zip(runs, parts, strict=True):
        q, k, v = (each.unflatten(1, run).transpose(0, 1) for each in part)
        done = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=shared
        )
        out.append(done.transpose(1, 2).flatten(0, 1))
    return torch.cat(out)[None]


def pack_if_possible(model: Any, attention: str | None) -> None:
    """Has a meta model of transformers attend by `attention`, which `packs` tells then, if no token
    sees another but in attention, and that is plain: causal, without window, cap or sinks.
    """
    model.packs = attention is not None and _is_packable(model)
    if model.packs:
        _register(PACKED, packed_attention)
        model.set_attn_implementation(attention)


def packs(model: Any) -> bool:
    """Tells whether the model takes rows with `packing`."""
    return bool(model.packs)


def _is_packable(model: Any) -> bool:
    """Runs the model on tensors without memory; one that fails then, or passes `packing` on to
    other than one attention a layer, counts as no.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    before, calls = model.config._attn_implementation, list[bool]()
    experts = [module for name, module in model.named_modules() if name.endswith(".experts")]
    _register(_PROBE, _probe)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_PROBE, _probe_mask)
    try:
        layers = model.get_decoder().layers
        names = [type(module).__name__ for module in layers.modules()]
        if getattr(model, "_is_stateful", False) or any("Conv" in name for name in names):
            return False
        for each in experts:  # some meta kernels know bf16 alone
            each.forward = lambda states, *_, **__: states
        model.set_attn_implementation(_PROBE)
        ids = torch.zeros((1, 2), dtype=torch.int64, device="meta")
        with torch.no_grad():  # with a mask, or transformers would read positions
            model(input_ids=ids, attention_mask=ids + 1, use_cache=False, packing=calls)
        return len(calls) == len(layers) and all(calls)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return False
    finally:
        model.set_attn_implementation(before)
        for each in experts:
            vars(each).pop("forward", None)


def _probe(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    packing: list[bool],
    **features: Any,
) -> tuple[Tensor, None]:
    """Notes whether this is what `packed_attention` computes."""
    causal = features.get("is_causal", getattr(module, "is_causal", True)) is not False
    more = [each for name, each in features.items() if name not in _HARMLESS]
    plain = not any(isinstance(each, Tensor) or each for each in more)
    packing.append(attention_mask == _PLAIN and causal and plain)
    return query.transpose(1, 2)[..., : value.shape[-1]], None


def _probe_mask(*, mask_function: Any, **_: Any) -> str | None:
    from transformers.masking_utils import causal_mask_function

    return _PLAIN if mask_function is causal_mask_function else None


def _register(name: str, attention: Any) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(name, attention)
