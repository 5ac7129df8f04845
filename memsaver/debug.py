"""Debug mode: an operation on a paused tensor raises in Python.

Without it such an operation ends the process on the host (SIGSEGV) and the CUDA context on a GPU.

``PausedGuard`` covers the thread that enables it and what autograd runs for a ``backward`` called there, on whatever
thread; other threads enable it for themselves. It sees everything that goes through torch's dispatcher (operators,
``out=``, foreach, backward, collectives, the local parts of a DTensor), and the methods that read past it
(``repr``, ``tolist``, ``numpy``, ``__array__``, DLPack).

It cannot see what never asks the dispatcher: kernels that get a bare address (Triton and so what ``torch.compile``
generates, ctypes, extensions), the replay of a CUDA graph, a numpy or DLPack view taken before the pause, a list of
tensors as an index; on the CPU ``torch.save`` and pickling.

Cost, measured on one CPU core with ``a.add_(b)`` of four elements, 0.8 us by itself: about 5 us an operation more while
nothing is paused, and about 0.5 us for every further tensor argument. The first operation imports ``torch._dynamo``,
which takes a second or two. Under any mode torch leaves out some fused paths of inference (``TransformerEncoderLayer``,
``MultiheadAttention``), so that results may differ in the last bits.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import overrides
from torch.utils import _python_dispatch, _pytree

from memsaver.errors import StateError

Find = Callable[[int], str | None]


class _Argument(NamedTuple):
    """An argument whose elements an operator touches."""

    position: int
    name: str
    many: bool


class PausedGuard:
    """Raises ``StateError`` before a torch operation touches memory that is paused.

    Args:
        find: the tag of the paused memory an address lies in, else ``None``. Called for each tensor of each operation,
            on any thread: it must be cheap and take no lock. A bound method is held weakly.

    Views, metadata, ``detach``, ``empty_like``, ``set_``, tensors without elements, and deletion touch no memory and
    pass. ``resize_`` does not: growing copies.

    >>> with PausedGuard(find):
    ...     paused + 1
    StateError: aten.add.Tensor uses argument 'self' ([4], torch.float32) on tag 'kv_cache', which is paused; ...
    """

    def __init__(self, find: Find) -> None:
        self._modes = (_Operations(find), _Methods(find))
        self._entered = threading.local()
        weakref.finalize(self, _remove, *self._modes).atexit = False

    def enable(self) -> bool:
        """Guard this thread until ``disable``; ``False`` where it was on."""
        operations, methods = self._modes
        stack = _python_dispatch._get_current_dispatch_mode_stack()
        if operations in stack:
            return False
        # torch's own modes (fake, functional) have places of their own below
        above = [mode for mode in stack if getattr(mode, "_mode_key", None) is None]
        _insert(operations, len(above), _python_dispatch)
        stack = overrides._get_current_function_mode_stack()
        # the default device expects to be at the very bottom
        default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
        _insert(methods, len(stack) - (default is not None and default in stack[:1]), overrides)
        return True

    def disable(self) -> None:
        """Stop guarding this thread."""
        _remove(*self._modes)

    def __enter__(self) -> PausedGuard:
        self._entered.__dict__.setdefault("changed", []).append(self.enable())
        return self

    def __exit__(self, *_: object) -> None:
        if self._entered.changed.pop():
            self.disable()


class _Operations(_python_dispatch.TorchDispatchMode):
    """What the dispatcher runs. Knows from the schema which arguments an operator touches."""

    supports_higher_order_operators = True

    def __init__(self, find: Find) -> None:
        super().__init__()
        self._find = _weakly(find)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(kind is not torch.Tensor for kind in types):  # torch names plain tensors, too, at times
            # A subclass makes its operation out of operations on plain tensors, which come here in turn. Fake ones have
            # no memory, and enter their mode again for each attempt.
            return func(*args, **kwargs) if any(map(_has_no_memory, types)) else NotImplemented
        try:
            touched = _TOUCHED[func]
        except KeyError:
            touched = _TOUCHED[func] = _touched(func)
        if touched is None:
            return self._run_parts(func, args, kwargs)
        for position, name, many in touched:
            value = args[position] if position < len(args) else kwargs.get(name)
            if isinstance(value, torch.Tensor):
                if (tag := paused_tag(value, self._find)) is not None:
                    raise _error(func, f"argument {name!r}", value, tag)
            elif many and value is not None:
                for index, item in enumerate(value):
                    if item is not None and (tag := paused_tag(item, self._find)) is not None:
                        raise _error(func, f"argument '{name}[{index}]'", item, tag)
        return func(*args, **kwargs)

    def _run_parts(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run an operator that is made of others, with the guard on for these (torch took it off for this call)."""
        if not isinstance(func, torch._ops.OpOverload):
            for part in _plain_parts(_pytree.tree_leaves((args, kwargs))):
                if (tag := paused_tag(part, self._find)) is not None:
                    raise _error(func, "a tensor", part, tag)
            return func(*args, **kwargs)
        _python_dispatch._push_mode(self)
        try:
            return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        finally:
            _python_dispatch._pop_mode()


class _Methods(overrides.TorchFunctionMode):
    """The methods that read a tensor without the dispatcher, or with its modes switched off."""

    def __init__(self, find: Find) -> None:
        super().__init__()
        self._find = _weakly(find)

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _PAST_THE_DISPATCHER and not (func is torch.as_tensor and isinstance(args[0], torch.Tensor)):
            for part in _plain_parts(_pytree.tree_leaves(args)):
                if (tag := paused_tag(part, self._find)) is not None:
                    raise _error(_PAST_THE_DISPATCHER[func], "a tensor", part, tag)
        return func(*args, **kwargs) if kwargs else func(*args)


_METHODS = ("__repr__", "__format__", "tolist", "numpy", "__array__", "__dlpack__", "new_tensor")
_PAST_THE_DISPATCHER: dict[object, str] = {getattr(torch.Tensor, name): f"Tensor.{name}" for name in _METHODS}
_PAST_THE_DISPATCHER |= {torch.tensor: "torch.tensor", torch.as_tensor: "torch.as_tensor"}

# Operators that torch does not mark as what they are: they look at sizes and addresses only.
_METADATA = frozenset(
    ("record_stream", "is_pinned", "is_same_size", "is_set_to", "_has_same_storage_numel", "_assert_tensor_metadata")
)

# Filled as operators come by; None: check its parts.
_TOUCHED: dict[object, tuple[_Argument, ...] | None] = {}


def _touched(func: Any) -> tuple[_Argument, ...] | None:
    """The arguments whose elements an operator reads or writes, from its schema."""
    if not isinstance(func, torch._ops.OpOverload):
        return None
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    # Operators made of others come here in inference mode only; elsewhere torch takes them apart first. Whether one
    # copies (reshape, contiguous, to) is known only when it runs.
    if has_kernel(func.name(), "CompositeImplicitAutograd") and not any(
        has_kernel(func.name(), key) for key in ("CPU", "CUDA")
    ):
        return None
    name = func._opname
    aten = func.namespace == "aten"
    if aten and name in _METADATA:
        return ()
    if func.is_view or (torch.Tag.inplace_view in func.tags and not name.startswith("resize")):
        return ()
    factory = aten and (name.startswith(("new_", "empty")) or name.endswith("_like"))  # these read sizes only
    touched = []
    for position, argument in enumerate(func._schema.arguments):
        writes = argument.alias_info is not None and argument.alias_info.is_write
        kind = str(argument.type)
        if "Tensor" in kind and (writes or not factory):
            touched.append(_Argument(position, argument.name, "List" in kind))
    return tuple(touched)


_PAGE = 4096  # the smallest there is


def paused_tag(tensor: torch.Tensor, find: Find) -> str | None:
    """The paused tag whose memory a plain tensor's elements lie in: the first or the last of them decides."""
    try:
        first = tensor.data_ptr()
    except RuntimeError:  # no storage of its own
        return next((tag for part in _parts(tensor) if (tag := paused_tag(part, find)) is not None), None)
    count = tensor.numel()
    if not first or not count:
        return None
    if (tag := find(first)) is not None:
        return tag
    if not tensor.is_contiguous():
        count = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    last = first + count * tensor.itemsize - 1
    return None if (first ^ last) < _PAGE else find(last)  # tags begin and end with a page


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors that a sparse tensor is made of; nothing for other tensors without storage."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()


def _plain_parts(values: Iterable[object]) -> Iterator[torch.Tensor]:
    """The plain tensors among values, and those inside of wrapper subclasses."""
    for value in values:
        if not isinstance(value, torch.Tensor) or _has_no_memory(type(value)):
            continue
        if hasattr(value, "__tensor_flatten__"):
            yield from _plain_parts(getattr(value, name) for name in value.__tensor_flatten__()[0])
        else:
            yield value


def _has_no_memory(kind: type) -> bool:
    return issubclass(kind, torch._subclasses.FakeTensor | torch._subclasses.functional_tensor.FunctionalTensor)


def _error(func: object, argument: str, tensor: torch.Tensor, tag: str) -> StateError:
    return StateError(
        f"{func} uses {argument} ({list(tensor.shape)}, {tensor.dtype}) on tag {tag!r}, which is paused; "
        f"call resume({tag!r}) first"
    )


def _weakly(find: Find) -> Find:
    """A thread keeps its modes for ever; a bound method must not keep its saver alive with them."""
    if not isinstance(find, MethodType):
        return find
    owner, function = weakref.ref(find.__self__), find.__func__

    def call(address: int) -> str | None:
        alive = owner()
        return None if alive is None else function(alive, address)

    return call


# ---------------------------------------------------------------- torch's stacks of modes
# The guard goes to the bottom, as torch.set_default_device does: `with` blocks of other modes pop the top blindly, and
# the bottom sees what the modes above it really run.


def _insert(mode: Any, above: int, stack: Any) -> None:
    """Push a mode below the topmost ones."""
    taken = [stack._pop_mode() for _ in range(above)]
    for item in (mode, *reversed(taken)):
        stack._push_mode(item)


def _remove(operations: Any, methods: Any) -> None:
    """Take the modes of a guard out of this thread's stacks, where they are there."""
    for mode, modes, stack in (
        (operations, _python_dispatch._get_current_dispatch_mode_stack(), _python_dispatch),
        (methods, overrides._get_current_function_mode_stack(), overrides),
    ):
        if mode in modes:
            taken = [stack._pop_mode() for _ in modes[modes.index(mode) :]]
            for item in reversed(taken[:-1]):
                stack._push_mode(item)
