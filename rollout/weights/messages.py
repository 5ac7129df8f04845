"""The messages of a weight update: layouts, offers, receipts."""

import math
from dataclasses import dataclass, field
from hashlib import sha256

import torch
from torch import Tensor

from memsaver import Ticket
from memsaver.ops.layout import row_major


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of this name, or raise a ValueError."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a torch dtype")
    return dtype


@dataclass(frozen=True, kw_only=True)
class ArenaBox:
    """A box of elements in the arena of a tag.

    Attributes:
        offset: Offset of the first element, in bytes from the start of the tag's arena.
        shape: Shape of the box.
        dtype: Name of the torch dtype, such as "float32".
        strides: Strides in elements; row-major if left out.
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
        """Return the bytes of the elements, without gaps between them."""
        return math.prod(self.shape) * self.torch_dtype.itemsize

    @property
    def end(self) -> int:
        """Return the first byte of the arena after the box."""
        span = sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True)) + 1
        return self.offset + (span * self.torch_dtype.itemsize if self.nbytes else 0)

    def view(self, arena: Tensor, base: int = 0) -> Tensor:
        """Return a view of the elements.

        Args:
            arena: uint8, the tag's arena from byte `base` on.
            base: Byte of the tag's arena at which `arena` starts.
        """
        place = arena[self.offset - base : self.end - base].view(self.torch_dtype)
        return place.as_strided(self.shape, self.strides)


@dataclass(frozen=True, kw_only=True)
class ParamSlice(ArenaBox):
    """A checkpoint parameter, or the box of it that this rank stores, in the arena.

    Attributes:
        name: Name of the parameter in the checkpoint.
        global_shape: Shape of the whole parameter.
        start: Index of the box's first element in the whole parameter, one entry per dimension.
        index_base: Number of the whole parameter's first element in the digest.
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
    """A tensor that the model uses in one multiplication and that spans adjacent slices."""


@dataclass(frozen=True, kw_only=True)
class PackedBox(ArenaBox):
    """A box of the weights whose elements are in a message, row-major from its byte `at` on."""

    at: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The places of all parameters on tag `weights`.

    Attributes:
        nbytes: End of the last slice, in bytes from the start of the tag's arena.
        slices: The parameters.
        aliases: Stored name by tied name.
        modules: Fused tensors by name.
        zeros: (offset, bytes) of padding that the model reads and no parameter fills.
        layout_hash: Hash of all other fields; computed if left out.
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
            fields = repr((self.nbytes, self.slices, *named, self.zeros))
            object.__setattr__(self, "layout_hash", sha256(fields.encode()).hexdigest())


@dataclass(frozen=True, kw_only=True)
class WeightLayout:
    """The layout of an engine's weights, from which a writer plans its copies.

    Attributes:
        manifest: Places of the parameters.
        place: Device of the pages (`memsaver.system.devices.place_of`).
        buffers: Shapes by name of tensors other than parameters, such as router biases. Their
            values arrive in a `WriteReceipt`.
        ranks: Number of the engine's tensor-parallel ranks, each of which has a layout.
        expert_parallel: Number of parts into which the ranks divide the list of experts; the ranks
            of one part divide each of its experts.
    """

    manifest: Manifest
    place: str
    buffers: dict[str, tuple[int, ...]] = field(default_factory=dict)
    ranks: int = 1
    expert_parallel: int = 1


@dataclass(frozen=True, kw_only=True)
class WeightOffer:
    """The engine's offer of pages into which a new version can be written.

    Attributes:
        version: Number of the new version.
        layout_hash: Hash of the manifest that describes the pages.
        nbytes: Size of the weights, as in the manifest.
        ticket: Ticket to the pages.
        shadow: The pages are a second copy, and the present version is served meanwhile. Otherwise
            the weights are undefined from now on.
        names: Only these parameters will be written; None: all.
        start: Byte of the tag where the manifest's bytes begin.
    """

    version: int
    layout_hash: str
    nbytes: int
    ticket: Ticket
    shadow: bool = False
    names: tuple[str, ...] | None = None
    start: int = 0


@dataclass(frozen=True, kw_only=True)
class WriteReceipt:
    """The writers' claim of what they wrote, restricted to the offer's `names` if it has any.

    Attributes:
        version: Number of the new version.
        layout_hash: Hash of the manifest.
        digest: `memsaver.ops.digest` over all slices.
        nbytes: Bytes of the parameters, without padding.
        buffers: New values of the layout's buffers, fp32 on the CPU. Buffers that are left out keep
            their values.
    """

    version: int
    layout_hash: str
    digest: int
    nbytes: int
    buffers: dict[str, Tensor] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True, kw_only=True)
class UpdateReceipt:
    """The version that an engine has verified, or after a commit, the version that it serves.

    Attributes:
        version: Number of the version.
        digest: Digest that was read back; None for pages that were aliased without a digest.
        seconds: Duration of the verification or the commit.
    """

    version: int
    digest: int | None
    seconds: float
