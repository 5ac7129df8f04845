"""Manifests written by hand, and manifests of a small decoder.

The decoder has fused, tied and padded parameters, experts and copied KV heads.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rollout.weights import Manifest, ParamSlice, torch_dtype
from rollout.weights.params import Param, ParamGroup, one, shard_groups, stack
from rollout.weights.store import build_manifest
from tests.helpers.reference_digest import element
from tests.helpers.rollout.tp_splits import decoder_splits

HEAD_DIM = 2
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def piece(
    name: str, offset: int, shape: tuple[int, ...], dtype: str = "float32", **changes: object
) -> ParamSlice:
    fields = {"global_shape": shape, "start": (0,) * len(shape), "index_base": 0, **changes}
    return ParamSlice(name=name, offset=offset, shape=shape, dtype=dtype, **fields)  # type: ignore[arg-type]


def box_of(part: Any) -> tuple[slice, ...]:
    """Return the range of a slice, shard or copy in the whole parameter."""
    return tuple(
        slice(first, first + size) for first, size in zip(part.start, part.shape, strict=True)
    )


def bits_of(tensor: Tensor) -> list[int]:
    size = tensor.element_size()
    flat = tensor.contiguous().view({2: torch.int16, 4: torch.int32}[size]).flatten().tolist()
    return [value & (1 << 8 * size) - 1 for value in flat]


def manifest(
    *slices: ParamSlice, nbytes: int | None = None, aliases: dict[str, str] | None = None
) -> Manifest:
    end = max(p.offset + math.prod(p.shape) * torch_dtype(p.dtype).itemsize for p in slices)
    layout = hashlib.sha256(repr((slices, nbytes, aliases)).encode()).hexdigest()
    return Manifest(
        nbytes=nbytes or end, slices=slices, aliases=aliases or {}, modules={}, layout_hash=layout
    )


def decoder_groups(
    *, hidden: int, vocab: int, heads: int, kv_heads: int, inner: int, tied: bool
) -> list[ParamGroup]:
    """Return the groups of one layer, with a dense MLP and 3 experts."""
    attention, mlp = "model.layers.0.self_attn.", "model.layers.0.mlp."
    rows = {"q": heads * HEAD_DIM, "k": kv_heads * HEAD_DIM, "v": kv_heads * HEAD_DIM}
    groups = [
        one(EMBED, vocab, hidden),
        one("model.layers.0.input_layernorm.weight", hidden),
        stack(
            f"{attention}qkv_proj.weight",
            [(f"{attention}{n}_proj.weight", (r, hidden)) for n, r in rows.items()],
        ),
        one(f"{attention}o_proj.weight", hidden, heads * HEAD_DIM),
        stack(
            f"{mlp}gate_up_proj.weight",
            [(f"{mlp}{n}_proj.weight", (inner, hidden)) for n in ("gate", "up")],
        ),
        one(f"{mlp}down_proj.weight", hidden, inner),
        one(f"{mlp}experts.gate_up_proj", 3, 2 * inner, hidden),
        one(f"{mlp}experts.down_proj", 3, hidden, inner),
    ]
    return groups if tied else [*groups, one(HEAD, vocab, hidden)]


def manifests(
    groups: Sequence[ParamGroup],
    size: int,
    dtype: torch.dtype,
    base: int = 0,
    tied: bool = False,
    head_dim: int = HEAD_DIM,
    expert_parallel: int = 1,
) -> list[Manifest]:
    """Build the manifest of each of `size` tensor-parallel ranks."""
    splits = decoder_splits(head_dim, size, expert_parallel)
    aliases = {HEAD: EMBED} if tied else {}
    return [
        build_manifest(shard_groups(groups, splits, rank, size), aliases, dtype, base)
        for rank in range(size)
    ]


def parameters(groups: Sequence[ParamGroup]) -> dict[str, tuple[int, ...]]:
    """Return shapes by name, of groups that are not sharded yet."""
    params: list[Param] = [param for group in groups for param in group.params]
    return {param.name: param.shape for param in params}


def digest_of(piece: ParamSlice, content: Tensor) -> int:
    """Compute the digest of a slice's elements by its definition, modulo 2**64."""
    numbers = (
        torch.arange(math.prod(piece.global_shape))
        .view(piece.global_shape)[box_of(piece)]
        .flatten()
    )
    return sum(map(element, (numbers + piece.index_base).tolist(), bits_of(content))) % 2**64
