"""Defines what one tensor-parallel rank stores of a decoder's parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from rollout.model.params import Group, Param, Part, Piece


@dataclass(frozen=True, kw_only=True)
class Split:
    """Ranks share dimension `dim` evenly, in whole units of `unit` (a head).

    parts: equal parts along `dim`, each shared for itself (gate and up in one tensor). copies:
    where there are more ranks than units, several hold the same one. padded: the last ranks may
    hold fewer rows (dim 0), and zeros instead.
    """

    dim: int
    unit: int = 1
    parts: int = 1
    copies: bool = False
    padded: bool = False


def decoder_splits(head_dim: int) -> dict[str, Split]:
    """Returns how the parameters of Llama, Qwen, Mixtral and Qwen3-MoE are split, by the end of
    their names; others are not.
    """
    heads = Split(dim=0, unit=head_dim)
    kv_heads = Split(dim=0, unit=head_dim, copies=True)
    splits = {
        "embed_tokens.weight": Split(dim=0, padded=True),
        "lm_head.weight": Split(dim=0, padded=True),
        "self_attn.o_proj.weight": Split(dim=1, unit=head_dim),
        "mlp.gate_proj.weight": Split(dim=0),
        "mlp.up_proj.weight": Split(dim=0),
        "mlp.down_proj.weight": Split(dim=1),
        # [experts, gate rows then up rows, hidden]
        "mlp.experts.gate_up_proj": Split(dim=1, parts=2),
        "mlp.experts.down_proj": Split(dim=2),
    }
    for kind in ("weight", "bias"):
        splits |= {f"self_attn.q_proj.{kind}": heads}
        splits |= {f"self_attn.{name}_proj.{kind}": kv_heads for name in "kv"}
    return splits


def shard_groups(
    groups: Sequence[Group], splits: Mapping[str, Split], rank: int, size: int
) -> list[Group]:
    """`groups` as rank `rank` of `size` stores them.

    A ValueError names a parameter that cannot be shared evenly.
    """
    if not 0 <= rank < size:
        raise ValueError(f"tensor-parallel rank {rank} must be in [0, {size})")
    if size == 1:
        return list(groups)
    shard = partial(_shard, splits=splits, rank=rank, size=size)
    return [replace(group, params=tuple(map(shard, group.params))) for group in groups]


def _shard(param: Param, splits: Mapping[str, Split], rank: int, size: int) -> Param:
    split = next((split for suffix, split in splits.items() if param.name.endswith(suffix)), None)
    if split is None:
        return param
    rows = param.shape[split.dim] // split.parts  # of one part
    first, last, stored = _range(param, split, rank, size)
    pieces = []
    for part in range(split.parts if first < last else 0):
        start = _with((0,) * len(param.shape), split.dim, part * rows + first)
        at = _with((0,) * len(param.shape), split.dim, part * stored)
        pieces.append(Piece(start=start, shape=_with(param.shape, split.dim, last - first), at=at))
    shape = _with(param.shape, split.dim, stored * split.parts)
    return Param(name=param.name, shape=shape, part=Part(shape=param.shape, pieces=tuple(pieces)))


def _range(param: Param, split: Split, rank: int, size: int) -> tuple[int, int, int]:
    """First and last (excluded) index of each part that the rank holds, and how many it stores."""
    length = param.shape[split.dim]
    units, rest = divmod(length, split.parts * split.unit)
    each = -(-units // size)
    if not rest and (units % size == 0 or split.padded):
        first, last = min(units, rank * each), min(units, (rank + 1) * each)
    elif not rest and split.copies and size % units == 0:
        first = rank * units // size
        last = first + 1
    else:
        several = f" in units of {split.unit}" if split.unit > 1 else ""
        raise ValueError(
            f"{param.name}: dimension {split.dim} of {param.shape} cannot be shared{several} by "
            f"{size} tensor-parallel ranks; choose a size that divides {units}"
        )
    return first * split.unit, last * split.unit, each * split.unit


def _with(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at + 1 :])
