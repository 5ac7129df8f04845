"""Checkpoint parameters: how they lie together in memory, what one tensor-parallel rank stores of
them, and how files hold those that the model names or cuts otherwise (a tensor for each expert
where the model stacks them, and Mixtral's own names).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import NamedTuple, Self


@dataclass(frozen=True, kw_only=True)
class FilePiece:
    """The box of `shape` at `start` of the whole parameter; this rank stores it at `at`."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    at: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Param:
    """A checkpoint parameter of shape `whole`.

    shape: as this rank stores it. pieces: what it stores; what no piece fills is zero.
    """

    name: str
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    pieces: tuple[FilePiece, ...]

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...]) -> Self:
        """Return all of a parameter."""
        origin = (0,) * len(shape)
        piece = FilePiece(start=origin, shape=shape, at=origin)
        return cls(name=name, shape=shape, whole=shape, pieces=(piece,))


@dataclass(frozen=True, kw_only=True)
class ParamGroup:
    """Parameters stored without a gap; stacked along the first dimension they are the tensor
    `fused` (None: one).
    """

    params: tuple[Param, ...]
    fused: str | None = None


def one(name: str, *shape: int) -> ParamGroup:
    """A parameter by itself."""
    return ParamGroup(params=(Param.of(name, shape),))


def stack(fused: str, parts: Sequence[tuple[str, tuple[int, ...]]]) -> ParamGroup:
    """(name, shape) of parameters that are multiplied with at once, as `fused`."""
    return ParamGroup(params=tuple(Param.of(*part) for part in parts), fused=fused)


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


def shard_groups(
    groups: Sequence[ParamGroup], splits: Splits, rank: int, size: int
) -> list[ParamGroup]:
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
    shape, pieces = param.shape, list(param.pieces)
    for split in found:
        runs, stored = _runs(param, split, rank, size)
        shape = _with(shape, split.dim, stored)
        cut = partial(_cut, dim=split.dim)
        pieces = [cut(piece, *run) for piece, run in product(pieces, runs)]
    return replace(param, shape=shape, pieces=tuple(pieces))


def _cut(piece: FilePiece, start: int, size: int, at: int, dim: int) -> FilePiece:
    return FilePiece(
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


Ints = tuple[int, ...]
_EXPERTS = ".mlp.experts."
# stacked: the parts of one expert, one below the other, as most families spell them, and Mixtral
_PARTS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}
_MIXTRAL = ".block_sparse_moe."
# buffers of old checkpoints, and layers that predict further tokens (Qwen3-Next)
_UNUSED = re.compile(r"rotary_emb\.inv_freq$|self_attn\.(masked_)?bias$|^mtp\.")


class Stored(NamedTuple):
    """A tensor of a file: its shape, and where its first element is in the parameter, of which it
    may lack dimensions in front.
    """

    name: str
    start: Ints
    shape: Ints

    @property
    def box(self) -> Ints:
        """Its shape as a part of the parameter."""
        return (1,) * (len(self.start) - len(self.shape)) + self.shape

    @property
    def volume(self) -> int:
        return math.prod(self.shape)


def is_unused(name: str) -> bool:
    """Tells whether a tensor of a file is none that the model computes with."""
    return _UNUSED.search(name) is not None


def spellings(name: str, shape: Ints) -> list[list[Stored]]:
    """Every way in which files may hold a parameter of this name and shape, as it is first. Each
    is all of it.
    """
    ways = [[Stored(name, (0,) * len(shape), shape)]]
    layer, experts, stacked = name.partition(_EXPERTS)
    if experts and stacked in _PARTS:
        usual, mixtral = _PARTS[stacked]
        ways.append(_each(layer + _EXPERTS, usual, shape))
        ways.append(_each(f"{layer}{_MIXTRAL}experts.", mixtral, shape))
    elif name.endswith(".mlp.gate.weight"):
        ways.append([ways[0][0]._replace(name=name.replace(".mlp.", _MIXTRAL))])
    return ways


def _each(prefix: str, parts: tuple[str, ...], shape: Ints) -> list[Stored]:
    count, rows, columns = shape
    rows //= len(parts)
    found = []
    for expert in range(count):
        for number, part in enumerate(parts):
            name = f"{prefix}{expert}.{part}.weight"
            found.append(Stored(name, (expert, number * rows, 0), (rows, columns)))
    return found
