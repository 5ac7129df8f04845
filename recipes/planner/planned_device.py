"""Device without memory: tensors have shapes and no content, and allocations are only counted.

`PlannedDevice` tracks the storages of a process. Attention runs the operations of a GPU, because
the tensors that it saves for the backward pass count.

Private names of torch, the same from 2.11 to 2.15:

* `torch.utils._python_dispatch.TorchDispatchMode` sees every operation; it is documented under this
  name only. `_should_skip_dynamo` saves time.
* `Tensor._make_subclass` builds a tensor that shares a storage and reports another device;
  a tensor of `_make_wrapper_subclass` has no storage that FSDP could resize.
* `torch._C._disabled_torch_function_impl` is the documented way to a subclass without
  `__torch_function__`.
* `torch._C._get_dispatch_mode` and `_TorchDispatchModeKey` tell whether DTensor computes a shape.
* `torch._C._current_graph_task_id` tells whether an operation belongs to a backward pass.
* `OpOverload._schema` describes the arguments and results of an operation.
"""

import functools
import weakref
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from memsaver.memory import CachingAllocator
from memsaver.ops.layout import round_up
from memsaver.system.replaced import having
from trainer_bridge.models import packed_attention

PAGE = 2 << 20
_CPU, _META = torch.device("cpu"), torch.device("meta")
_DEVICE_OF = torch.ops.prim.device.default
_dispatch_mode, _FAKE = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE
_MULTIPLIES = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")


class PlannedTensor(Tensor):
    """A tensor of the planned device, which reports the CPU as its device.

    Operations on it compute shapes only.

    Attributes:
        bare: Meta tensor with the same shape, which shares the storage.
    """

    bare: Tensor

    @staticmethod
    def __new__(cls, bare: Tensor) -> Self:
        """Build a planned tensor with the shape and the storage of `bare`."""
        tensor = torch.Tensor._make_subclass(
            cls, bare, False, dispatch_device=True, device_for_backend_keys=_CPU
        )
        tensor.bare = bare
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    device = _CPU  # Read too often to dispatch each access.

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is _DEVICE_OF:
            return _CPU
        raise RuntimeError(f"{func} of a planned tensor outside of its PlannedDevice")


_PLAIN = {PlannedTensor, Tensor, nn.Parameter, nn.Buffer}

_Result = TypeVar("_Result")
_Request = tuple[Hashable, int, int]
"""A name, the bytes that it holds from now on, and the stream that requests them."""
_EMPTY: _Request = ("torch's cache is emptied", 0, 0)
_THREADS = ("forward", "backward")  # Threads that multiply matrices.


class _PlannedStorage(torch.UntypedStorage):
    """Storage of planned tensors, which reports resizes: FSDP resizes without an operation."""

    planned: "PlannedDevice"
    key: int | None

    def resize_(self, nbytes: int) -> Any:
        resized = super().resize_(nbytes)
        self.planned.resized(self)
        return resized


class PlannedDevice(TorchDispatchMode):
    """Dispatch mode that sends the allocations of operations to a `CachingAllocator`.

    Each thread that multiplies matrices takes a workspace of cuBLAS of `workspace_bytes`. Without
    `caches`, as on a CPU, freed memory is not kept.

    Attributes:
        allocator: Model of torch's allocator.
        emptied: How often torch's cache was emptied.
        host_bytes: Bytes allocated on the host until the process ends.
    """

    def __init__(self, workspace_bytes: int, caches: bool = True) -> None:
        super().__init__()
        self._caches = caches
        self.allocator = CachingAllocator()
        self.emptied = 0
        self.host_bytes = 0
        self._tag: CachingAllocator | None = None  # Tag of new storages; None: torch's own memory.
        self._workspace = workspace_bytes
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._keys = 0
        self._streams: dict[int, int] = {}
        self._held: dict[Hashable, int] = {}  # bytes by name
        self._tags: dict[Hashable, CachingAllocator] = {}  # by name of what lies on a tag
        self._requests: list[_Request] = []  # all requests, in order
        self._computed: dict[Hashable, tuple[Any, list[_Request]]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled here, and the check would take a tenth of the time."""
        return False

    def empty_cache(self) -> None:
        """Return cached blocks and cuBLAS's workspaces to the driver."""
        for thread in _THREADS:
            self._hold(thread, 0)
        self._requests.append(_EMPTY)
        self.allocator.empty_cache()
        self.emptied += 1

    def once(self, key: Hashable, compute: Callable[[], _Result]) -> _Result:
        """Run a computation once; later calls with its key repeat its memory requests only.

        A computation must allocate the same sizes each time and keep no tensors.
        """
        if key not in self._computed:
            begin = len(self._requests)
            self._computed[key] = compute(), self._requests[begin:]
            return cast(_Result, self._computed[key][0])
        result, requests = self._computed[key]
        for request in requests:
            if request is _EMPTY:
                self._requests.append(_EMPTY)
                self.allocator.empty_cache()
            else:
                self._hold(*request)
        return cast(_Result, result)

    def clear(self) -> None:
        """Release everything, as on a new device."""
        self.allocator = CachingAllocator()
        self._held.clear()

    def placing(self, tag: CachingAllocator) -> AbstractContextManager[None]:
        """Place allocations inside the block on a tag."""
        return having(self, _tag=tag)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE_OF:
            return _CPU
        if _dispatch_mode(_FAKE) is not None:  # DTensor computes a shape.
            return func(*args, **(kwargs or {}))
        if not _PLAIN.issuperset(types):  # A DTensor: its shards are dispatched next.
            many = _takes_lists(func) and len(args[0]) > 1
            return self._one_by_one(func, args, kwargs or {}) if many else NotImplemented
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0  # No control flow depends on the number.
        if _multiplies(func):
            self._take_workspace()
        out = self._compute(func, args, kwargs or {})
        if func in _WITH_SCRATCH:
            self._pass_by(_scratch(func, args))
        return out

    def _compute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Compute the shapes of an operation's results and track their storages."""
        if func is torch.ops.aten.lift_fresh.default:  # from torch.tensor(numbers)
            return self._planned(_shape_of(args[0]), {})
        inputs = _Arguments()
        args = inputs.bare(args)
        kwargs = {name: inputs.bare(value) for name, value in kwargs.items()}
        device = kwargs.get("device")
        if device is not None or (not inputs.any and _takes_device(func)):
            kwargs["device"] = _META
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            # On meta tensors, this operation supports bf16 only.
            out = func(args[0].bfloat16(), args[1].bfloat16(), *args[2:]).to(args[0].dtype)
        else:
            out = _result_of(func, args, kwargs)
        on_meta = inputs.meta and not inputs.planned if device is None else device.type == "meta"
        return out if on_meta else self._planned(out, inputs.planned)

    def _planned(self, out: Any, planned: dict[int, PlannedTensor]) -> Any:
        """Replace the meta tensors of a result by planned tensors, and arguments by themselves."""
        if isinstance(out, Tensor):
            if (tensor := planned.get(id(out))) is not None:
                return tensor
            self._follow(out.untyped_storage())
            return PlannedTensor(out)
        if isinstance(out, list | tuple):
            return type(out)(self._planned(part, planned) for part in out)
        return out

    def _follow(self, storage: Any) -> None:
        if type(storage) is _PlannedStorage:
            return
        storage.__class__ = _PlannedStorage
        storage.planned, storage.key = self, None
        self._keys += 1
        storage.key = key = self._keys
        if self._tag is not None:
            self._tags[key] = self._tag

        def gone(_: Any) -> None:
            del self._storages[key]
            self._hold(key, 0)

        self._storages[key] = weakref.ref(storage, gone)
        self.resized(storage)

    def resized(self, storage: Any) -> None:
        """Replace the allocation of a storage by one of its present size."""
        if storage.key is not None:
            self._hold(storage.key, storage.nbytes(), self._stream())

    def _hold(self, key: Hashable, nbytes: int, stream: int = 0) -> None:
        """Replace the bytes that a name holds; 0 releases them."""
        self._requests.append((key, nbytes, stream))  # A repetition may find it released.
        before = self._held.get(key, 0)
        if nbytes == before:
            return
        self._held[key] = nbytes
        allocator = self._tags.get(key, self.allocator)
        if before:
            allocator.free(key)
            if not self._caches and allocator is self.allocator:
                allocator.empty_cache()
        if nbytes:
            allocator.allocate(key, nbytes, stream)
        else:
            del self._held[key]

    def _one_by_one(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Compute an operation over lists of DTensors tensor by tensor.

        For whole lists, DTensor's rules take quadratic time in the number of tensors.
        """
        with self:
            parts = [func(*_of_one(args, place), **kwargs) for place in range(len(args[0]))]
        return None if parts[0] is None else list(chain.from_iterable(parts))

    def _take_workspace(self) -> None:
        if self._workspace:  # The backward pass has its own thread, so its own workspace.
            self._hold(_THREADS[_in_backward()], self._workspace, self._stream())

    def _pass_by(self, sizes: list[int]) -> None:
        for number, size in enumerate(sizes):
            self._hold(("scratch", number), size, self._stream())
        for number, _ in enumerate(sizes):
            self._hold(("scratch", number), 0)

    def _stream(self) -> int:
        return self._streams.setdefault(id(torch.cpu.current_stream()), len(self._streams))


class _Arguments:
    """The tensors among an operation's arguments.

    Attributes:
        any: Whether there is a tensor.
        meta: Whether there is a meta tensor that is not a planned tensor's.
        planned: Planned tensors by the id of their meta tensors.
    """

    def __init__(self) -> None:
        self.any = self.meta = False
        self.planned: dict[int, PlannedTensor] = {}

    def bare(self, value: Any) -> Any:
        """Replace tensors by meta tensors of the same shape."""
        if type(value) is PlannedTensor:
            self.any = True
            self.planned[id(value.bare)] = value
            return value.bare
        if isinstance(value, list | tuple):
            return type(value)(map(self.bare, value))
        if isinstance(value, Tensor):
            self.any = True
            if value.is_meta:
                self.meta = True
            elif value.dim():  # Meta tensors and a CPU scalar may be mixed.
                return _shape_of(value)
        return value


def _shape_of(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)


_WITH_SCRATCH = {
    torch.ops.aten._scaled_dot_product_flash_attention_backward.default,
    torch.ops.aten._flash_attention_backward.default,
}


def _scratch(func: Any, args: Any) -> list[int]:
    """Return the bytes of temporary buffers of FlashAttention's backward pass."""
    if func is torch.ops.aten._flash_attention_backward.default:
        sequences = len(args[6]) - 1
        total, heads, _ = args[1].shape
        rows = total + 128 * sequences
    else:
        batch, heads, length, _ = args[1].shape
        rows = batch * round_up(length, 128)
    query, key = args[1], args[2]
    # dQ in fp32, row sums, and dK and dV for every query head.
    sizes = [4 * rows * heads * round_up(query.shape[-1], 32), 4 * heads * rows]
    if key.numel() != query.numel():
        sizes += 2 * [query.numel() * query.element_size()]
    return sizes


_SHAPES: dict[Any, Any] = {}


def _result_of(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute an operation on meta tensors, with a cache for operations that build a tensor.

    Layers and micro batches repeat the same shapes, most of which torch computes in Python.
    """
    if not _makes_tensor(func):
        return func(*args, **kwargs)
    key = func, torch.get_default_dtype(), _shapes(args), _shapes(kwargs.values()), *kwargs
    if (shape := _SHAPES.get(key)) is None:
        out = func(*args, **kwargs)
        if type(out.untyped_storage()) is not _PlannedStorage:  # else an undeclared view
            _SHAPES[key] = out.shape, out.stride(), out.dtype
        return out
    size, stride, dtype = shape
    return torch.empty_strided(size, stride, dtype=dtype, device=_META)


def _shapes(values: Any) -> Hashable:
    return tuple(map(_shape, values))


def _shape(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.is_meta
    if isinstance(value, list | tuple):
        return _shapes(value)
    return type(value), value


@functools.cache
def _makes_tensor(func: Any) -> bool:
    """Return whether an operation builds one new tensor and changes no argument."""
    schema = func._schema
    returns = schema.returns
    single = len(returns) == 1 and isinstance(returns[0].type, torch.TensorType)
    return single and not schema.is_mutable and returns[0].alias_info is None


@functools.cache
def _multiplies(func: Any) -> bool:
    return func.overloadpacket.__name__ in _MULTIPLIES


@functools.cache
def _takes_lists(func: Any) -> bool:
    return func.overloadpacket.__name__.startswith(("_foreach_", "_fused_"))


def _of_one(args: Any, place: int) -> list[Any]:
    """Return the arguments with every list cut to the element at `place`."""
    return [value[place : place + 1] if isinstance(value, list) else value for value in args]


@functools.cache
def _takes_device(func: Any) -> bool:
    return any(argument.name == "device" for argument in func._schema.arguments)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


ATTENTION = "planned"
PACKED_ATTENTION = "planned_packed"


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: Any = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention with the operations that torch would run on a GPU.

    This is FlashAttention where torch supports it, else the plain formula. For FlashAttention,
    values that are narrower than their keys (latent attention) are padded. `query` is [B, H, L, D],
    `key` [B, H of keys, L, D] and `value` [B, H of keys, L, D of values]; `scaling` is the factor
    of the scores. The output is [B, L, H, D of values], without weights.
    """
    if query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] <= 256:
        width = value.shape[-1]
        if width != query.shape[-1]:
            value = torch.nn.functional.pad(value, (0, query.shape[-1] - width))
        out = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, True, scale=scaling
        )[0]
        out = out[..., :width]
    else:
        with sdpa_kernel(SDPBackend.MATH):
            out = torch.nn.functional.scaled_dot_product_attention(
                query,
                key,
                value,
                is_causal=True,
                scale=scaling,
                enable_gqa=query.shape[1] != key.shape[1],
            )
    return out.transpose(1, 2).contiguous(), None


def planned_packed_attention(*args: Any, **how: Any) -> tuple[Tensor, None]:
    """Run the trainer's `packed_attention` with the operations of a GPU."""
    with sdpa_kernel(SDPBackend.MATH):
        return packed_attention(*args, flash=True, **how)


def register_attention() -> None:
    """Register `attention` and `planned_packed_attention` with transformers.

    Their names are `ATTENTION` and `PACKED_ATTENTION`. Models that use them build no masks.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attention)
    ALL_ATTENTION_FUNCTIONS.register(PACKED_ATTENTION, planned_packed_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, lambda *args, **kwargs: None)
