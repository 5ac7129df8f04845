"""Which rows of which shard go to which bytes of the rollout's weights. Plain data in, plain data out: no tensors.

The trainer shards parameters by rows (FSDP2), the rollout's slices are row ranges too, so a copy is a run of rows that
is contiguous on both sides.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from rollout.types import Manifest, ParamSlice

_LISTED = 20  # problems in one message


@dataclass(frozen=True, kw_only=True)
class SourceShard:
    """Rows `start` to `start + shape[0]` of one parameter, held by one rank."""

    name: str
    global_shape: tuple[int, ...]
    dtype: str
    start: int
    shape: tuple[int, ...]
    rank: int


@dataclass(frozen=True, kw_only=True)
class Copy:
    """Rank `rank` casts rows `row` to `row + shape[0]` of its shard of `name` and writes them at byte `offset`.

    shape, dtype: of the target. index_base: number of the first element in the digest.
    """

    rank: int
    name: str
    row: int
    shape: tuple[int, ...]
    dtype: str
    offset: int
    index_base: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * itemsize(self.dtype)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Copies of all ranks, in target order: together they write every byte of every slice exactly once."""

    layout_hash: str
    copies: tuple[Copy, ...]
    nbytes: int


class Planner:
    """Plans of one trainer's shards (of all ranks), one for each layout it meets."""

    def __init__(self, shards: Iterable[SourceShard]) -> None:
        self._shards = tuple(shards)
        self._plans: dict[str, Plan] = {}

    def plan(self, manifest: Manifest) -> Plan:
        if manifest.layout_hash not in self._plans:
            self._plans[manifest.layout_hash] = make_plan(self._shards, manifest)
        return self._plans[manifest.layout_hash]


def dim0_shards(name: str, global_shape: tuple[int, ...], dtype: str, world: int) -> list[SourceShard]:
    """The shards of FSDP2: ceil(rows / world) rows a rank, fewer or none for the last ones."""
    rows = global_shape[0]
    size = math.ceil(rows / world)
    shards = []
    for rank in range(world):
        start = min(rows, rank * size)
        shape = (min(rows, start + size) - start, *global_shape[1:])
        shards.append(
            SourceShard(name=name, global_shape=global_shape, dtype=dtype, start=start, shape=shape, rank=rank)
        )
    return shards


def make_plan(shards: Sequence[SourceShard], manifest: Manifest) -> Plan:
    """Raises a ValueError that lists what does not fit: missing, extra or doubled names, shapes, parts, bytes."""
    by_name: dict[str, list[SourceShard]] = defaultdict(list)
    for shard in shards:
        by_name[shard.name].append(shard)
    sources = _by_stored_name(by_name, manifest)
    problems = _name_problems(sources, manifest) + _byte_problems(manifest)
    copies: list[Copy] = []
    for piece in manifest.slices:
        names = sources.get(piece.name, [])
        if len(names) == 1:
            found, wrong = _slice_copies(piece, by_name[names[0]])
            copies += found
            problems += wrong
    if problems:
        more = f" and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
        listed = "; ".join(problems[:_LISTED])
        raise ValueError(f"the trainer's weights do not fit the rollout's, nothing was written: {listed}{more}")
    copies.sort(key=lambda copy: copy.offset)
    return Plan(layout_hash=manifest.layout_hash, copies=tuple(copies), nbytes=sum(copy.nbytes for copy in copies))


def _by_stored_name(names: Iterable[str], manifest: Manifest) -> dict[str, list[str]]:
    """Stored name -> the trainer's names for it: one, if both sides tie the same parameters."""
    sources: dict[str, list[str]] = defaultdict(list)
    for name in names:
        sources[manifest.aliases.get(name, name)].append(name)
    return sources


def _name_problems(sources: dict[str, list[str]], manifest: Manifest) -> list[str]:
    stored = {piece.name for piece in manifest.slices}
    problems = [f"missing in the trainer: {name}" for name in sorted(stored - sources.keys())]
    problems += [f"unknown to the rollout: {', '.join(sources[name])}" for name in sorted(sources.keys() - stored)]
    for _, several in sorted(sources.items()):
        if len(several) > 1:
            problems.append(
                f"{' and '.join(sorted(several))} are one parameter in the rollout (tied), not in the trainer"
            )
    return problems


def _byte_problems(manifest: Manifest) -> list[str]:
    problems, end, before = [], 0, ""
    for piece in sorted(manifest.slices, key=lambda piece: piece.offset):
        if piece.offset < end:
            problems.append(f"{before} and {piece.name} overlap at byte {piece.offset}")
        if piece.offset % itemsize(piece.dtype):
            problems.append(f"{piece.name}: byte {piece.offset} is not aligned to {piece.dtype}")
        end, before = piece.offset + math.prod(piece.shape) * itemsize(piece.dtype), piece.name
        if end > manifest.nbytes:
            problems.append(f"{piece.name} ends at byte {end}, after the manifest's {manifest.nbytes}")
    return problems


def _slice_copies(piece: ParamSlice, shards: Sequence[SourceShard]) -> tuple[list[Copy], list[str]]:
    shape = shards[0].global_shape
    if shape != piece.global_shape:
        return [], [f"{piece.name}: shape {shape} in the trainer, {piece.global_shape} in the rollout"]
    if piece.shape[1:] != shape[1:]:
        return [], [f"{piece.name}: part {piece.shape} of {shape} is not a run of rows"]
    copies, row = [], piece.start[0]
    last = row + piece.shape[0]
    for shard in sorted(shards, key=lambda shard: (shard.start, shard.shape[0])):
        first, end = max(shard.start, piece.start[0]), min(shard.start + shard.shape[0], last)
        if first >= end:
            continue
        if first != row:
            return [], [
                f"{piece.name}: row {min(row, first)} is held by {'no rank' if first > row else 'several ranks'}"
            ]
        copies.append(_copy(piece, shard, first, end))
        row = end
    if row != last:
        return [], [f"{piece.name}: row {row} is held by no rank"]
    return copies, []


def _copy(piece: ParamSlice, shard: SourceShard, first: int, end: int) -> Copy:
    width = math.prod(piece.shape[1:])
    return Copy(
        rank=shard.rank,
        name=shard.name,
        row=first - shard.start,
        shape=(end - first, *piece.shape[1:]),
        dtype=piece.dtype,
        offset=piece.offset + (first - piece.start[0]) * width * itemsize(piece.dtype),
        index_base=piece.index_base + first * width,
    )


def itemsize(dtype: str) -> int:
    """Bytes of an element of "float32", "bfloat16", ..."""
    return torch_dtype(dtype).itemsize


def torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no torch dtype")
    return dtype
