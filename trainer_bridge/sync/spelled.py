"""Cuts manifests by the names of a trainer that has a tensor for each expert, as checkpoints do,
where the rollout stacks them.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from memsaver.common.strided import row_major
from rollout.model import Stored, spellings
from rollout.types import Manifest, ParamSlice
from trainer_bridge.sync.boxes import Box, difference, dot, itemsize


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
