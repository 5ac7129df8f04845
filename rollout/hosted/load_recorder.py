"""Record where a model's own `load_weights` puts checkpoint tensors, and build a manifest from it.

The loader is fed tensors without memory (device "meta"). Views of them keep their storage, so that
a view's offset and strides tell which elements it shows. Copies into the model are recorded, but
not executed, so that the model does not change and may even sleep. Any operation on the model other
than a copy of such a view is refused, naming the parameter. The manifest consists of boxes of whole
parameters, at bytes of a tag.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, pairwise, product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from memsaver.ops.layout import row_major
from memsaver.ops.rows import dot
from rollout.model import spellings
from rollout.weights.messages import Manifest, ParamSlice
from rollout.weights.pages import shorten

_MOST_BOXES = 4096  # per copy; a layout with more boxes is not worth writing into
Ints = tuple[int, ...]
Part = tuple[str, Ints, Ints]
"""A parameter's name, and start and shape of a box of it."""
aten = torch.ops.aten
_COPIES = (aten.copy_.default, aten._foreach_copy_.default)
_FILLS = (aten.fill_.Scalar, aten.zero_.default)
# Operations that keep the elements, in another place or dtype.
_SAME = (aten._to_copy.default, aten.clone.default, aten.contiguous.default)
_REMEDY = "load a checkpoint whose tensors are copied as they are, or use engine.kind=native"
Load = Callable[[Iterable[tuple[str, Tensor]]], Any]


def manifest_of(
    recording: Recording,
    shapes: Mapping[str, Ints],
    aliases: Mapping[str, str],
    offset_of: Callable[[int], int],
) -> Manifest:
    """Build the manifest of a recording; `check_taken` and `check_filled` validate it.

    `shapes` are those of the checkpoint's whole parameters, tied ones once. `aliases` has the
    stored name by tied name. `offset_of` maps an address to its byte in the tag's arena.
    """
    firsts = accumulate(map(math.prod, shapes.values()), initial=0)
    numbers = dict(zip(shapes, firsts, strict=False))
    slices: list[ParamSlice] = []
    for landed in _joined(copy for copy in recording.landed if copy.name in shapes):
        slices += (
            ParamSlice(
                name=landed.name,
                offset=offset_of(landed.address) + box.offset * landed.dtype.itemsize,
                shape=box.shape,
                dtype=str(landed.dtype).removeprefix("torch."),
                global_shape=shapes[landed.name],
                start=box.start,
                index_base=numbers[landed.name],
                strides=box.steps,
            )
            for box in boxes(landed, shapes[landed.name])
        )
    zeros = tuple((offset_of(address), nbytes) for address, nbytes in recording.zeros)
    ends = chain((piece.end for piece in slices), map(sum, zeros))
    return Manifest(
        nbytes=max(ends), slices=tuple(slices), aliases=dict(aliases), modules={}, zeros=zeros
    )


def _joined(copies: Iterable[Landed]) -> Iterator[Landed]:
    """Join copies of experts that were loaded one by one and lie at equal distances."""
    groups: dict[Landed, list[Landed]] = defaultdict(list)
    for landed in copies:
        groups[replace(landed, first=0, address=0)].append(landed)
    for alike in groups.values():
        alike.sort(key=lambda landed: landed.first)
        apart = {(b.first - a.first, b.address - a.address) for a, b in pairwise(alike)}
        stride, step = apart.pop() if len(apart) == 1 else (0, 0)
        if min(stride, step) <= 0:
            yield from alike
            continue
        first = alike[0]
        yield replace(
            first,
            shape=(len(alike), *first.shape),
            strides=(stride, *first.strides),
            steps=(step // first.dtype.itemsize, *first.steps),
        )


def parts(manifest: Manifest) -> list[Part]:
    """Return the boxes of the checkpoint that an engine has."""
    return [(piece.name, piece.start, piece.shape) for piece in manifest.slices]


def check_taken(ranks: Sequence[Sequence[Part]], shapes: Mapping[str, Ints]) -> None:
    """Check that the ranks together take every element of every parameter exactly once.

    `ranks` has the `parts` of each rank that shares the model. Several ranks may have the same box,
    but no rank may have a box twice. A ValueError names parameters of which too few or too many
    elements are taken.
    """
    union = Counter[Part]()
    for boxes_of_rank in ranks:
        union |= Counter(boxes_of_rank)
    taken = Counter[str]()
    for (name, _, shape), times in union.items():
        taken[name] += times * math.prod(shape)
    wrong = [name for name, shape in shapes.items() if taken[name] != math.prod(shape)]
    if wrong:
        first = wrong[0]
        text = f"takes {taken[first]} of the {math.prod(shapes[first])} elements of {first}"
        raise ValueError(
            f"the engine's own loader {text} (and {len(wrong) - 1} other parameters do not match "
            f"either): such a model cannot be written in place; use engine.kind=native"
        )


def check_filled(recording: Recording, model: nn.Module) -> None:
    """Raise a ValueError naming parameters of the model that the loader does not fill entirely."""
    starts = sorted({tensor.data_ptr() for tensor in chain(model.parameters(), model.buffers())})
    filled = Counter[int]()
    for address, nbytes in chain(recording.zeros, map(_place, recording.landed)):
        filled[starts[bisect_right(starts, address) - 1]] += nbytes
    short = [name for name, p in model.named_parameters() if filled[p.data_ptr()] != p.nbytes]
    if short:
        raise ValueError(
            f"no tensor of the checkpoint fills all of {shorten(short)}: the engine computes it "
            f"from other tensors; use an unquantized model, or engine.kind=native"
        )


def whole(recording: Recording, model: nn.Module, shapes: Mapping[str, Ints]) -> dict[str, Tensor]:
    """Return the parameters or buffers of the model that whole checkpoint tensors fill.

    `shapes` are those of the checkpoint tensors, by name. A ValueError names a checkpoint tensor
    that does not fill a whole tensor of the model.
    """
    own = {tensor.data_ptr(): tensor for tensor in chain(model.parameters(), model.buffers())}
    filled: dict[str, Tensor] = {}
    for landed in recording.landed:
        if (shape := shapes.get(landed.name)) is None:
            continue
        tensor = own.get(landed.address)
        if tensor is None or not tuple(tensor.shape) == landed.shape == shape:
            raise ValueError(
                f"{landed.name}: the engine's own loader does not put it into a tensor of shape "
                f"{shape}; use engine.kind=native"
            )
        filled[landed.name] = tensor.detach()
    return filled


def _place(landed: Landed) -> tuple[int, int]:
    return landed.address, math.prod(landed.shape) * landed.dtype.itemsize


class LoadedBox(NamedTuple):
    """A box of a whole parameter, and where its elements lie in the model."""

    start: Ints  # index of its first element in the parameter
    shape: Ints
    offset: int  # distance of its first element from the copy's first in the model, in elements
    steps: Ints  # strides in the model, in elements, one per dimension


class _Walk(NamedTuple):
    """Elements at equal distances, both in the parameter and in the model."""

    dim: int  # the parameter's dimension along which they lie; -1: none
    size: int  # number of elements
    stride: int  # their distance in the parameter, in elements
    step: int  # their distance in the model, in elements


def boxes(landed: Landed, whole: Ints) -> Iterator[LoadedBox]:
    """Yield a copy as boxes of a parameter of shape `whole`; a ValueError refuses other copies."""
    if 0 in landed.shape:
        return
    plain, sizes, steps, loops = row_major(whole), [1] * len(whole), dict[int, int](), list[_Walk]()
    for walk in sorted(_walks(landed, whole), key=lambda walk: walk.stride):
        size = sizes[walk.dim]
        follows = walk.dim >= 0 and walk.stride == plain[walk.dim] * size
        if follows and walk.step == steps.setdefault(walk.dim, walk.step) * size:
            sizes[walk.dim] *= walk.size
        else:
            loops.append(walk)
    if steps.get(len(whole) - 1, 1) != 1 or math.prod(loop.size for loop in loops) > _MOST_BOXES:
        raise _no_slice(landed)
    inner = row_major(sizes)
    within = tuple(steps.get(dim, inner[dim]) for dim in range(len(whole)))
    for numbers in product(*(range(loop.size) for loop in loops)):
        first = landed.first + dot(numbers, [loop.stride for loop in loops])
        start = tuple(int(at) for at in np.unravel_index(first, whole))
        if any(at + size > n for at, size, n in zip(start, sizes, whole, strict=True)):
            raise _no_slice(landed)
        yield LoadedBox(start, tuple(sizes), dot(numbers, [loop.step for loop in loops]), within)


def _walks(landed: Landed, whole: Ints) -> Iterator[_Walk]:
    """Yield a copy's dimensions, split where one spans several dimensions of the parameter."""
    for count, stride, step in zip(landed.shape, landed.strides, landed.steps, strict=True):
        if count != 1 and min(stride, step) < 1:
            raise _no_slice(landed)
        for dim, along in reversed(list(enumerate(row_major(whole)))):
            apart, rest = divmod(stride, along)
            if count == 1 or apart >= whole[dim]:
                continue
            here = count if (count - 1) * apart < whole[dim] else whole[dim] // apart
            if rest or count % here:
                break
            yield _Walk(dim, here, stride, step)
            count, stride, step = count // here, stride * here, step * here
        if count != 1:
            yield _Walk(-1, count, stride, step)


def _no_slice(landed: Landed) -> ValueError:
    text = f"its loader transposes, repeats or reorders it ({landed})"
    return ValueError(f"{landed.name}: {text}; use engine.kind=native")


@dataclass(frozen=True, kw_only=True)
class Landed:
    """A copy of elements of one checkpoint tensor into the model."""

    name: str  # of the checkpoint tensor
    first: int  # number of its first copied element
    shape: tuple[int, ...]  # of the copied elements
    strides: tuple[int, ...]  # in the checkpoint tensor, in elements
    address: int  # of the first element in the model
    steps: tuple[int, ...]  # strides in the model, in elements
    dtype: torch.dtype


@dataclass(kw_only=True)
class Recording:
    """All effects of one `load_weights`: its copies, and (address, bytes) that it zeroes."""

    landed: list[Landed] = field(default_factory=list)
    zeros: list[tuple[int, int]] = field(default_factory=list)


def record(load: Load, model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> Recording:
    """Record what a model's own `load_weights` does with a checkpoint.

    `shapes` are those of the checkpoint's tensors, by the trainer's names. Stacked experts are fed
    one by one, under the names that checkpoints use. A ValueError names a tensor that the loader
    does not just copy, and the remedy.
    """
    recorder = _Recorder(model)
    before = _addresses(model)
    try:
        with torch.no_grad(), recorder:
            load(recorder.tensors(shapes))
    except _Refused as error:
        raise ValueError(f"{recorder.fed}: its loader {error}; {_REMEDY}") from None
    except Exception as error:
        text = f"its loader does more than copy it ({type(error).__name__}: {error})"
        raise ValueError(f"{recorder.fed}: {text}; {_REMEDY}") from error
    after = _addresses(model)
    if moved := sorted(name for name in before | after if before.get(name) != after.get(name)):
        text = f"{moved[0]}: loading puts another tensor in its place ({len(moved)} in total)"
        raise ValueError(f"{text}; {_REMEDY}")
    return recorder.recording


def _addresses(model: nn.Module) -> dict[str, int]:
    return {name: param.data_ptr() for name, param in model.named_parameters()}


class _Refused(Exception):
    """A loader's operation that cannot be recorded."""


class _Recorder(TorchDispatchMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.recording = Recording()
        self.fed = "the first parameter"
        self._names: dict[int, str] = {}  # by storage
        self._kept: list[Tensor] = []  # keeps storages alive, so that their ids stay unique
        self._own = {_storage(param) for param in model.parameters()}
        self._own |= {_storage(buffer) for buffer in model.buffers()}

    def tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
        for name, shape in shapes.items():
            # The dtype does not matter: a copy casts to the dtype of its target.
            tensor = torch.empty(shape, dtype=torch.bfloat16, device="meta")
            self._kept.append(tensor)
            self._names[_storage(tensor)] = self.fed = name
            ways = spellings(name, shape)
            if len(ways) < 3:  # not stacked experts; Mixtral's names are not used
                yield name, tensor
                continue
            for stored in ways[1]:  # transformers stacks experts, checkpoints on the Hub do not
                expert, row, _ = stored.start
                yield stored.name, tensor[expert, row : row + stored.shape[0]]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _COPIES:
            single = func is aten.copy_.default
            pairs = [args[:2]] if single else list(zip(*args[:2], strict=True))
            if any(self._is_own(into) for into, _ in pairs):
                for into, source in pairs:
                    self._land(into, source)
                return args[0] if single else None
        if func in _FILLS and self._is_own(args[0]):
            return self._filled(args[0], args[1] if len(args) > 1 else 0)
        if func in _SAME and self._names.get(_storage(args[0])):
            wanted = kwargs.get("dtype")
            if wanted is None or wanted in (torch.float32, torch.bfloat16, torch.float16):
                return aten.alias.default(args[0])
        for value, argument in zip(args, func._schema.arguments, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and self._is_own(value):
                raise _Refused(f"calls {func} on the model")
        return func(*args, **kwargs)

    def _land(self, into: Tensor, source: Tensor) -> None:
        name = self._names.get(_storage(source))
        if name is None or not self._is_own(into):
            raise _Refused("copies computed values")
        source = source.expand(into.shape)
        self.recording.landed.append(
            Landed(
                name=name,
                first=int(source.storage_offset()),
                shape=tuple(into.shape),
                strides=tuple(source.stride()),
                address=into.data_ptr(),
                steps=tuple(into.stride()),
                dtype=into.dtype,
            )
        )

    def _filled(self, place: Tensor, value: Any) -> Tensor:
        if place.numel() and (value != 0 or not place.is_contiguous()):
            raise _Refused("fills a part of the model")
        if place.numel():
            self.recording.zeros.append((place.data_ptr(), place.nbytes))
        return place

    def _is_own(self, tensor: object) -> bool:
        return isinstance(tensor, Tensor) and _storage(tensor) in self._own


def _storage(tensor: Tensor) -> int:
    """Return an id of a tensor's storage, which may have no memory."""
    return tensor.untyped_storage()._cdata
