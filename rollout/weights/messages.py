"""The messages of a weight update: where parameters lie, what is offered, written and served."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from memsaver import Ticket


@dataclass(frozen=True, kw_only=True)
class ParamSlice:
    """One checkpoint parameter, or a box of it that this rank holds, in the store.

    offset: bytes from the start of the tag's arena. dtype: like "float32". start: of this part in
    the whole parameter, one entry a dimension. index_base: number of the whole parameter's first
    element in the digest. strides: in elements, where the part is not one range of bytes (gate rows
    of every expert of a fused tensor).
    """

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: str
    global_shape: tuple[int, ...]
    start: tuple[int, ...]
    index_base: int
    strides: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.global_shape) == len(self.start), self
        assert self.strides is None or len(self.strides) == len(self.shape), self
        ends = (first + size for first, size in zip(self.start, self.shape, strict=True))
        assert all(end <= whole for end, whole in zip(ends, self.global_shape, strict=True)), self


@dataclass(frozen=True, kw_only=True)
class ModuleTensor:
    """A fused tensor that the model multiplies with: adjacent slices seen as one. offset in bytes,
    as in ParamSlice.
    """

    offset: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Says where every parameter lies under tag `weights`.

    nbytes: end of the last slice, from the start of the tag's arena. aliases: tied name -> stored
    name.
    modules: fused tensor name -> where. layout_hash: changes with any of it. zeros: (offset, bytes)
    of padding that the model reads and no parameter fills.
    """

    nbytes: int
    slices: tuple[ParamSlice, ...]
    aliases: dict[str, str]
    modules: dict[str, ModuleTensor]
    layout_hash: str
    zeros: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        places = {(piece.name, piece.start) for piece in self.slices}
        assert len(places) == len(self.slices), "a part of a parameter appears twice"

    def __reduce__(self) -> tuple[Callable[[bytes], Manifest], tuple[bytes]]:
        """One string of bytes, made once: hundreds of slices in each message of an update cost
        milliseconds.
        """
        if (packed := self.__dict__.get("_packed")) is None:
            packed = pickle.dumps({field.name: getattr(self, field.name) for field in fields(self)})
            object.__setattr__(self, "_packed", packed)
        return _unpack_manifest, (packed,)


@lru_cache(maxsize=4)
def _unpack_manifest(packed: bytes) -> Manifest:
    return Manifest(**pickle.loads(packed))


@dataclass(frozen=True, kw_only=True)
class WeightLayout:
    """Says what lies where, for who plans to write it.

    place: the device of the pages (`memsaver.system.devices.place_of`). buffers: names and shapes
    of what the model computes with beside its parameters: values arrive with a write's receipt.
    """

    manifest: Manifest
    place: str
    buffers: dict[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class WeightOffer:
    """The engine's invitation to write `version` into the pages of `ticket`, where the manifest
    says.

    shadow: they are pages of their own, beside those that are served; otherwise the weights are
    undefined from here on.
    names: only these parameters will be written; None: all.
    """

    version: int
    manifest: Manifest
    ticket: Ticket
    shadow: bool = False
    names: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class PackedBox:
    """A box of elements of the weights, row-major from byte `at` of a message.

    offset: of its first element, in bytes from the start of the tag's arena; strides: of the others
    there, in elements of `itemsize` bytes.
    """

    at: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    def __post_init__(self) -> None:
        if self.itemsize not in (1, 2, 4) or len(self.shape) != len(self.strides):
            raise ValueError(
                f"a box has elements of 1, 2 or 4 bytes and as many strides as sizes, got {self}"
            )
        if min(self.at, self.offset, *self.shape, *self.strides) < 0:
            raise ValueError(f"a box has no negative numbers, got {self}")
        if self.at % self.itemsize or self.offset % self.itemsize:
            rule = f"must be multiples of the {self.itemsize} bytes of an element"
            raise ValueError(f"at and offset {rule}, got {self}")

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @property
    def end(self) -> int:
        """First byte of the arena after it."""
        span = sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True)) + 1
        return self.offset + (span * self.itemsize if self.nbytes else 0)


@dataclass(frozen=True, kw_only=True)
class WriteReceipt:
    """Holds what the writers say they wrote. digest: memsaver.ops.digest over every slice.
    nbytes: parameters, no padding. Both are over the offer's `names` only, where it has some.
    buffers: values of the layout's buffers, fp32 on the CPU; those left out stay as they are.
    """

    version: int
    layout_hash: str
    digest: int
    nbytes: int
    buffers: dict[str, Tensor] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True, kw_only=True)
class VerifyReceipt:
    """Holds what the engine read back, equal to what the writer says, and will serve when it is
    committed.
    """

    version: int
    digest: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class CommitReceipt:
    """Says what the engine now serves; the digest is that of the verification, None for pages
    aliased without one.
    """

    version: int
    digest: int | None
    seconds: float
