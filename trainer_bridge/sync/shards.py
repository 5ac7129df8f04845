"""Boxes of parameters, and which one every rank of the trainer holds: FSDP2, HSDP, tensor parallel,
and mixtures of them; along which dimension ranks hold what engines beside them need.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from rollout.weights import Manifest

Ints = tuple[int, ...]


class Box(NamedTuple):
    """The elements from `start` to `start + shape` (excluded), one entry a dimension."""

    start: Ints
    shape: Ints

    @property
    def volume(self) -> int:
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """Returns what both contain; None if that is nothing."""
        start, shape = [], []
        for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True):
            first = max(a, b)
            if (size := min(a + n, b + m) - first) <= 0:
                return None
            start.append(first)
            shape.append(size)
        return Box(tuple(start), tuple(shape))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Returns where it lies in a tensor of what `outer` holds."""
        bounds = zip(self.start, self.shape, outer.start, strict=True)
        return tuple(slice(first - begin, first - begin + size) for first, size, begin in bounds)


def difference(a: Ints, b: Ints) -> Ints:
    """Subtracts each entry of `b` from that of `a`."""
    return tuple(x - y for x, y in zip(a, b, strict=True))


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Returns first element and length of part `index`, as by `torch.chunk`: may be empty."""
    each = -(-size // parts)
    first = min(size, index * each)
    return first, min(size, first + each) - first


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceShard:
    """The box of `shape` at `start` of one parameter, held by one rank as a contiguous row-major
    tensor; may be empty. rank: in the trainer's world.
    """

    name: str
    global_shape: Ints
    start: Ints
    shape: Ints
    rank: int


Held = tuple[tuple[Box, Ints], ...]
"""Disjoint boxes of one parameter, each with the ranks that hold it."""


def holders(name: str, shards: Iterable[SourceShard]) -> Held:
    """Return who holds what of one parameter.

    Args:
        name: Of the parameter.
        shards: Of all ranks, empty ones too; the same one twice does no harm.

    Raises:
        ValueError: The shards disagree about the shape, or overlap without being the same.
    """
    shards = sorted(set(shards), key=lambda shard: (shard.start, shard.shape, shard.rank))
    shapes = sorted({shard.global_shape for shard in shards})
    if len(shapes) > 1:
        raise ValueError(f"{name}: shapes {' and '.join(map(str, shapes))} in the trainer")
    held: dict[Box, list[int]] = defaultdict(list)
    for shard in shards:
        if (box := Box(shard.start, shard.shape)).volume:
            held[box].append(shard.rank)
    for (box, ranks), (other, others) in itertools.combinations(held.items(), 2):
        if common := box.intersect(other):
            text = f"{name}: element {common.start} is held by ranks {ranks[0]} and {others[0]}"
            raise ValueError(f"{text}, in different parts; replicas must hold the same part")
    return tuple((box, tuple(ranks)) for box, ranks in held.items())


@functools.lru_cache(maxsize=4096)  # the layers of a model repeat each other
def cover(box: Box, held: Held) -> list[tuple[Box, Box, Ints]]:
    """Return what `box` has in common with each held box: (the common box, the held box, its
    ranks).
    """
    common = ((box.intersect(other), other, ranks) for other, ranks in held)
    return [(both, other, ranks) for both, other, ranks in common if both is not None]


def local_shard(param: Tensor) -> Tensor:
    """Returns this rank's part of a sharded tensor, without gradient; writes reach the shard."""
    assert isinstance(param, DTensor)
    local = param.detach()
    assert isinstance(local, DTensor)
    return local.to_local()


def local_box(
    global_shape: Sequence[int],
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
) -> Box:
    """Returns (start, shape): what the rank at `coordinate` of the mesh holds; uneven sizes are
    shared as by `torch.chunk`.

    _StridedShard means what FSDP2 makes of it: another mesh dimension shares the tensor first, and
    each part is shared again. (torch's own `full_tensor()` follows that for even sizes only.) A
    ValueError says what is no box: partial sums, or a strided shard without that other dimension.
    """
    splits = tuple(_split(placement, len(global_shape)) for placement in placements)
    start, shape = [0] * len(global_shape), list(global_shape)
    for mesh_dim, dim in _order(splits, tuple(mesh_shape)):
        first, shape[dim] = chunk(shape[dim], mesh_shape[mesh_dim], coordinate[mesh_dim])
        start[dim] += first
    return Box(tuple(start), tuple(shape))


def shard_of(name: str, param: Tensor, rank: int) -> SourceShard:
    """Return what this rank, number `rank` in the world, holds of a parameter: its box of a
    DTensor, all of any other tensor.

    Raises:
        ValueError: The placements give no box, or another one than this rank's tensor.
    """
    shape = tuple(param.shape)
    box = Box((0,) * param.ndim, shape)
    if isinstance(param, DTensor):
        box, local = shard_box(param), tuple(param._local_tensor.shape)
        if local != box.shape:
            raise ValueError(
                f"{name}: this rank holds a tensor of {local}, but {param.placements} on a mesh of "
                f"{tuple(param.device_mesh.mesh.shape)} gives it {box.shape}; shard it by "
                "fully_shard or distribute_tensor"
            )
    return SourceShard(name=name, global_shape=shape, start=box.start, shape=box.shape, rank=rank)


class _Split(NamedTuple):
    """A mesh dimension shares dimension `dim`, after others further right made `parts` of it."""

    dim: int
    parts: int


def _split(placement: Placement, ndim: int) -> _Split | None:
    """Makes plain data (None: replicated): torch versions differ in which placements are equal."""
    if isinstance(placement, Replicate):
        return None
    if isinstance(placement, _StridedShard):
        return _Split(placement.dim % ndim, int(placement.split_factor))
    if isinstance(placement, Shard):
        return _Split(placement.dim % ndim, 1)
    raise ValueError(
        f"{placement} is no part of a tensor; only sharded and replicated parameters have one"
    )


@functools.lru_cache(maxsize=1024)
def _order(splits: tuple[_Split | None, ...], mesh_shape: Ints) -> tuple[tuple[int, int], ...]:
    """Returns mesh dimensions, each with the tensor's that it shares, in their order of sharing."""
    order: list[tuple[int, int]] = []
    for mesh_dim in reversed(range(len(splits))):
        if (split := splits[mesh_dim]) is not None:
            order.insert(_position(order, split, mesh_shape), (mesh_dim, split.dim))
    return tuple(order)


def _position(order: Sequence[tuple[int, int]], split: _Split, mesh_shape: Ints) -> int:
    """Returns where to insert: behind dimensions that make `split.parts` parts."""
    made = 1
    for position, (mesh_dim, dim) in enumerate(order):
        if made == split.parts:
            return position
        made *= mesh_shape[mesh_dim] if dim == split.dim else 1
    if made == split.parts:
        return len(order)
    raise ValueError(
        f"_StridedShard({split.dim}, split_factor={split.parts}) on a mesh of {mesh_shape}: no "
        f"mesh dimension further right makes {split.parts} parts of dimension {split.dim}, so a "
        "rank's tensor is no box"
    )


def like_shard(local: Tensor, param: Tensor) -> DTensor:
    """Returns `local` as this rank's shard of a tensor sharded like `param`."""
    assert isinstance(param, DTensor)
    mesh, places = param.device_mesh, param.placements
    return DTensor.from_local(
        local, mesh, places, run_check=False, shape=param.shape, stride=param.stride()
    )


def host_shard(local: Tensor, param: Tensor) -> DTensor:
    """Returns `local`, on the host and of any dtype, as this rank's shard of a tensor sharded like
    `param`. `from_local` would move it to the mesh's device.
    """
    assert isinstance(param, DTensor)
    spec = copy.copy(param._spec)
    assert spec.tensor_meta is not None
    spec.tensor_meta = spec.tensor_meta._replace(dtype=local.dtype)
    return DTensor(local, spec, requires_grad=False)


def shard_box(param: Tensor) -> Box:
    """Returns (start, shape) of this rank's shard in the whole parameter."""
    assert isinstance(param, DTensor)
    mesh = param.device_mesh
    at = mesh.get_coordinate()
    assert at is not None
    return local_box(param.shape, param.placements, mesh.mesh.shape, at)


def aligned_dims(manifests: Sequence[Manifest]) -> dict[str, int]:
    """Returns the dimension by which to shard parameters over as many ranks as there are manifests,
    where it is not 0.

    manifests: what the engine beside rank 0, 1, ... holds. Chosen is what leaves the fewest
    elements to move: rows that go by heads stay with dimension 0, columns (o_proj, down_proj) get
    1, down_proj of experts 2. FSDP2 shares no other dimension than 0 unevenly. Names are the
    manifests' own, tied ones are under the stored name. Those left out lie best by dimension 0, or
    equally well: what all engines hold, gate and up rows of experts in one tensor.
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
    """Counts elements of `box` that `rank` holds when dimension `dim` is shared by the world."""
    common = box.intersect(local_box(shape, [Shard(dim)], (world,), (rank,)))
    return common.volume if common else 0
