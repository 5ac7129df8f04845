"""Attention over sequences end to end, each seeing itself alone, and models that may use it."""

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

PACKED = "packed"
"""Transformers' name of `packed_attention`, once it is registered."""
# Model types of transformers.
_PLAIN = (
    "deepseek_v2", "deepseek_v3", "granite", "llama", "ministral", "mistral", "mixtral", "qwen2",
    "qwen3", "qwen3_moe",
)  # fmt: skip


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
    """Return causal attention inside each sequence, [1, T, heads, value width], as transformers
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
    """Take fewer key heads as they are; narrower values (latent attention) are padded."""
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
    """Have a model of transformers attend by `attention` if sequences may lie end to end in it.

    That is so in families whose tokens see others in plain causal attention alone, without a
    window. `packs` tells then.
    """
    config = model.config
    plain = config.model_type in _PLAIN and getattr(config, "sliding_window", None) is None
    model.packs = attention is not None and plain
    if model.packs:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS.register(PACKED, packed_attention)
        model.set_attn_implementation(attention)


def packs(model: Any) -> bool:
    """Return whether the model takes rows with `packing`."""
    return bool(model.packs)
