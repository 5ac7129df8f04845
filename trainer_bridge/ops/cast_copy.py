"""Cast rows, write them, and digest the bits written. Reference in torch, for every device."""

from __future__ import annotations

import torch
from torch import Tensor

from rollout.ops.digest import digest

_CHUNK = 1 << 22  # elements cast at once: bounds the temporary


def cast_copy(target: Tensor, source: Tensor, index_base: int) -> int:
    """Write `source`, cast to target's dtype, into `target` (same shape, both contiguous).

    Returns the digest of the cast values, computed from the source side: what the target should now hold.
    index_base: number of the first element.
    """
    if target.shape != source.shape:
        raise ValueError(f"cast_copy: source {tuple(source.shape)} does not fit target {tuple(target.shape)}")
    assert target.is_contiguous() and source.is_contiguous()
    total = 0
    out, flat = target.view(-1), source.detach().view(-1)
    for first in range(0, flat.numel(), _CHUNK):
        cast = flat[first : first + _CHUNK].to(target.dtype)
        out[first : first + _CHUNK].copy_(cast)
        total += digest(cast, index_base + first)
    return total % (1 << 64)


def all_finite(source: Tensor) -> bool:
    """No NaN and no infinity among the elements; contiguous, any float dtype."""
    flat = source.detach().view(-1)
    chunks = (flat[first : first + _CHUNK] for first in range(0, flat.numel(), _CHUNK))
    return all(bool(torch.isfinite(chunk).all()) for chunk in chunks)
