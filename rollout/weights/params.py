"""Checkpoint parameters: their groups in memory, their shards per rank, and their names in files.

Files may store parameters under other names or in other parts than the model: one tensor per expert
where the model stacks experts, and Mixtral's own names.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import NamedTuple, Self


@dataclass(frozen=True, kw_only=True)
class FilePiece:
    """A box of a parameter that this rank stores."""

    start: tuple[int, ...]  # index of its first element in the whole parameter
    shape: tuple[int, ...]
    at: tuple[int, ...]  # index of its first element in the stored tensor


@dataclass(frozen=True, kw_only=True)
class Param:
    """A checkpoint parameter, as this rank stores it."""

    name: str  # in the checkpoint
    shape: tuple[int, ...]  # of the stored tensor
    whole: tuple[int, ...]  # shape of the whole parameter
    pieces: tuple[FilePiece, ...]  # boxes in the stored tensor, which is zero outside of them

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...]) -> Self:
        """Return a parameter that is stored whole."""
        origin = (0,) * len(shape)
        piece = FilePiece(start=origin, shape=shape, at=origin)
        return cls(name=name, shape=shape, whole=shape, pieces=(piece,))


@dataclass(frozen=True, kw_only=True)
class ParamGroup:
    """Parameters that are stored in order, without gaps between them.

    Several parameters form the tensor `fused`, stacked along the first dimension.
    """

    params: tuple[Param, ...]
    fused: str | None = None  # None if there is only one parameter


def one(name: str, *shape: int) -> ParamGroup:
    """Return a group of one parameter."""
    return ParamGroup(params=(Param.of(name, shape),))


def stack(fused: str, parts: Sequence[tuple[str, tuple[int, ...]]]) -> ParamGroup:
    """Return a group of `parts` (name, shape), stacked as `fused` for one multiplication."""
    return ParamGroup(params=tuple(Param.of(*part) for part in parts), fused=fused)


@dataclass(frozen=True, kw_only=True)
class Split:
    """How ranks divide one dimension of a parameter, in whole units such as heads.

    Attributes:
        dim: The dimension.
        units: Elements of a unit in each of the consecutive parts along `dim`, which are divided
            alike; (1, 1) for gate and up projections in one tensor.
        copies: With more ranks than units, several ranks store the same unit.
        uneven: The last ranks may store fewer units or none, as FSDP2 divides rows.
        padded: The last ranks store zeros for missing units (dimension 0 only).
        count: Number of different shards; None: one per rank.
        stride: Number of neighboring ranks that store the same shard.
    """

    dim: int
    units: tuple[int, ...] = (1,)
    copies: bool = False
    uneven: bool = False
    padded: bool = False
    count: int | None = None
    stride: int = 1


Splits = Mapping[str, Sequence[Split]]
"""Splits of parameters by the end of their names, applied one after the other.

All ranks store the whole of parameters that no name matches.
"""
VOCABULARY: Splits = {
    name: [Split(dim=0, padded=True)] for name in ("embed_tokens.weight", "lm_head.weight")
}


def shard_groups(
    groups: Sequence[ParamGroup], splits: Splits, rank: int, size: int
) -> list[ParamGroup]:
    """Return groups of whole parameters as one rank of `size` stores them.

    A ValueError names a parameter that cannot be divided evenly.
    """
    if not 0 <= rank < size:
        raise ValueError(f"tensor-parallel rank {rank} must be a number in [0, {size})")
    if size == 1:
        return list(groups)
    shard = partial(_shard, splits=splits, rank=rank, size=size)
    return [replace(group, params=tuple(map(shard, group.params))) for group in groups]


def _shard(param: Param, splits: Splits, rank: int, size: int) -> Param:
    chosen = next((rules for suffix, rules in splits.items() if param.name.endswith(suffix)), ())
    if not chosen:
        return param
    shape, pieces = param.shape, list(param.pieces)
    for split in chosen:
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
    """Return the rank's runs along the split dimension, and the number of elements that it stores.

    A run is a part's first element, its number of elements, and their place in the stored tensor.
    """
    count = split.count or size
    units, rest = divmod(param.shape[split.dim], sum(split.units))
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
    """Return the range [first, last) of the units in shard `index` of `count`.

    The last shards may have fewer units, or none.
    """
    most = -(-units // count)
    return min(units, index * most), min(units, (index + 1) * most)


def _with(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at + 1 :])


Ints = tuple[int, ...]
_EXPERTS = ".mlp.experts."
# Parameter of stacked experts: the tensors of one expert, in most families and in Mixtral.
_PARTS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}
_MIXTRAL = ".block_sparse_moe."


class Stored(NamedTuple):
    """A tensor in a file that stores a parameter or a part of it."""

    name: str  # in the file
    start: Ints  # index of its first element in the parameter
    shape: Ints  # in the file; may lack leading dimensions of the parameter

    @property
    def box(self) -> Ints:
        """Return its shape with all dimensions of the parameter."""
        return (1,) * (len(self.start) - len(self.shape)) + self.shape

    @property
    def volume(self) -> int:
        return math.prod(self.shape)


def spellings(name: str, shape: Ints) -> list[list[Stored]]:
    """Return all ways in which files may store a parameter, the parameter itself first.

    Each way is a list of tensors that together form the whole parameter.
    """
    ways = [[Stored(name, (0,) * len(shape), shape)]]
    layer, experts, stacked = name.partition(_EXPERTS)
    if experts and stacked in _PARTS:
        usual, mixtral = _PARTS[stacked]
        ways.append(_per_expert(layer + _EXPERTS, usual, shape))
        ways.append(_per_expert(f"{layer}{_MIXTRAL}experts.", mixtral, shape))
    elif name.endswith(".mlp.gate.weight"):
        ways.append([ways[0][0]._replace(name=name.replace(".mlp.", _MIXTRAL))])
    return ways


def _per_expert(prefix: str, parts: tuple[str, ...], shape: Ints) -> list[Stored]:
    count, rows, columns = shape
    rows //= len(parts)
    tensors = []
    for expert in range(count):
        for number, part in enumerate(parts):
            name = f"{prefix}{expert}.{part}.weight"
            tensors.append(Stored(name, (expert, number * rows, 0), (rows, columns)))
    return tensors
