"""Names and bytes of the trainer's weights beside the rollout's, and in words what does not fit."""

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from memsaver.common.layout import row_major
from rollout.model import Stored, spellings
from rollout.types import Manifest, ParamSlice
from trainer_bridge.sync.boxes import Box, Ints, difference, dot, itemsize


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
    """Slices may interleave, but not share bytes. checked: clusters without problems."""
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


def spelled(manifests: Iterable[Manifest], names: Collection[str]) -> list[Manifest]:
    """Returns the manifests as they are, but for parameters that `names` holds otherwise spelled:
    of each part there is a slice of its own under its name, one of no rows where the target does
    not hold it.
    """
    manifests, ways = list(manifests), dict[str, list[Stored]]()
    for piece in chain.from_iterable(manifest.slices for manifest in manifests):
        if piece.name not in names and piece.name not in ways:
            for way in spellings(piece.name, piece.global_shape):
                if any(stored.name in names for stored in way):
                    ways[piece.name] = way
    return [_cut(manifest, ways) for manifest in manifests] if ways else manifests


def _cut(manifest: Manifest, ways: Mapping[str, Sequence[Stored]]) -> Manifest:
    held: dict[str, list[ParamSlice]] = defaultdict(list)
    for piece in manifest.slices:
        held[piece.name].append(piece)
    slices = [piece for piece in manifest.slices if piece.name not in ways]
    for name in ways.keys() & (held.keys() | manifest.modules.keys()):
        for stored in ways[name]:
            parts = [part for piece in held[name] if (part := _part(piece, stored)) is not None]
            slices += parts or [_nothing(stored)]
    return replace(manifest, slices=tuple(slices))


def _part(piece: ParamSlice, stored: Stored) -> ParamSlice | None:
    """Returns what the slice has of a part; None: nothing."""
    common = Box(piece.start, piece.shape).intersect(Box(stored.start, stored.box))
    if common is None:
        return None
    strides, last = piece.strides or row_major(piece.shape), -len(stored.shape)
    within = difference(common.start, piece.start)
    return replace(
        piece,
        name=stored.name,
        offset=piece.offset + dot(within, strides) * itemsize(piece.dtype),
        shape=common.shape[last:],
        global_shape=stored.shape,
        start=difference(common.start, stored.start)[last:],
        index_base=piece.index_base + dot(stored.start, row_major(piece.global_shape)),
        strides=strides[last:],
    )


def _nothing(stored: Stored) -> ParamSlice:
    return ParamSlice(
        name=stored.name,
        offset=0,
        shape=(0, *stored.shape[1:]),
        dtype="float32",
        global_shape=stored.shape,
        start=(0,) * len(stored.shape),
        index_base=0,
    )
