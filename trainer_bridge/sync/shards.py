"""Boxes of parameters that ranks of a trainer hold under FSDP2, HSDP, tensor parallelism or a mix.

`aligned_dims` chooses the dimensions that give a rank the parts its device's engine needs.
"""

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from rollout.weights import Manifest
from trainer_bridge.fsdp_internals import StridedShard, local_tensor

Ints = tuple[int, ...]


class Box(NamedTuple):
    """The elements from `start` to `start + shape` (exclusive), one entry per dimension."""

    start: Ints
    shape: Ints

    @property
    def volume(self) -> int:
        return math.prod(self.shape)

    def intersect(self, other: "Box") -> "Box | None":
        """Return the intersection of two boxes, or None if it is empty."""
        start, shape = [], []
        for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True):
            first = max(a, b)
            if (size := min(a + n, b + m) - first) <= 0:
                return None
            start.append(first)
            shape.append(size)
        return Box(tuple(start), tuple(shape))

    @property
    def slices(self) -> tuple[slice, ...]:
        """Return the slices that select this box in the whole tensor."""
        bounds = zip(self.start, self.shape, strict=True)
        return tuple(slice(first, first + size) for first, size in bounds)

    def within(self, outer: "Box") -> tuple[slice, ...]:
        """Return the slices that select this box in a tensor with the elements of `outer`."""
        return Box(difference(self.start, outer.start), self.shape).slices


def difference(a: Ints, b: Ints) -> Ints:
    """Subtract `b` from `a` entry by entry."""
    return tuple(x - y for x, y in zip(a, b, strict=True))


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Return first element and length of part `index` as in `torch.chunk`; it may be empty."""
    full = -(-size // parts)
    first = min(size, index * full)
    return first, min(size, first + full) - first


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceShard:
    """A box of one parameter that one rank holds as a contiguous row-major tensor."""

    name: str  # in the checkpoint
    global_shape: Ints  # of the whole parameter
    start: Ints  # first element of the box
    shape: Ints  # of the box, which may be empty
    rank: int  # in the trainer's world


Held = tuple[tuple[Box, Ints], ...]
"""Disjoint boxes of one parameter, each with the ranks that hold it."""


def held_boxes(name: str, shards: Iterable[SourceShard]) -> Held:
    """Return the boxes of one parameter, with the ranks that hold each.

    Empty shards and duplicates are allowed. Shards with different global shapes, or that overlap
    without being equal, raise a ValueError.
    """
    shards = sorted(set(shards), key=lambda shard: (shard.start, shard.shape, shard.rank))
    shapes = sorted({shard.global_shape for shard in shards})
    if len(shapes) > 1:
        raise ValueError(f"{name}: shapes {' and '.join(map(str, shapes))} in the trainer's shards")
    held: dict[Box, list[int]] = defaultdict(list)
    for shard in shards:
        if (box := Box(shard.start, shard.shape)).volume:
            held[box].append(shard.rank)
    for (box, ranks), (box2, ranks2) in itertools.combinations(held.items(), 2):
        if common := box.intersect(box2):
            text = f"{name}: element {common.start} is held by ranks {ranks[0]} and {ranks2[0]}"
            raise ValueError(f"{text}, in different parts; replicas must hold the same part")
    return tuple((box, tuple(ranks)) for box, ranks in held.items())


@functools.lru_cache(maxsize=4096)  # the layers of a model repeat each other
def cover(box: Box, held: Held) -> list[tuple[Box, Box, Ints]]:
    """Return each intersection of `box` with a held box, as (intersection, held box, its ranks).

    Empty intersections are left out.
    """
    common = ((box.intersect(whole), whole, ranks) for whole, ranks in held)
    return [(both, whole, ranks) for both, whole, ranks in common if both is not None]


def local_shard(param: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, without gradient; writes change the shard."""
    assert isinstance(param, DTensor)
    return local_tensor(param)


def shard_ranks(param: Tensor) -> int:
    """Return the number of ranks that share a tensor; 1 if this rank has all of it."""
    return param.device_mesh.size() if isinstance(param, DTensor) else 1


def local_box(
    global_shape: Sequence[int],
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
) -> Box:
    """Return the box that the rank at `coordinate` of a mesh holds.

    There is one placement per mesh dimension. Uneven sizes are divided as in `torch.chunk`. A
    `_StridedShard` is interpreted as in FSDP2: another mesh dimension divides the tensor first, and
    each part is divided again. (torch's `full_tensor()` supports this for even sizes only.)

    A rank's tensor that is not a box raises a ValueError: a partial sum, or a strided shard without
    the other mesh dimension.
    """
    splits = tuple(_split(placement, len(global_shape)) for placement in placements)
    start, shape = [0] * len(global_shape), list(global_shape)
    for mesh_dim, dim in _order(splits, tuple(mesh_shape)):
        first, shape[dim] = chunk(shape[dim], mesh_shape[mesh_dim], coordinate[mesh_dim])
        start[dim] += first
    return Box(tuple(start), tuple(shape))


def shard_of(name: str, param: Tensor, rank: int) -> SourceShard:
    """Describe this rank's shard of a parameter: its box of a DTensor, all of any other tensor.

    Placements that describe no box, or a box that differs from this rank's tensor, raise a
    ValueError.
    """
    shape = tuple(param.shape)
    box = Box((0,) * param.ndim, shape)
    if isinstance(param, DTensor):
        box, local = shard_box(param), tuple(local_tensor(param).shape)
        if local != box.shape:
            raise ValueError(
                f"{name}: this rank holds a tensor of {local}, but {param.placements} on a mesh of "
                f"{tuple(param.device_mesh.mesh.shape)} gives it {box.shape}; shard it by "
                "fully_shard or distribute_tensor"
            )
    return SourceShard(name=name, global_shape=shape, start=box.start, shape=box.shape, rank=rank)


class _Split(NamedTuple):
    """A mesh dimension that divides tensor dimension `dim`, already divided into `parts` parts.

    Mesh dimensions further right divided it into these parts.
    """

    dim: int
    parts: int


def _split(placement: Placement, ndim: int) -> _Split | None:
    """Convert a placement to plain data, None if replicated.

    Versions of torch differ in which placements compare equal.
    """
    if isinstance(placement, Replicate):
        return None
    if isinstance(placement, StridedShard):
        return _Split(placement.dim % ndim, int(placement.split_factor))
    if isinstance(placement, Shard):
        return _Split(placement.dim % ndim, 1)
    raise ValueError(
        f"placement {placement} has no box; only sharded and replicated parameters can be synced"
    )


@functools.lru_cache(maxsize=1024)
def _order(splits: tuple[_Split | None, ...], mesh_shape: Ints) -> tuple[tuple[int, int], ...]:
    """Return pairs (mesh dimension, tensor dimension that it divides) in the order of division."""
    order: list[tuple[int, int]] = []
    for mesh_dim in reversed(range(len(splits))):
        if (split := splits[mesh_dim]) is not None:
            order.insert(_position(order, split, mesh_shape), (mesh_dim, split.dim))
    return tuple(order)


def _position(order: Sequence[tuple[int, int]], split: _Split, mesh_shape: Ints) -> int:
    """Return where to insert `split`: behind the mesh dimensions that make `split.parts` parts."""
    parts = 1
    for position, (mesh_dim, dim) in enumerate(order):
        if parts == split.parts:
            return position
        parts *= mesh_shape[mesh_dim] if dim == split.dim else 1
    if parts == split.parts:
        return len(order)
    raise ValueError(
        f"_StridedShard({split.dim}, split_factor={split.parts}) on a mesh of {mesh_shape}: no "
        f"mesh dimension further right makes {split.parts} parts of dimension {split.dim}, so a "
        "rank's tensor is not a box"
    )


def like_shard(local: Tensor, param: Tensor) -> DTensor:
    """Wrap `local` as this rank's shard of a tensor that is sharded like `param`."""
    assert isinstance(param, DTensor)
    mesh, places = param.device_mesh, param.placements
    return DTensor.from_local(
        local, mesh, places, run_check=False, shape=param.shape, stride=param.stride()
    )


def shard_box(param: Tensor) -> Box:
    """Return the box of this rank's shard in the whole parameter."""
    assert isinstance(param, DTensor)
    mesh = param.device_mesh
    at = mesh.get_coordinate()
    assert at is not None
    return local_box(param.shape, param.placements, mesh.mesh.shape, at)


def aligned_dims(manifests: Sequence[Manifest]) -> dict[str, int]:
    """Choose the dimensions by which to shard parameters so that the fewest elements must move.

    Weights that tensor parallelism divides by rows keep dimension 0. Weights divided by columns
    (o_proj, down_proj) get dimension 1, and experts' down_proj gets 2. Only dimensions that divide
    evenly are candidates, because FSDP2 divides nothing but dimension 0 unevenly.

    Args:
        manifests: Manifest of the engine on the device of each rank.

    Returns:
        Dimension by stored name, for parameters whose best dimension is not 0. For all others,
        dimension 0 is best or as good: parameters that all engines hold whole, or experts' gate and
        up rows in one tensor.
    """
    shapes: dict[str, Ints] = {}
    slices: dict[str, list[tuple[int, Box]]] = defaultdict(list)
    for rank, manifest in enumerate(manifests):
        for piece in manifest.slices:
            shapes[piece.name] = piece.global_shape
            slices[piece.name].append((rank, Box(piece.start, piece.shape)))
    best: dict[tuple[Ints, tuple[tuple[int, Box], ...]], int] = {}  # layers repeat each other
    dims: dict[str, int] = {}
    for name, shape in shapes.items():
        kind = (shape, tuple(slices[name]))
        if kind not in best:
            best[kind] = _best(shape, kind[1], len(manifests))
        if best[kind]:
            dims[name] = best[kind]
    return dims


def _best(shape: Ints, slices: Sequence[tuple[int, Box]], world: int) -> int:
    candidates = [dim for dim in range(len(shape)) if dim == 0 or shape[dim] % world == 0]
    return max(
        candidates, key=lambda dim: sum(_held(shape, dim, world, rank, box) for rank, box in slices)
    )


def _held(shape: Ints, dim: int, world: int, rank: int, box: Box) -> int:
    """Count the elements of `box` that `rank` holds if the world divides dimension `dim`."""
    common = box.intersect(local_box(shape, [Shard(dim)], (world,), (rank,)))
    return common.volume if common else 0
