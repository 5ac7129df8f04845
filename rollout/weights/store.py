"""The weight store: one arena under tag `weights`, laid out for the engine's own kernels."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from memsaver.ops.layout import round_up
from memsaver.ops.rows import dot
from rollout.tag_names import WEIGHTS
from rollout.weights.messages import Manifest, ModuleTensor, ParamSlice
from rollout.weights.pages import WeightPages, shorten
from rollout.weights.params import FilePiece, Param, ParamGroup, Stored, is_unused, spellings

if TYPE_CHECKING:
    from memsaver import MemorySaver

ALIGNMENT = 256  # bytes: whole cache lines and the vector loads of every kernel


def _align(nbytes: int) -> int:
    return round_up(nbytes, ALIGNMENT)


def arena_nbytes(groups: Sequence[ParamGroup], dtype: torch.dtype) -> int:
    """Bytes of the arena that holds `groups`, every group aligned."""
    return sum(_align(_elements(group.params) * dtype.itemsize) for group in groups)


def _elements(parts: Iterable[Param | FilePiece]) -> int:
    return sum(math.prod(part.shape) for part in parts)


def build_manifest(
    groups: Sequence[ParamGroup], aliases: dict[str, str], dtype: torch.dtype, base: int = 0
) -> Manifest:
    """Lay `groups` out from byte `base` (a multiple of ALIGNMENT) of the tag's arena.

    Pure: no memory is touched.
    """
    assert base % ALIGNMENT == 0
    slices: list[ParamSlice] = []
    modules: dict[str, ModuleTensor] = {}
    zeros: list[tuple[int, int]] = []
    place = partial(ModuleTensor, dtype=str(dtype).removeprefix("torch."))
    offset, index = base, 0
    for group in groups:
        first = offset = _align(offset)
        for param in group.params:
            stored = place(offset=offset, shape=param.shape)
            slices += _slices(param, stored, index)
            if padding := stored.nbytes - _elements(param.pieces) * dtype.itemsize:
                zeros.append((stored.end - padding, padding))  # only the first dimension has some
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
    """The engine's own weights: owns the arena, laid out for its kernels.

    Views handed out by `tensor` stay valid over pause and resume (same address), not their content.
    """

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        aliases: dict[str, str],
        dtype: torch.dtype,
        saver: "MemorySaver",
        tag: str = WEIGHTS,
        buffers: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    ) -> None:
        """buffers: names and shapes of what is read with the weights and is no parameter: fp32,
        outside of the tag, 0 until it is read.
        """
        arena = saver.empty((arena_nbytes(groups, dtype),), torch.uint8, tag=tag)
        params = chain.from_iterable(group.params for group in groups)
        shapes = {param.name: param.whole for param in params}
        manifest = build_manifest(groups, aliases, dtype, saver.offset_of(arena))
        super().__init__(manifest, shapes, arena, saver)
        self._slices: dict[str, list[ParamSlice]] = {name: [] for name in self.shapes}
        for piece in self.manifest.slices:
            self._slices[piece.name].append(piece)
        self.buffers = {
            name: torch.zeros(shape, dtype=torch.float32, device=saver.device)
            for name, shape in buffers.items()
        }

    def tensor(self, name: str) -> Tensor:
        """View of a parameter as this rank stores it, a tied name or a fused tensor."""
        name = self.manifest.aliases.get(name, name)
        where = self.manifest.modules.get(name) or self._slices[name][0]
        return self.box(where)

    def products(self, groups: Sequence[ParamGroup]) -> list[tuple[Tensor, Tensor | None]]:
        """Return one weight [N, K] of each shape among `groups`, and the bias [N] added to it."""
        names = dict.fromkeys(group.fused or group.params[0].name for group in groups)
        found: dict[tuple[tuple[int, ...], bool], tuple[Tensor, Tensor | None]] = {}
        for name in names:
            weight, bias = self.tensor(name), name.removesuffix("weight") + "bias"
            if weight.ndim == 2 and name.endswith("weight"):
                added = self.tensor(bias) if bias in names else None
                found.setdefault((tuple(weight.shape), added is None), (weight, added))
        return list(found.values())

    def load(self, tensors: Iterable[tuple[str, Tensor]], source: str) -> None:
        """Copy this rank's part of a whole checkpoint into the slices and define them as version 0.

        Raises ValueError naming missing, unexpected or wrongly shaped parameters; the weights are
        undefined then.
        """
        self.undefine(f"loading from {source} did not finish")
        known = dict(self._in_files())
        loaded: Counter[str] = Counter()
        unexpected: list[str] = []
        for name, tensor in tensors:
            found = known.get(self.manifest.aliases.get(name, name))
            if name in self.buffers:
                self.set_buffers({name: tensor}, source)
                loaded[name] += tensor.numel()
            elif found is None and not is_unused(name):
                unexpected.append(name)
            if found is None:
                continue
            target, stored = found
            if tuple(tensor.shape) != stored.shape:
                text = f"{name} has shape {tuple(tensor.shape)}, config.json asks for"
                raise ValueError(f"{source}: {text} {stored.shape}")
            if stored.name == name:  # a tied name's own copy is ignored, as transformers does
                for piece in self._slices[target]:
                    self._copy(piece, stored, tensor)
                loaded[target] += stored.volume
        sizes = {name: math.prod(shape) for name, shape in self.shapes.items()}
        sizes |= {name: each.numel() for name, each in self.buffers.items()}
        missing = [name for name, size in sizes.items() if loaded[name] != size]
        if missing or unexpected:
            raise ValueError(
                f"{source} does not fit config.json: missing {shorten(missing)}, "
                f"unexpected {shorten(unexpected)}"
            )
        self.define(0)

    def _in_files(self) -> Iterator[tuple[str, tuple[str, Stored]]]:
        """Every name that a file may have: the parameter, and which part of it that is."""
        for name, shape in self.shapes.items():
            for stored in chain.from_iterable(spellings(name, shape)):
                yield stored.name, (name, stored)

    def _copy(self, piece: ParamSlice, stored: Stored, tensor: Tensor) -> None:
        """Copies what a tensor of a file has of a slice."""
        source, target = [], []
        bounds = zip(piece.start, piece.shape, stored.start, stored.box, strict=True)
        for first, size, begin, length in bounds:
            low, high = max(first, begin), min(first + size, begin + length)
            if low >= high:
                return
            source.append(slice(low - begin, high - begin))
            target.append(slice(low - first, high - first))
        self.box(piece)[tuple(target)].copy_(tensor.view(stored.box)[tuple(source)])
