"""The messages of a weight update: where parameters lie, what is offered, written and served."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from memsaver.ops.layout import row_major

if TYPE_CHECKING:
    from memsaver import Ticket


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype that messages and plans call so; a ValueError if there is none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no torch dtype")
    return dtype


@dataclass(frozen=True, kw_only=True)
class ArenaBox:
    """A box of elements in the arena of a tag.

    Attributes:
        offset: Of its first element, in bytes from the start of the tag's arena.
        dtype: Like "float32".
        strides: Of the other elements, in elements; left out: row-major.
    """

    offset: int
    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.strides:
            object.__setattr__(self, "strides", row_major(self.shape))
        assert len(self.strides) == len(self.shape), self

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch_dtype(self.dtype)

    @property
    def nbytes(self) -> int:
        """Return the bytes of its elements, without what lies between them."""
        return math.prod(self.shape) * self.torch_dtype.itemsize

    @property
    def end(self) -> int:
        """First byte of the arena after it."""
        span = sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True)) + 1
        return self.offset + (span * self.torch_dtype.itemsize if self.nbytes else 0)

    def view(self, arena: Tensor, base: int = 0) -> Tensor:
        """Return its elements. arena: uint8, from byte `base` of the tag's arena on."""
        place = arena[self.offset - base : self.end - base].view(self.torch_dtype)
        return place.as_strided(self.shape, self.strides)


@dataclass(frozen=True, kw_only=True)
class ParamSlice(ArenaBox):
    """One checkpoint parameter, or a box of it that this rank holds, in the store.

    start: of this part in the whole parameter, one entry a dimension. index_base: number of the
    whole parameter's first element in the digest.
    """

    name: str
    global_shape: tuple[int, ...]
    start: tuple[int, ...]
    index_base: int

    def __post_init__(self) -> None:
        super().__post_init__()
        ends = (first + size for first, size in zip(self.start, self.shape, strict=True))
        assert all(end <= whole for end, whole in zip(ends, self.global_shape, strict=True)), self


class ModuleTensor(ArenaBox):
    """A fused tensor that the model multiplies with: adjacent slices seen as one."""


@dataclass(frozen=True, kw_only=True)
class PackedBox(ArenaBox):
    """A box of elements of the weights that comes in a message, row-major from byte `at` of it."""

    at: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Says where every parameter lies under tag `weights`.

    nbytes: end of the last slice, from the start of the tag's arena. aliases: tied name -> stored
    name.
    modules: fused tensor name -> where. zeros: (offset, bytes) of padding that the model reads and
    no parameter fills. layout_hash: changes with any of it; left out: it is computed.
    """

    nbytes: int
    slices: tuple[ParamSlice, ...]
    aliases: dict[str, str]
    modules: dict[str, ModuleTensor]
    zeros: tuple[tuple[int, int], ...] = ()
    layout_hash: str = ""

    def __post_init__(self) -> None:
        if not self.layout_hash:
            named = sorted(self.aliases.items()), sorted(self.modules.items())
            said = repr((self.nbytes, self.slices, *named, self.zeros))
            object.__setattr__(self, "layout_hash", sha256(said.encode()).hexdigest())


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
    """The engine's invitation to write `version` into the pages of `ticket`, where the manifest of
    this hash says; nbytes: as there.

    shadow: they are pages of their own, beside those that are served; otherwise the weights are
    undefined from here on.
    names: only these parameters will be written; None: all.
    """

    version: int
    layout_hash: str
    nbytes: int
    ticket: Ticket
    shadow: bool = False
    names: tuple[str, ...] | None = None


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
class UpdateReceipt:
    """Says what the engine has verified, and will serve when it is committed; or, of a commit, what
    it serves now. digest: of the verification, None for pages aliased without one.
    """

    version: int
    digest: int | None
    seconds: float
