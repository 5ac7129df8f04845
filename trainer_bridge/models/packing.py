"""Attention over sequences that are packed end to end, and the models that support it."""

from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer_bridge.ops.exact import Sequences

FLASH = (8, 0)
"""Compute capability that FlashAttention needs."""
PACKED = "packed"
"""Name under which `pack_if_possible` registers `packed_attention` with transformers."""
DENSE = ("granite", "llama", "ministral", "mistral", "qwen2", "qwen3")
"""Model types of transformers with plain causal attention and without experts."""
_PLAIN = (*DENSE, "deepseek_v2", "deepseek_v3", "mixtral", "qwen3_moe")


class Packing:
    """The bounds of S sequences in a row of T tokens.

    Not a dataclass: FSDP would search it for tensors, length by length, in each layer.

    Attributes:
        lengths: Tokens of each sequence.
        bounds: int32 [S + 1], 0 followed by the end of each sequence.
        position_ids: int64 [1, T], counted from 0 in each sequence.
        sequences: Lengths and bounds for `ops.exact.attention`.
    """

    def __init__(self, lengths: tuple[int, ...], bounds: Tensor, position_ids: Tensor) -> None:
        self.lengths, self.bounds, self.position_ids = lengths, bounds, position_ids
        self.sequences = Sequences(lengths, bounds)


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
    """Compute causal attention within each sequence, by the interface of transformers.

    FlashAttention runs one kernel for all sequences. Otherwise there is one call per run of
    sequences with equal length. `flash` uses FlashAttention if it supports dtype and width; None
    uses it if the device supports it, too.

    The query is [1, heads, T, width], the key [1, key heads, T, width], and the value
    [1, key heads, T, value width]. The result is [1, T, heads, value width], and None in place of
    the attention weights. `scaling` multiplies the scores; None is 1 / sqrt(width).
    """
    if flash is None:
        flash = query.is_cuda and torch.cuda.get_device_capability(query.device) >= FLASH
    width, half = query.shape[-1], query.dtype in (torch.bfloat16, torch.float16)
    by = _flash if flash and half and width <= 256 and width % 8 == 0 else _length_by_length
    return by(query, key, value, packing, scaling), None


def _flash(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None
) -> Tensor:
    """Run FlashAttention, padding values that are narrower than keys (latent attention)."""
    width = value.shape[-1]
    if width != key.shape[-1]:
        value = F.pad(value, (0, key.shape[-1] - width))
    tokens = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    bounds, longest = packing.bounds, max(packing.lengths)
    # `varlen_attn` of torch 2.11 does not support fewer key heads than query heads.
    out = torch.ops.aten._flash_attention_forward.default(
        *tokens, bounds, bounds, longest, longest, 0.0, True, False, scale=scaling
    )[0]
    return out[None, ..., :width]


def _length_by_length(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None
) -> Tensor:
    """Compute attention for each run of neighboring sequences of equal length as one batch.

    Chunks are sorted by length, so there are few runs.
    """
    runs = [(len([*run]), length) for length, run in groupby(packing.lengths)]
    sizes = [count * length for count, length in runs]
    shared, out = query.shape[1] != key.shape[1], list[Tensor]()
    parts = zip(*(tensor[0].split(sizes, dim=1) for tensor in (query, key, value)), strict=True)
    for run, part in zip(runs, parts, strict=True):
        q, k, v = (tensor.unflatten(1, run).transpose(0, 1) for tensor in part)
        attended = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=shared
        )
        out.append(attended.transpose(1, 2).flatten(0, 1))
    return torch.cat(out)[None]


def pack_if_possible(model: Any, attention: str | None) -> None:
    """Set a packed attention for a transformers model if its family supports packing.

    A family supports it if tokens interact only by plain causal attention without a window.
    `attention` is the name of the packed attention; None disables packing. `model.packs` has the
    outcome.
    """
    config = model.config
    plain = config.model_type in _PLAIN and getattr(config, "sliding_window", None) is None
    model.packs = attention is not None and plain
    if model.packs:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS.register(PACKED, packed_attention)
        model.set_attn_implementation(attention)
