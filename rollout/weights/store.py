"""The weight store: one arena under tag `weights`, laid out for the engine's own kernels."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from types import MappingProxyType

import torch
from torch import Tensor

from memsaver import MemorySaver
from memsaver.ops.layout import round_up
from memsaver.ops.rows import dot
from rollout.tag_names import WEIGHTS
from rollout.weights.messages import Manifest, ModuleTensor, ParamSlice
from rollout.weights.pages import WeightPages, shorten
from rollout.weights.params import FilePiece, Param, ParamGroup, Stored, spellings

ALIGNMENT = 256  # bytes: whole cache lines, and enough for the vector loads of every kernel


def arena_nbytes(groups: Sequence[ParamGroup], dtype: torch.dtype) -> int:
    """Return the bytes of an arena for the groups, each of which is aligned."""
    return sum(round_up(_elements(group.params) * dtype.itemsize, ALIGNMENT) for group in groups)


def _elements(parts: Iterable[Param | FilePiece]) -> int:
    return sum(math.prod(part.shape) for part in parts)


def build_manifest(
    groups: Sequence[ParamGroup], aliases: dict[str, str], dtype: torch.dtype, base: int = 0
) -> Manifest:
    """Lay the groups out in a tag's arena, from byte `base` on, without touching memory.

    `aliases` has the stored name by tied name. `base` is a multiple of ALIGNMENT.
    """
    assert base % ALIGNMENT == 0
    slices: list[ParamSlice] = []
    modules: dict[str, ModuleTensor] = {}
    zeros: list[tuple[int, int]] = []
    place = partial(ModuleTensor, dtype=str(dtype).removeprefix("torch."))
    offset, index = base, 0
    for group in groups:
        first = offset = round_up(offset, ALIGNMENT)
        for param in group.params:
            stored = place(offset=offset, shape=param.shape)
            slices += _slices(param, stored, index)
            if padding := stored.nbytes - _elements(param.pieces) * dtype.itemsize:
                zeros.append((stored.end - padding, padding))  # dimension 0 only, so at the end
            if len(param.pieces) != 1 or param.pieces[0].shape != param.shape:
                modules[param.name] = stored
            offset = stored.end
            index += math.prod(param.whole)
        if group.fused is not None:
            rows = sum(param.shape[0] for param in group.params)
            modules[group.fused] = place(offset=first, shape=(rows, *group.params[0].shape[1:]))
    return Manifest(
        nbytes=offset,
        slices=tuple(slices),
        aliases=dict(aliases),
        modules=modules,
        zeros=tuple(zeros),
    )


def _slices(param: Param, stored: ModuleTensor, index: int) -> list[ParamSlice]:
    return [
        ParamSlice(
            name=param.name,
            offset=stored.offset + dot(piece.at, stored.strides) * stored.torch_dtype.itemsize,
            shape=piece.shape,
            dtype=stored.dtype,
            global_shape=param.whole,
            start=piece.start,
            index_base=index,
            strides=stored.strides,
        )
        for piece in param.pieces
    ]


class WeightStore(WeightPages):
    """The native engine's weights, in an arena that the store owns.

    Views that `tensor` returns keep their addresses over pause and resume, but not their content.
    """

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        aliases: dict[str, str],
        dtype: torch.dtype,
        saver: MemorySaver,
        arena: Tensor | None = None,
        base: int | None = None,
        buffers: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    ) -> None:
        """Allocate the arena, unless it is given; the weights are undefined.

        Arenas that share a manifest have one `base`, that of the first; see `WeightPages`.
        `aliases` has the stored name by tied name. `buffers` has the shapes by name of tensors
        other than parameters that files contain. They are fp32, outside of the tag, and zero until
        they are read.
        """
        if arena is None:
            arena = saver.empty((arena_nbytes(groups, dtype),), torch.uint8, tag=WEIGHTS)
        params = chain.from_iterable(group.params for group in groups)
        shapes = {param.name: param.whole for param in params}
        first = saver.offset_of(arena) if base is None else base
        manifest = build_manifest(groups, aliases, dtype, first)
        super().__init__(manifest, shapes, arena, saver, base)
        self._slices: dict[str, list[ParamSlice]] = {name: [] for name in self.shapes}
        for piece in self.manifest.slices:
            self._slices[piece.name].append(piece)
        self.buffers = {
            name: torch.zeros(shape, dtype=torch.float32, device=saver.device)
            for name, shape in buffers.items()
        }

    def tensor(self, name: str) -> Tensor:
        """Return a view of a parameter (also by a tied name) or of a fused tensor."""
        name = self.manifest.aliases.get(name, name)
        return self.box(self.manifest.modules.get(name) or self._slices[name][0])

    def products(self, groups: Sequence[ParamGroup]) -> list[tuple[Tensor, Tensor | None]]:
        """Return one weight [N, K] of each shape among `groups`, and the bias [N] added to it."""
        names = dict.fromkeys(group.fused or group.params[0].name for group in groups)
        products: dict[tuple[tuple[int, ...], bool], tuple[Tensor, Tensor | None]] = {}
        for name in names:
            weight, bias = self.tensor(name), name.removesuffix("weight") + "bias"
            if weight.ndim == 2 and name.endswith("weight"):
                added = self.tensor(bias) if bias in names else None
                products.setdefault((tuple(weight.shape), added is None), (weight, added))
        return list(products.values())

    def load(self, tensors: Iterable[tuple[str, Tensor]], source: str) -> None:
        """Copy this rank's part of a checkpoint into the slices and define it as version 0.

        A ValueError names missing, unexpected or wrongly shaped parameters of `source`, and leaves
        the weights undefined.
        """
        self.undefine(f"loading from {source} did not finish")
        known = dict(self._in_files())
        loaded: Counter[str] = Counter()
        unexpected: list[str] = []
        for name, tensor in tensors:
            match = known.get(self.manifest.aliases.get(name, name))
            if name in self.buffers:
                self.set_buffers({name: tensor}, source)
                loaded[name] += tensor.numel()
            elif match is None:
                unexpected.append(name)
            if match is None:
                continue
            target, stored = match
            if tuple(tensor.shape) != stored.shape:
                text = f"{name} has shape {tuple(tensor.shape)}, config.json asks for"
                raise ValueError(f"{source}: {text} {stored.shape}")
            if stored.name == name:  # a copy by a tied name is equal, or the model is not tied
                for piece in self._slices[target]:
                    self._copy(piece, stored, tensor)
                loaded[target] += stored.volume
        sizes = {name: math.prod(shape) for name, shape in self.shapes.items()}
        sizes |= {name: buffer.numel() for name, buffer in self.buffers.items()}
        missing = [name for name, size in sizes.items() if loaded[name] != size]
        if missing or unexpected:
            raise ValueError(
                f"{source} does not fit config.json: missing {shorten(missing)}, "
                f"unexpected {shorten(unexpected)}"
            )
        self.define(0)

    def _in_files(self) -> Iterator[tuple[str, tuple[str, Stored]]]:
        """Yield every name that a file may contain, with its parameter and part."""
        for name, shape in self.shapes.items():
            for stored in chain.from_iterable(spellings(name, shape)):
                yield stored.name, (name, stored)

    def _copy(self, piece: ParamSlice, stored: Stored, tensor: Tensor) -> None:
        """Copy the part of a checkpoint tensor that belongs to this slice."""
        source, target = [], []
        bounds = zip(piece.start, piece.shape, stored.start, stored.box, strict=True)
        for first, size, begin, length in bounds:
            low, high = max(first, begin), min(first + size, begin + length)
            if low >= high:
                return
            source.append(slice(low - begin, high - begin))
            target.append(slice(low - first, high - first))
        self.box(piece)[tuple(target)].copy_(tensor.view(stored.box)[tuple(source)])
