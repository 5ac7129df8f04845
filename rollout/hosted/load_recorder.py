"""Records which elements of which checkpoint tensor a model's own `load_weights` puts where, and
makes a manifest of that: boxes of whole parameters, at bytes of a tag.

The tensors that are fed have no memory (device "meta"): views of them keep their storage, so a
view's offset and strides say which elements it shows. Copies into the model are written down and
not made, so the model may sleep, and stays as it is. What is more than a copy of such a view into
the model is refused, by the name of the parameter.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from memsaver.ops.layout import row_major
from rollout.model import spellings
from rollout.weights.messages import Manifest, ParamSlice
from rollout.weights.pages import shorten
from rollout.weights.store import layout_hash

_MOST_BOXES = 4096  # of one copy: what needs more is no layout to write into
Ints = tuple[int, ...]
Part = tuple[str, Ints, Ints]
"""A parameter's name, and start and shape of a box of it."""
aten = torch.ops.aten
_COPIES = (aten.copy_.default, aten._foreach_copy_.default)
_FILLS = (aten.fill_.Scalar, aten.zero_.default)
# the same elements, elsewhere or in another dtype
_SAME = (
    aten._to_copy.default,
    aten.clone.default,
    aten.contiguous.default,
)
_REMEDY = "load a checkpoint whose tensors are copied as they are, or use engine.kind=native"
Load = Callable[[Iterable[tuple[str, Tensor]]], Any]


def manifest_of(
    recording: Recording,
    shapes: Mapping[str, Ints],
    aliases: Mapping[str, str],
    offset_of: Callable[[int], int],
) -> Manifest:
    """shapes: of the checkpoint's parameters, whole, tied ones once. aliases: tied name -> name.
    offset_of: byte of the tag's addresses at an address. See `check_taken` and `check_filled`.
    """
    firsts = accumulate(map(math.prod, shapes.values()), initial=0)
    numbers = dict(zip(shapes, firsts, strict=False))
    slices: list[ParamSlice] = []
    params = [landed for landed in recording.landed if landed.name in shapes]
    for landed in params:
        name = landed.name
        slices += (
            ParamSlice(
                name=name,
                offset=offset_of(landed.address) + box.offset * landed.dtype.itemsize,
                shape=box.shape,
                dtype=str(landed.dtype).removeprefix("torch."),
                global_shape=shapes[name],
                start=box.start,
                index_base=numbers[name],
                strides=None if box.steps == row_major(box.shape) else box.steps,
            )
            for box in boxes(landed, shapes[name])
        )
    slices = list(_joined(slices))
    zeros = tuple((offset_of(address), nbytes) for address, nbytes in recording.zeros)
    ends = [offset_of(_end(landed)) for landed in params]
    nbytes = max(chain(ends, (offset + size for offset, size in zeros)))
    layout = layout_hash(list(map(asdict, slices)), dict(aliases), {}, zeros, nbytes)
    return Manifest(
        nbytes=nbytes,
        slices=tuple(slices),
        aliases=dict(aliases),
        modules={},
        layout_hash=layout,
        zeros=zeros,
    )


def _joined(slices: Sequence[ParamSlice]) -> Iterator[ParamSlice]:
    """Experts that were loaded one by one, and lie at even distances, are one slice."""
    groups: dict[object, list[ParamSlice]] = defaultdict(list)
    for piece in slices:
        groups[piece.name, piece.shape, piece.start[1:], piece.strides].append(piece)
    for alike in groups.values():
        alike.sort(key=lambda piece: piece.start)
        first, count = alike[0], len(alike)
        steps = {b.offset - a.offset for a, b in pairwise(alike)}
        apart = {b.start[0] - a.start[0] for a, b in pairwise(alike)}
        if count == 1 or first.shape[0] != 1 or apart != {1} or len(steps) != 1 or min(steps) <= 0:
            yield from alike
            continue
        shape = (count, *first.shape[1:])
        size: int = getattr(torch, first.dtype).itemsize
        inner = (first.strides or row_major(first.shape))[1:]
        strides = (steps.pop() // size, *inner)
        yield replace(first, shape=shape, strides=None if strides == row_major(shape) else strides)


def _end(landed: Landed) -> int:
    """The address after its last element."""
    pairs = zip(landed.shape, landed.steps, strict=True)
    return landed.address + (sum((n - 1) * s for n, s in pairs) + 1) * landed.dtype.itemsize


def parts(manifest: Manifest) -> list[Part]:
    """Returns what of the checkpoint an engine holds."""
    return [(piece.name, piece.start, piece.shape) for piece in manifest.slices]


def check_taken(ranks: Sequence[Sequence[Part]], shapes: Mapping[str, Ints]) -> None:
    """ranks: `parts` of each that shares the model; they may hold the same, one holds nothing
    twice. ValueError names parameters of which only a part is taken, or more than all.
    """
    seen = Counter[Part]()
    for mine in ranks:
        seen |= Counter(mine)
    taken = Counter[str]()
    for (name, _, shape), times in seen.items():
        taken[name] += times * math.prod(shape)
    wrong = [name for name, shape in shapes.items() if taken[name] != math.prod(shape)]
    if wrong:
        first = wrong[0]
        text = f"takes {taken[first]} of the {math.prod(shapes[first])} elements of {first}"
        raise ValueError(
            f"the engine's own loader {text} (and {len(wrong) - 1} parameters more not as they "
            f"are): such a model cannot be written in place; use engine.kind=native"
        )


def check_filled(recording: Recording, model: nn.Module) -> None:
    """ValueError names parameters of the model, tied ones once, that are not written as a whole."""
    tensors = chain(model.parameters(), model.buffers())
    starts = sorted({tensor.data_ptr() for tensor in tensors})
    filled = Counter[int]()
    for address, nbytes in chain(recording.zeros, map(_place, recording.landed)):
        filled[starts[bisect_right(starts, address) - 1]] += nbytes
    short = [name for name, p in model.named_parameters() if filled[p.data_ptr()] != p.nbytes]
    if short:
        raise ValueError(
            f"no tensor of the checkpoint fills all of {shorten(short)}: the engine computes it "
            f"from others; use an unquantised model, or engine.kind=native"
        )


def whole(recording: Recording, model: nn.Module, shapes: Mapping[str, Ints]) -> dict[str, Tensor]:
    """Return the model's own tensors, parameters or buffers, that the tensors of these shapes fill;
    a ValueError names one that goes elsewhere.
    """
    own = {tensor.data_ptr(): tensor for tensor in chain(model.parameters(), model.buffers())}
    found: dict[str, Tensor] = {}
    for landed in recording.landed:
        if (shape := shapes.get(landed.name)) is None:
            continue
        tensor = own.get(landed.address)
        if tensor is None or not tuple(tensor.shape) == landed.shape == shape:
            raise ValueError(
                f"{landed.name}: the engine's own loader puts it in no tensor of shape {shape}; "
                "use engine.kind=native"
            )
        found[landed.name] = tensor.detach()
    return found


def _place(landed: Landed) -> tuple[int, int]:
    return landed.address, math.prod(landed.shape) * landed.dtype.itemsize


class LoadedBox(NamedTuple):
    """A box of a whole parameter. steps: from element to element in the model, one a dimension;
    offset: of its first one there, in elements from the copy's first.
    """

    start: Ints
    shape: Ints
    offset: int
    steps: Ints


class _Dim(NamedTuple):
    size: int
    stride: int
    step: int


def boxes(landed: Landed, whole: Ints) -> list[LoadedBox]:
    """The copy as boxes of a parameter of shape `whole`; ValueError where it is none."""
    dims = [
        _Dim(*each)
        for each in zip(landed.shape, landed.strides, landed.steps, strict=True)
        if each[0] != 1
    ]
    if 0 in landed.shape:
        return []
    return list(_boxes(landed, dims, whole, landed.first, 0))


def _boxes(
    landed: Landed, dims: Sequence[_Dim], whole: Ints, first: int, offset: int
) -> Iterator[LoadedBox]:
    """Dimensions of a view that are parts of one of the parameter's are joined, or gone through."""
    strides = row_major(whole)
    found: list[_Dim | None] = [None] * len(whole)
    for dim in _split(dims, whole, strides):
        pairs = enumerate(zip(strides, whole, strict=True))
        at = next((i for i, (by, size) in pairs if by == dim.stride and size > 1), None)
        if at is not None and found[at] is None:
            found[at] = dim
            continue
        inner = next((i for i, by in enumerate(strides) if dim.stride % by == 0), 0)
        same = found[inner]
        if same is not None and dim[1:] == (same.stride * same.size, same.step * same.size):
            found[inner] = _Dim(same.size * dim.size, same.stride, same.step)
            continue
        rest = [each for each in dims if each is not dim]
        if dim not in dims or dim.stride <= 0 or dim.size > _MOST_BOXES:
            raise ValueError(
                f"{landed.name}: its loader lays it out in a way that is no slice of it "
                f"({landed}); use engine.kind=native"
            )
        for number in range(dim.size):
            more = first + number * dim.stride, offset + number * dim.step
            yield from _boxes(landed, rest, whole, *more)
        return
    start, left = [], first
    for stride in strides:
        start.append(left // stride)
        left %= stride
    shape = tuple(1 if dim is None else dim.size for dim in found)
    plain = row_major(shape)
    steps = tuple(p if dim is None else dim.step for p, dim in zip(plain, found, strict=True))
    if min(steps, default=1) < 1 or (found and found[-1] is not None and found[-1].step != 1):
        raise ValueError(
            f"{landed.name}: its loader transposes or repeats it; use engine.kind=native"
        )
    yield LoadedBox(tuple(start), shape, offset, steps)


def _split(dims: Sequence[_Dim], whole: Ints, strides: Ints) -> list[_Dim]:
    """Inner dimensions first; one that runs over several of the parameter's is cut at each."""
    cut: list[_Dim] = []
    for dim in sorted(dims, key=lambda each: each.stride):
        for size, stride in reversed(list(zip(whole, strides, strict=True))):
            if dim.stride == stride and dim.size > size > 1 and dim.size % size == 0:
                cut.append(_Dim(size, stride, dim.step))
                dim = _Dim(dim.size // size, stride * size, dim.step * size)
        cut.append(dim)
    return cut


@dataclass(frozen=True, kw_only=True)
class Landed:
    """Elements of one checkpoint tensor that land in the model, as the same box on both sides.

    first, strides: in the checkpoint's tensor, in elements. address: of the first element in the
    model; steps: of the others there, in elements of `dtype`.
    """

    name: str
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    address: int
    steps: tuple[int, ...]
    dtype: torch.dtype


@dataclass(kw_only=True)
class Recording:
    """All that one `load_weights` does. zeros: (address, bytes) that it clears."""

    landed: list[Landed] = field(default_factory=list)
    zeros: list[tuple[int, int]] = field(default_factory=list)


def record(load: Load, model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> Recording:
    """load: the model's own `load_weights`. shapes: of the checkpoint's tensors, by the trainer's
    names; stacked experts are fed one by one, as checkpoints name them.

    Raises ValueError naming what is no plain copy, and with which remedy.
    """
    recorder = _Recorder(model)
    before = _addresses(model)
    try:
        with torch.no_grad(), recorder:
            load(recorder.tensors(shapes))
    except _Refused as error:
        raise ValueError(str(error)) from None
    except Exception as error:
        text = (
            f"{recorder.fed}: its loader does more than copy it ({type(error).__name__}: {error})"
        )
        raise ValueError(f"{text}; {_REMEDY}") from error
    after = _addresses(model)
    if moved := sorted(name for name in before | after if before.get(name) != after.get(name)):
        text = f"{moved[0]}: loading puts another tensor in its place ({len(moved)} in all)"
        raise ValueError(f"{text}; {_REMEDY}")
    return recorder.found


def _addresses(model: nn.Module) -> dict[str, int]:
    return {name: param.data_ptr() for name, param in model.named_parameters()}


class _Refused(Exception):
    """Something that is not written down."""


class _Recorder(TorchDispatchMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.found = Recording()
        self.fed = "the first parameter"
        self._names: dict[int, str] = {}  # of storages
        self._kept: list[Tensor] = []  # so that no storage is made twice at one place
        self._own = {_storage(param) for param in model.parameters()}
        self._own |= {_storage(buffer) for buffer in model.buffers()}

    def tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
        for name, shape in shapes.items():
            # its dtype is nobody's: who copies casts to what is there
            tensor = torch.empty(shape, dtype=torch.bfloat16, device="meta")
            self._kept.append(tensor)
            self._names[_storage(tensor)] = self.fed = name
            yield from _spelled(name, tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _COPIES:
            return self._copied(func, args, kwargs)
        if func in _FILLS and self._is_own(args[0]):
            return self._filled(args[0], args[1] if len(args) > 1 else 0)
        if func in _SAME and self._names.get(_storage(args[0])):
            wanted = kwargs.get("dtype")
            if wanted is None or wanted in (torch.float32, torch.bfloat16, torch.float16):
                return aten.alias.default(args[0])
        for given, said in zip(args, func._schema.arguments, strict=False):
            if said.alias_info is not None and said.alias_info.is_write and self._is_own(given):
                raise _Refused(f"{self.fed}: its loader calls {func} on the model; {_REMEDY}")
        return func(*args, **kwargs)

    def _copied(self, func: Any, args: Sequence[Any], kwargs: Any) -> Any:
        single = func is aten.copy_.default
        pairs = [args[:2]] if single else list(zip(*args[:2], strict=True))
        own = [self._is_own(into) for into, _ in pairs]
        if not any(own):
            return func(*args, **kwargs)
        for into, source in pairs:
            self._land(into, source)
        return args[0] if single else None

    def _land(self, into: Tensor, source: Tensor) -> None:
        name = self._names.get(_storage(source))
        if name is None or not self._is_own(into):
            text = f"{self.fed}: its loader copies what it has computed"
            raise _Refused(f"{text}; {_REMEDY}")
        source = source.expand(into.shape)
        self.found.landed.append(
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
            raise _Refused(f"{self.fed}: its loader fills a part of the model; {_REMEDY}")
        if place.numel():
            self.found.zeros.append((place.data_ptr(), place.nbytes))
        return place

    def _is_own(self, tensor: object) -> bool:
        return isinstance(tensor, Tensor) and _storage(tensor) in self._own


def _storage(tensor: Tensor) -> int:
    """Tells one storage from another, also of tensors without memory."""
    return tensor.untyped_storage()._cdata


def _spelled(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensor as checkpoints on the Hub have it: transformers stacks experts, they do not."""
    ways = spellings(name, tuple(tensor.shape))
    if len(ways[1:]) < 2:  # as it is, but for Mixtral's names
        yield name, tensor
        return
    for stored in ways[1]:
        expert, row, _ = stored.start
        yield stored.name, tensor[expert, row : row + stored.shape[0]]
