"""Operations on fake tensors, and the memory that they would take: torch's allocator and the tags, reckoned as they go.

`PlannedDevice` is where a process's torch memory would be, `PlannedSaver` stands in for its `MemorySaver`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memsaver import Event, Report, Usage
from memsaver.rounding import round_up
from recipes.planner.allocator import CachingAllocator

PAGE = 2 << 20
_MULTIPLIES = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")


class PlannedDevice(TorchDispatchMode):
    """Follows every storage that operations make, resize or drop inside the block."""

    def __init__(self, workspace_bytes: int) -> None:
        """workspace_bytes: of cuBLAS, one for each thread that multiplies."""
        super().__init__()
        self.torch = CachingAllocator()
        self.into: CachingAllocator = self.torch  # of what is made now
        self._workspace = workspace_bytes
        self._workspaces: set[str] = set()
        self._known: dict[int, tuple[int, CachingAllocator, weakref.ref[Any]]] = {}
        self._views: dict[int, weakref.ref[Any]] = {}
        self._streams: dict[int, int] = {}
        self._count = 0

    def empty_cache(self) -> None:
        for name in self._workspaces:
            self.torch.free(name)
        self._workspaces.clear()
        self.torch.empty_cache()

    @contextlib.contextmanager
    def placing(self, where: CachingAllocator) -> Iterator[None]:
        before, self.into = self.into, where
        try:
            yield
        finally:
            self.into = before

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """FSDP frees and takes unsharded parameters by resizing storages, which is no operation."""
        resize = torch.UntypedStorage.resize_

        def followed(storage: torch.UntypedStorage, size: int) -> Any:
            out = resize(storage, size)
            self._resized(storage, size)
            return out

        torch.UntypedStorage.resize_ = followed  # type: ignore[method-assign]
        try:
            with self:
                yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0  # a number that steers nothing here
        if func.overloadpacket.__name__ in _MULTIPLIES:
            self._take_workspace()
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._scaled_dot_product_flash_attention_backward.default:
            self._pass_by(_flash_scratch(args[1], args[2]))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                if func.is_view:
                    self._see_view(leaf.untyped_storage(), args[0].untyped_storage())
                else:
                    self._see(leaf.untyped_storage())
        return out

    def _see_view(self, view: torch.UntypedStorage, base: torch.UntypedStorage) -> None:
        """Fake tensors may give a view a storage of its own: it takes nothing, and keeps the base alive."""
        if view._cdata not in self._known:
            self._views[view._cdata] = weakref.ref(view, lambda _, address=view._cdata, base=base: self._views.pop(address))

    def _see(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._known or storage._cdata in self._views:
            return
        address, where = storage._cdata, self.into
        self._count += 1
        key = self._count

        def gone(_: Any) -> None:
            if self._known.get(address, (None,))[0] == key:
                del self._known[address]
            if where.holds(key):
                where.free(key)

        self._known[address] = (key, where, weakref.ref(storage, gone))
        if nbytes := storage.nbytes():
            where.allocate(key, nbytes, self._stream())

    def _resized(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        if storage._cdata not in self._known:
            self._see(storage)
            return
        key, where, _ = self._known[storage._cdata]
        if where.holds(key):
            where.free(key)
        if nbytes:
            where.allocate(key, nbytes, self._stream())

    def _take_workspace(self) -> None:
        name = "forward" if torch._C._current_graph_task_id() == -1 else "backward"  # autograd has a thread of its own
        if self._workspace and name not in self._workspaces:
            self._workspaces.add(name)
            self.torch.allocate(name, self._workspace, self._stream())

    def _pass_by(self, sizes: list[int]) -> None:
        keys: list[Hashable] = []
        for size in sizes:
            keys.append(("scratch", len(keys)))
            self.torch.allocate(keys[-1], size, self._stream())
        for key in keys:
            self.torch.free(key)

    def _stream(self) -> int:
        return self._streams.setdefault(id(torch.cpu.current_stream()), len(self._streams))


def _flash_scratch(query: Tensor, key: Tensor) -> list[int]:
    """What FlashAttention's backward takes inside: fp32 sums of dQ, row sums, dK and dV of every query head."""
    batch, heads, length, width = query.shape
    rows = round_up(length, 128)
    sizes = [4 * batch * rows * heads * round_up(width, 32), 4 * batch * heads * rows]
    if key.shape[1] != heads:
        sizes += 2 * [batch * length * heads * width * query.element_size()]
    return sizes


class PlannedSaver:
    """What a trainer asks of a `MemorySaver`. Tags have sizes and states, and no memory."""

    device = torch.device("cpu")

    def __init__(self, device: PlannedDevice) -> None:
        self._planned = device
        self._direct: dict[str, int] = {}
        self._regions: dict[str, CachingAllocator] = {}
        self._paused: set[str] = set()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, *, tag: str, content: str = "discard") -> Tensor:
        with self._planned.placing(CachingAllocator()):
            tensor = torch.empty(shape, dtype=dtype)
        self._direct[tag] = self._direct.get(tag, 0) + tensor.numel() * dtype.itemsize
        return tensor

    @contextlib.contextmanager
    def region(self, tag: str, content: str | None = None) -> Iterator[None]:
        with self._planned.placing(self._regions.setdefault(tag, CachingAllocator())):
            yield

    def pause(self, *tags: str, content: str | None = None) -> None:
        self._paused |= set(tags)

    def resume(self, *tags: str) -> None:
        self._paused -= set(tags)

    def mark_clean(self, tag: str, version: object) -> None:
        """Content is nothing here."""

    def leases(self, tag: str) -> int:
        return 0

    def sizes(self) -> dict[str, int]:
        """Bytes of every tag while it has memory."""
        tags = dict.fromkeys([*self._direct, *self._regions])
        return {
            tag: round_up(self._direct.get(tag, 0), PAGE)
            + (self._regions[tag].reserved if tag in self._regions else 0)
            for tag in tags
        }

    def take_usage(self) -> Usage:
        sizes, torch_now = self.sizes(), self._planned.torch
        usage = Usage(
            tags={tag: 0 if tag in self._paused else nbytes for tag, nbytes in sizes.items()},
            torch_bytes=torch_now.reserved,
            torch_peak_bytes=torch_now.peak,
            device_used_bytes=None,
            host_bytes=sum(nbytes for tag, nbytes in sizes.items() if tag in self._paused),
        )
        torch_now.reset_peak()
        return usage

    def report(self) -> Report:
        return Report(device="planned", limit_bytes=None, committed_bytes=0, pool_bytes=0, backup_bytes=0, tags={})

    def drain_events(self) -> list[Event]:
        return []
