"""Weights as they lie in an arena: what is where, whether they are some version, their digest."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from memsaver.common.digest import BytesDigest
from memsaver.common.layout import grids, row_major
from memsaver.common.segments import Segment
from rollout.types import Manifest, ParamSlice


class WeightArena:
    """Bytes of a tag that a manifest describes, whoever made the tensors there.

    `version` is None while the content is undefined; `undefined_reason` then says why.
    `last_version` is the last one that was defined.
    """

    def __init__(
        self,
        manifest: Manifest,
        shapes: Mapping[str, tuple[int, ...]],
        arena: Tensor,
        base: int,
        tag: str,
    ) -> None:
        """shapes: of the checkpoint's parameters, whole, tied ones once. arena: uint8, from byte
        `base` of the tag's addresses on, at least to the end of the manifest.
        """
        self.tag = tag
        self.manifest = manifest
        self.param_nbytes = sum(math.prod(p.shape) * _dtype(p).itemsize for p in manifest.slices)
        self._arena, self._base = arena, base
        self._shapes = dict(shapes)
        self.version: int | None = None
        self.last_version = 0
        self.undefined_reason = "the weights were never loaded; commit a weight update"
        self._digest: tuple[frozenset[str], BytesDigest] | None = None

    @property
    def arena(self) -> Tensor:
        """uint8: all of the weights, padding included."""
        return self._arena

    @property
    def parameters(self) -> Collection[str]:
        """Names of the checkpoint's parameters, tied ones once; also of those of which this rank
        stores nothing.
        """
        return self._shapes.keys()

    def define(self, version: int) -> None:
        for offset, nbytes in self.manifest.zeros:
            self._arena[offset - self._base : offset - self._base + nbytes].zero_()
        self.version = self.last_version = version
        self.undefined_reason = ""

    def undefine(self, reason: str) -> None:
        self.version = None
        self.undefined_reason = reason

    def digest(self, arena: Tensor | None = None, names: Collection[str] | None = None) -> int:
        """Digest of the slices as they lie in memory, padding left out. One launch a kind on a GPU,
        and one wait.

        arena: uint8, as long as the store's own: other pages with the same layout. names: of these
        parameters (or tied names) only. A ValueError names those that the model does not have.
        """
        arena = self._arena if arena is None else arena
        if arena.shape != self._arena.shape:
            raise ValueError(
                f"the weights are {self._arena.numel()} bytes, other pages of them "
                f"{tuple(arena.shape)}"
            )
        wanted = frozenset(
            self._shapes if names is None else (self.manifest.aliases.get(n, n) for n in names)
        )
        if unknown := sorted(wanted - self._shapes.keys()):
            raise ValueError(
                f"the model has no parameter {shorten(unknown)}; use names of the manifest"
            )
        # offsets are fixed: tables are made once
        if self._digest is None or self._digest[0] != wanted:
            pieces = (piece for piece in self.manifest.slices if piece.name in wanted)
            segments = chain.from_iterable(_segments(piece, self._base) for piece in pieces)
            self._digest = wanted, BytesDigest(list(segments), self._arena.device)
        return self._digest[1].run(arena)

    def box(self, piece: ParamSlice) -> Tensor:
        """View of a slice, with its strides."""
        strides = piece.strides or row_major(piece.shape)
        place = self._arena[piece.offset - self._base :]
        whole = place[: place.numel() // _dtype(piece).itemsize * _dtype(piece).itemsize]
        return whole.view(_dtype(piece)).as_strided(piece.shape, strides)


def dot(position: Sequence[int], strides: Sequence[int]) -> int:
    return sum(at * stride for at, stride in zip(position, strides, strict=True))


def shorten(names: Iterable[str], limit: int = 5) -> str:
    """The first names, and how many more there are."""
    names = list(names)
    if not names:
        return "nothing"
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _dtype(piece: ParamSlice) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, piece.dtype)
    return dtype


def _segments(piece: ParamSlice, base: int) -> Iterator[Segment]:
    """The elements of a slice, with their numbers in the whole parameter; byte offsets count from
    byte `base`.
    """
    dtype = _dtype(piece)
    numbers = row_major(piece.global_shape)
    first = piece.index_base + dot(piece.start, numbers)
    for grid in grids(piece.shape, piece.strides or row_major(piece.shape), numbers):
        yield Segment(
            dtype=dtype,
            target=piece.offset - base + grid.starts[0] * dtype.itemsize,
            count=grid.width,
            index_base=first + grid.starts[1],
            rows=grid.rows,
            target_pitch=grid.pitches[0],
            index_pitch=grid.pitches[1],
        )
