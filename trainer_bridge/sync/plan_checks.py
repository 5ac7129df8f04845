"""Says in words what keeps the trainer's weights from fitting the rollout's."""

import itertools
import math
from collections.abc import Collection, Iterable, Sequence

from memsaver.common.strided import row_major
from rollout.types import Manifest, ParamSlice
from trainer_bridge.sync.boxes import Ints, dot, itemsize


def name_problems(
    sources: dict[str, list[str]],
    manifest: Manifest,
    anywhere: Collection[str],
    wanted: Collection[str] | None,
) -> list[str]:
    """sources: stored name -> the trainer's names for it. anywhere: what any target stores. wanted:
    stored names, or None: all.
    """
    stored = {piece.name for piece in manifest.slices if wanted is None or piece.name in wanted}
    # A module alone: all of it is padding on this rank.
    known = stored | (manifest.modules.keys() & anywhere)
    problems = [f"missing in the trainer: {name}" for name in sorted(stored - sources.keys())]
    problems += [
        f"unknown to the rollout: {', '.join(sources[name])}"
        for name in sorted(sources.keys() - known)
    ]
    for _, several in sorted(sources.items()):
        if len(several) > 1:
            text = "are one parameter in the rollout (tied), not in the trainer"
            problems.append(f"{' and '.join(sorted(several))} {text}")
    return problems


def byte_problems(manifest: Manifest) -> list[str]:
    """Lists slices that overlap, end too late or are not aligned."""
    problems: list[str] = []
    pieces = [piece for piece in manifest.slices if math.prod(piece.shape)]
    cluster: list[ParamSlice] = []  # slices whose byte ranges touch each other
    last, checked = 0, set[object]()
    for piece in sorted(pieces, key=lambda piece: piece.offset):
        if piece.offset % itemsize(piece.dtype):
            problems.append(f"{piece.name}: byte {piece.offset} is not aligned to {piece.dtype}")
        if (end := piece.offset + _extent(piece)) > manifest.nbytes:
            problems.append(
                f"{piece.name} ends at byte {end}, after the manifest's {manifest.nbytes}"
            )
        if piece.offset >= last:
            problems += _overlaps(cluster, checked)
            cluster = []
        cluster.append(piece)
        last = max(last, end)
    return problems + _overlaps(cluster, checked)


def _strides(piece: ParamSlice) -> Ints:
    return piece.strides or row_major(piece.shape)


def _extent(piece: ParamSlice) -> int:
    """Counts the bytes from the first element to the end of the last one."""
    return (dot([size - 1 for size in piece.shape], _strides(piece)) + 1) * itemsize(piece.dtype)


def _overlaps(cluster: Sequence[ParamSlice], checked: set[object]) -> list[str]:
    """Slices may interleave (gate and up of every expert), but not share bytes.

    checked: clusters without problems.
    """
    if len(cluster) == 1 and cluster[0].strides is None:
        return []
    key = tuple(
        (piece.offset - cluster[0].offset, piece.shape, piece.strides, piece.dtype)
        for piece in cluster
    )
    if key in checked:
        return []
    runs = sorted(itertools.chain.from_iterable(map(_runs, cluster)))
    for (_, end, name), (start, _, other) in itertools.pairwise(runs):
        if start < end:
            return [f"{name} and {other} overlap at byte {start}"]
    checked.add(key)
    return []


def _runs(piece: ParamSlice) -> Iterable[tuple[int, int, str]]:
    """Yields (first byte, end, name) of the ranges of bytes that a slice consists of."""
    size, strides = itemsize(piece.dtype), _strides(piece)
    outer, width = len(piece.shape), 1
    while outer > 0 and strides[outer - 1] == width:
        outer -= 1
        width *= piece.shape[outer]
    for at in itertools.product(*map(range, piece.shape[:outer])):
        first = piece.offset + dot(at, strides) * size
        yield first, first + width * size, piece.name
