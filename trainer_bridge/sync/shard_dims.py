"""Chooses how to shard a trainer so that its ranks hold what rollout engines beside them need."""

from collections import defaultdict
from collections.abc import Sequence

from rollout.types import Manifest
from trainer_bridge.sync.boxes import Box, Ints, chunk


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
    first, size = chunk(shape[dim], world, rank)
    start = (*(0 for _ in shape[:dim]), first, *(0 for _ in shape[dim + 1 :]))
    common = box.intersect(Box(start, (*shape[:dim], size, *shape[dim + 1 :])))
    return common.volume if common else 0
