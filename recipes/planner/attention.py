"""Attention of the trainer as a GPU computes it, for tensors without memory: which tensors it keeps
is what counts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainer_bridge.training import packed_attention

NAME = "planned"
PACKED_NAME = "planned_packed"


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: Any = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """query: [B, H, L, D]; returns [B, L, H, D]. FlashAttention where torch has it, the plain
    formula elsewhere.

    For heads whose values are narrower than their keys (latent attention), what flash keeps of them
    padded.
    """
    if query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] <= 256:
        width = value.shape[-1]
        if width != query.shape[-1]:
            value = torch.nn.functional.pad(value, (0, query.shape[-1] - width))
        out = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, True, scale=scaling
        )[0]
        out = out[..., :width]
    else:
        with sdpa_kernel(SDPBackend.MATH):
            out = torch.nn.functional.scaled_dot_product_attention(
                query,
                key,
                value,
                is_causal=True,
                scale=scaling,
                enable_gqa=query.shape[1] != key.shape[1],
            )
    return out.transpose(1, 2).contiguous(), None


def planned_packed_attention(*args: Any, **how: Any) -> tuple[Tensor, None]:
    """Does what the trainer's `packed_attention` does on a GPU."""
    with sdpa_kernel(SDPBackend.MATH):
        return packed_attention(*args, flash=True, **how)


def register_attention() -> None:
    """Make `attention` known to transformers as `NAME`, `planned_packed_attention` as
    `PACKED_NAME`. Models that ask for one make no masks.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
    ALL_ATTENTION_FUNCTIONS.register(PACKED_NAME, planned_packed_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, lambda *args, **kwargs: None)
