"""Debug mode: a torch operation on paused memory raises in Python, before it runs.

Without it such an operation ends the process on the host (SIGSEGV), or the CUDA context on a GPU.
The guard sees what goes through torch's dispatcher (operators, ``out=``, foreach, backward on any
thread, collectives, the local parts of a DTensor), and the methods that read past it. It cannot see
what never asks torch: kernels that get a bare address (Triton and so what ``torch.compile``
generates, ctypes, extensions), the replay of a CUDA graph, a numpy or DLPack view taken before the
pause, a list of tensors as an index; on the CPU ``torch.save`` and pickling.

It costs about 5 us an operation on one CPU core. Under any mode torch leaves out fused paths of
inference (``TransformerEncoderLayer``, ``MultiheadAttention``): the last bits may differ.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import overrides
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils import _python_dispatch, _pytree

from memsaver.errors import StateError

Find = Callable[[int], str | None]
_NO_MEMORY = FakeTensor, FunctionalTensor
_METHODS = ("__repr__", "__format__", "tolist", "numpy", "__array__", "__dlpack__", "new_tensor")
_PAST_THE_DISPATCHER = {getattr(torch.Tensor, name): f"Tensor.{name}" for name in _METHODS}
_PAST_THE_DISPATCHER |= {torch.tensor: "torch.tensor", torch.as_tensor: "torch.as_tensor"}
# Operators that torch does not mark as what they are: they look at sizes and addresses only.
_METADATA = {"record_stream", "is_pinned", "is_same_size", "is_set_to", "_has_same_storage_numel"}
_METADATA |= {"_assert_tensor_metadata"}
_COO: tuple[str, ...] = ("_indices", "_values")
_BY_ROW, _BY_COLUMN = ("crow_indices", "col_indices"), ("ccol_indices", "row_indices")
_SPARSE = {torch.sparse_coo: _COO}  # the methods that name the parts of a tensor
_SPARSE |= dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), (*_BY_ROW, "values"))
_SPARSE |= dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), (*_BY_COLUMN, "values"))


class PausedGuard:
    """Raises ``StateError`` before a torch operation touches memory that is paused.

    Views, metadata, ``empty_like`` and the like, and tensors without elements touch none and pass.
    ``find`` is a method, held weakly, that tells the tag of the paused memory an address lies in.
    It is called for each tensor of each operation, on any thread, and must take no lock.
    """

    def __init__(self, find: Find) -> None:
        method = weakref.WeakMethod(find)  # a thread keeps its modes: they must not keep a saver
        self._modes = _Operations(method), _Methods(method)
        weakref.finalize(self, _place, self._modes, False).atexit = False

    def enable(self) -> None:
        """Guard this thread, and what autograd runs for it on others, until ``disable``."""
        _place(self._modes, True)

    def disable(self) -> None:
        """Stop guarding this thread."""
        _place(self._modes, False)


def _place(modes: tuple[_Operations, _Methods], on: bool) -> None:
    """Put the modes at the bottom of this thread's stacks, or take them out.

    torch's public ``with`` puts a mode on top, and the end of another mode's ``with`` takes away
    blindly what is on top. Only the device of ``set_default_device`` expects to be the lowest.
    """
    operations = _python_dispatch._get_current_dispatch_mode_stack()
    methods = overrides._get_current_function_mode_stack()
    default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    places: Any = (_python_dispatch, modes[0], operations), (overrides, modes[1], methods)
    for stack, mode, present in places:
        if (mode in present) != on:
            wanted = [other for other in present if other is not mode]
            if on:
                wanted.insert(default is not None and default in wanted[:1], mode)
            for _ in present:
                stack._pop_mode()
            for item in wanted:
                stack._push_mode(item)


class _Operations(_python_dispatch.TorchDispatchMode):
    """The operations that the dispatcher runs."""

    supports_higher_order_operators = True

    def __init__(self, find: weakref.WeakMethod) -> None:
        super().__init__()
        self._find = find

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind is not torch.Tensor for kind in types):  # torch names plain ones, too, at times
            # A subclass makes its operation out of others on plain tensors, which come here in
            # turn. Fake ones have no memory, and would be tried again for ever.
            fake = any(issubclass(kind, _NO_MEMORY) for kind in types)
            return func(*args, **kwargs) if fake else NotImplemented
        if not isinstance(func, torch._ops.OpOverload):
            _check(self._find, func, "", _pytree.tree_leaves((args, kwargs)))
            return func(*args, **kwargs)
        if (touched := _touched(func)) is None:
            with self:  # torch took the guard off for this call; the parts are asked
                return func.decompose(*args, **kwargs)
        for position, name in touched:
            value = args[position] if position < len(args) else kwargs.get(name)
            _check(self._find, func, name, value)
        return func(*args, **kwargs)


class _Methods(overrides.TorchFunctionMode):
    """The methods that read a tensor without the dispatcher, or with its modes switched off."""

    def __init__(self, find: weakref.WeakMethod) -> None:
        self._find = find

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aliases = func is torch.as_tensor and isinstance(args[0], torch.Tensor)
        if func in _PAST_THE_DISPATCHER and not aliases:
            _check(self._find, _PAST_THE_DISPATCHER[func], "", _pytree.tree_leaves(args))
        return func(*args, **(kwargs or {}))


@functools.cache
def _touched(func: Any) -> list[tuple[int, str]] | None:
    """The arguments whose elements an operator reads or writes; None: its parts are to be asked."""
    has_kernel = functools.partial(torch._C._dispatch_has_kernel_for_dispatch_key, func.name())
    if has_kernel("CompositeImplicitAutograd") and not (has_kernel("CPU") or has_kernel("CUDA")):
        return None  # comes here whole in inference mode only; may copy, or not (reshape, to)
    name, aten = func._opname, func.namespace == "aten"
    is_view = func.is_view or torch.Tag.inplace_view in func.tags
    if (is_view and not name.startswith("resize")) or (aten and name in _METADATA):
        return []  # resize_ copies where it grows
    arguments = [(place, each) for place, each in enumerate(func._schema.arguments)]
    if aten and (name.startswith(("new_", "empty")) or name.endswith("_like")):  # read sizes only
        arguments = [(place, each) for place, each in arguments if each.is_out]
    return [(place, each.name) for place, each in arguments if "Tensor" in str(each.type)]


def _check(weak: weakref.WeakMethod, operation: object, name: str, value: Any) -> None:
    """Raise ``StateError`` if a tensor, or one in a list, lies on a paused tag."""
    many, find = isinstance(value, list | tuple), weak()
    for index, item in enumerate(value if many else (value,)):
        if find and isinstance(item, torch.Tensor) and (tag := paused_tag(item, find)) is not None:
            label = f"{name}[{index}]" if many else name
            what = f"argument {label!r}" if name else "a tensor"
            raise StateError(
                f"{operation} uses {what} ({list(item.shape)}, {item.dtype}) on tag {tag!r}, "
                f"which is paused; call resume({tag!r}) first"
            )


def paused_tag(tensor: torch.Tensor, find: Find) -> str | None:
    """The paused tag a tensor's elements lie on: the first or the last of them decides."""
    if parts := _parts(tensor):
        return next((tag for part in parts if (tag := paused_tag(part, find)) is not None), None)
    try:
        first = 0 if isinstance(tensor, _NO_MEMORY) else tensor.data_ptr()
    except RuntimeError:  # no memory of its own
        first = 0
    if not first or not (count := tensor.numel()):
        return None
    if not tensor.is_contiguous():
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        count = 1 + sum((size - 1) * stride for size, stride in steps)
    tag = find(first)
    return find(first + count * tensor.itemsize - 1) if tag is None else tag


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a subclass or a sparse tensor is made of; nothing for others."""
    if type(tensor) is not torch.Tensor and hasattr(tensor, "__tensor_flatten__"):
        return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return [getattr(tensor, name)() for name in _SPARSE.get(tensor.layout, ())]
