"""Defines what one tensor-parallel rank stores of a decoder's parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from rollout.model.params import Group, Param, Part, Piece


@dataclass(frozen=True, kw_only=True)
class Split:
    """Ranks share dimension `dim` evenly, in whole units (a head, say).

    units: the elements of a unit in each of the parts that lie one behind the other along `dim`,
    and are shared alike (gate and up in one tensor: 1 and 1). copies: where there are more ranks
    than units, several hold the same one. uneven: the last ranks may hold fewer, or none, as FSDP2
    shares rows. padded: these store zeros instead (dim 0).
    count: of the ranks that share; None: all. stride: so many neighbours hold the same.
    """

    dim: int
    units: tuple[int, ...] = (1,)
    copies: bool = False
    uneven: bool = False
    padded: bool = False
    count: int | None = None
    stride: int = 1


Splits = Mapping[str, Sequence[Split]]
"""How parameters are split, by the end of their names, one dimension after the other; others are
held by all ranks.
"""
VOCABULARY: Splits = {
    name: [Split(dim=0, padded=True)] for name in ("embed_tokens.weight", "lm_head.weight")
}


def shard_groups(groups: Sequence[Group], splits: Splits, rank: int, size: int) -> list[Group]:
    """`groups` as rank `rank` of `size` stores them.

    A ValueError names a parameter that cannot be shared evenly.
    """
    if not 0 <= rank < size:
        raise ValueError(f"tensor-parallel rank {rank} must be in [0, {size})")
    if size == 1:
        return list(groups)
    shard = partial(_shard, splits=splits, rank=rank, size=size)
    return [replace(group, params=tuple(map(shard, group.params))) for group in groups]


def _shard(param: Param, splits: Splits, rank: int, size: int) -> Param:
    found = next((each for suffix, each in splits.items() if param.name.endswith(suffix)), ())
    if not found:
        return param
    shape, origin = param.shape, (0,) * len(param.shape)
    pieces = [Piece(start=origin, shape=shape, at=origin)]
    for split in found:
        runs, stored = _runs(param, split, rank, size)
        shape = _with(shape, split.dim, stored)
        cut = partial(_cut, dim=split.dim)
        pieces = [cut(piece, *run) for piece, run in product(pieces, runs)]
    return Param(name=param.name, shape=shape, part=Part(shape=param.shape, pieces=tuple(pieces)))


def _cut(piece: Piece, start: int, size: int, at: int, dim: int) -> Piece:
    return Piece(
        start=_with(piece.start, dim, start),
        shape=_with(piece.shape, dim, size),
        at=_with(piece.at, dim, at),
    )


def _runs(
    param: Param, split: Split, rank: int, size: int
) -> tuple[list[tuple[int, int, int]], int]:
    """Start, size and place of what the rank holds of each part, and the elements it stores."""
    count = split.count or size
    length = param.shape[split.dim]
    units, rest = divmod(length, sum(split.units))
    if rest or (
        units % count and not (split.padded or split.uneven or _copied(split, units, count))
    ):
        several = f" in units of {sum(split.units)}" if max(split.units) > 1 else ""
        raise ValueError(
            f"{param.name}: dimension {split.dim} of {param.shape} cannot be shared{several} by "
            f"{count} tensor-parallel ranks; choose a size that divides {units}"
        )
    index = rank // split.stride % count
    if units % count and _copied(split, units, count):
        first, last = index * units // count, index * units // count + 1
    else:
        first, last = held(units, count, index)
    stored = last - first if split.uneven else -(-units // count)
    runs, before = [], 0
    for unit in split.units if first < last else ():
        runs.append((units * before + first * unit, (last - first) * unit, stored * before))
        before += unit
    return runs, stored * sum(split.units)


def _copied(split: Split, units: int, count: int) -> bool:
    return split.copies and count % units == 0


def held(units: int, count: int, index: int) -> tuple[int, int]:
    """First and last (excluded) of the units that number `index` of `count` holds: the last ones
    may hold fewer, or none.
    """
    each = -(-units // count)
    return min(units, index * each), min(units, (index + 1) * each)


def _with(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at + 1 :])
