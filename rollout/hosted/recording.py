"""Records which elements of which checkpoint tensor a model's own `load_weights` puts where.

The tensors that are fed have no memory (device "meta"): views of them keep their storage, so a
view's offset and strides say which elements it shows. Copies into the model are written down and
not made, so the model may sleep, and stays as it is. What is more than a copy of such a view into
the model is refused, by the name of the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rollout.model import spellings

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


Load = Callable[[Iterable[tuple[str, Tensor]]], Any]


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
