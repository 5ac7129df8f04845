"""Every allocation of the trainer's forward and backward, recorded without a GPU and without the memory.

The trainer's own model runs under torch's fake tensors, sharded by FSDP2 over a process group that moves nothing.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memsaver.rounding import round_up


@dataclass(frozen=True, slots=True)
class Change:
    """Bytes of one storage from here on; 0: freed. stream: in which it was asked for."""

    key: int
    nbytes: int
    stream: int


class Recorder(TorchDispatchMode):
    """Changes of all storages that operations make or resize, inside the block. Those of `ignore` are not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.changes: list[Change] = []
        self._keys: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._streams: dict[int, int] = {}
        self._count = 0

    def ignore(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            self._know(tensor.untyped_storage())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is torch.ops.aten._scaled_dot_product_flash_attention_backward.default:
            self._backward_scratch(args)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._see(leaf.untyped_storage())
        return out

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """FSDP frees and takes unsharded parameters by resizing storages, which is no operation."""
        resize = torch.UntypedStorage.resize_

        def noted(storage: torch.UntypedStorage, size: int) -> Any:
            out = resize(storage, size)
            if storage._cdata in self._keys:
                self._note(self._keys[storage._cdata][0], size)
            else:
                self._see(storage)
            return out

        torch.UntypedStorage.resize_ = noted  # type: ignore[method-assign]
        try:
            with self:
                yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    def _see(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._keys:
            self._note(self._know(storage), storage.nbytes())

    def _know(self, storage: torch.UntypedStorage) -> int:
        address = storage._cdata
        self._count += 1
        key = self._count

        def gone(_: Any) -> None:
            if self._keys.get(address, (None,))[0] == key:
                del self._keys[address]
            self._note(key, 0)

        self._keys[address] = (key, weakref.ref(storage, gone))
        return key

    def _note(self, key: int, nbytes: int) -> None:
        stream = self._streams.setdefault(id(torch.cpu.current_stream()), len(self._streams))
        self.changes.append(Change(key, nbytes, stream))

    def _backward_scratch(self, args: Any) -> None:
        """What FlashAttention's backward takes inside: fp32 sums of dQ, row sums, dK and dV of every query head."""
        query, key = args[1], args[2]
        batch, heads, length, width = query.shape
        rows = round_up(length, 128)
        sizes = [4 * batch * rows * heads * round_up(width, 32), 4 * batch * heads * rows]
        if key.shape[1] != heads:
            sizes += 2 * [batch * length * heads * width * query.element_size()]
        keys = []
        for size in sizes:
            self._count += 1
            keys.append(self._count)
            self._note(self._count, size)
        for each in keys:
            self._note(each, 0)
