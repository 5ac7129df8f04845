"""The host tier: pages of a device pool in host memory, and transfers between the two."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from kvcache.allocators import Indices, Int64Array, PagedTokenToKVPoolAllocator, as_int64, to_device
from kvcache.config import check_option
from kvcache.ops.host_copy import HostCopyPlan, Side, copy_rows
from kvcache.pools.token_pools import TokenPool, check_loc
from memsaver.memory import host_memory
from memsaver.system.devices import Impl
from memsaver.types import check_choice


class HostTransfer:
    """Handle of a copy between a device pool and the host, with an event per layer.

    On the CPU there are no events, and the copy has already finished.
    """

    def __init__(self, events: Sequence[torch.cuda.Event] = ()) -> None:
        self._events = events

    @property
    def done(self) -> bool:
        """Return whether all layers have been copied."""
        return all(event.query() for event in self._events)

    def wait(self, layer: int = -1) -> None:
        """Make the current stream wait for the copy of layers 0 to `layer` (-1 for all layers).

        The host does not wait.
        """
        if self._events:
            torch.cuda.current_stream().wait_event(self._events[layer])

    def synchronize(self) -> None:
        """Wait on the host for all layers. Required before the pool is paused."""
        for event in self._events:
            event.synchronize()


Layout = Literal["layer_first", "page_first"]


@dataclass(frozen=True, kw_only=True)
class HostCacheConfig:
    """Size and memory layout of a host tier. Exactly one of `ratio` and `size_bytes` is given.

    Attributes:
        ratio: Host tokens per token of the device pool, rounded down to whole pages.
        size_bytes: Bytes of host memory, rounded down to whole pages.
        layout: "layer_first" stores all pages of a layer's keys (or values) together, "page_first"
            all data of a page.

    Raises:
        ValueError: Both or neither size is given, a size is not positive, or the layout is unknown.
    """

    ratio: float | None = None
    size_bytes: int | None = None
    layout: Layout = "layer_first"

    def __post_init__(self) -> None:
        if (self.ratio is None) == (self.size_bytes is None):
            given = f"ratio={self.ratio}, size_bytes={self.size_bytes}"
            raise ValueError(f"give either ratio or size_bytes, got {given}")
        for name in ("ratio", "size_bytes"):
            size = getattr(self, name)
            check_option(self, name, size is None or size > 0, "must be positive")
        check_choice("layout", self.layout, Layout)

    def pages(self, pool: TokenPool) -> int:
        """Compute the number of host pages for a device pool, at least 1.

        Raises:
            ValueError: The size is too small for a page.
        """
        page_bytes = pool.page_size * pool.bytes_per_token
        size = self.size_bytes or 0
        if self.ratio is not None:
            size = int(self.ratio * pool.size) * pool.bytes_per_token
        if size < page_bytes:
            raise ValueError(
                f"a host tier of {size} bytes is too small for a page of {page_bytes}; "
                "raise ratio or size_bytes"
            )
        return size // page_bytes


class HostKVCache:
    """Host memory for pages of one device pool, pinned if the pool is on a GPU.

    Pages contain the bytes as stored in the pool. `allocator` is the ledger of the host pages.

    Host slots are `page * page_size + offset` of allocated host pages, numbered from 1 as on the
    device. Device slots may be int64 on the CPU, where they are range-checked, or on the device,
    where they are not because that would synchronize. A pause of the pool's tag does not affect the
    host pages, but all transfers must have finished before it (`HostTransfer.synchronize`).

    Transfers run one after another on a separate stream, after the work that the current stream had
    queued at the call. A host page may therefore be freed and reused immediately. Device slots must
    not be read after a load, or written after a backup, before `HostTransfer.wait`. Not
    thread-safe.

    Raises:
        ValueError: The configured size is too small for a page.
        HostMemoryError: The host has too little memory.
    """

    def __init__(self, pool: TokenPool, config: HostCacheConfig, impl: Impl = "auto") -> None:
        self.pool, self.config, self.page_size = pool, config, pool.page_size
        self.format = pool.format()
        self.page_bytes = pool.page_size * pool.bytes_per_token
        self.num_layers = next(iter(pool.stored.values())).shape[0]
        pages = config.pages(pool)
        self.allocator = PagedTokenToKVPoolAllocator(pages * self.page_size, self.page_size, "cpu")
        self.nbytes = pages * self.page_bytes
        self._block = host_memory(self.nbytes, pool.device, "a host tier", "make the tier smaller")
        self.plan = HostCopyPlan(_sides(pool, self._block, pages, config.layout))
        self.accept_scales()
        self._impl = impl
        self._stream = torch.cuda.Stream(pool.device) if pool.device.type == "cuda" else None

    @property
    def size(self) -> int:
        """Return the capacity in tokens."""
        return self.allocator.size

    def backup_from_device_all_layer(
        self, host_slots: Indices, device_slots: Tensor
    ) -> HostTransfer:
        """Start to copy device slots, int64 `[n]`, to host slots `[n]` on the CPU, in all layers.

        Raises:
            ValueError: The pool's fp8 scales have changed, or `device_slots` has another dtype or
                length.
        """
        return self._start(host_slots, device_slots, [range(self.num_layers)], to_host=True)

    def load_to_device(self, host_slots: Indices, device_slots: Tensor) -> HostTransfer:
        """Start to copy host slots `[n]` on the CPU to device slots, int64 `[n]`, layer by layer.

        Raises:
            ValueError: The pool's fp8 scales have changed, or `device_slots` has another dtype or
                length.
        """
        layers = [range(layer, layer + 1) for layer in range(self.num_layers)]
        return self._start(host_slots, device_slots, layers, to_host=False)

    def read_page(self, page: int) -> Tensor:
        """Copy the content of an allocated host page, after waiting for all transfers.

        Returns:
            uint8 `[page_bytes]`, the parts one after another, each `[layers, page_size, row]`.
        """
        return torch.cat([rows.flatten() for rows in self._page(page)])

    def write_page(self, page: int, content: Tensor) -> None:
        """Write bytes of `read_page` to an allocated host page, after waiting for all transfers."""
        assert content.dtype == torch.uint8 and content.shape == (self.page_bytes,)
        pages = self._page(page)
        for rows, part in zip(pages, content.split([rows.numel() for rows in pages]), strict=True):
            rows.copy_(part.view(rows.shape))

    def accept_scales(self) -> None:
        """Use the pool's present fp8 scales. Drop all pages stored under other scales first."""
        self._accepted = self.pool.format()

    def slots_of(self, pages: Int64Array) -> Tensor:
        """Return the slots of host or device pages, int64 `[n * page_size]` on the CPU."""
        offsets = torch.arange(self.page_size)
        return (torch.from_numpy(pages)[:, None] * self.page_size + offsets).flatten()

    def _page(self, page: int) -> list[Tensor]:
        self._check_issued(np.array([page]))
        if self._stream is not None:
            self._stream.synchronize()
        return [part.host[:, page - 1] for part in self.plan.parts]

    def _start(
        self, host_slots: Indices, device_slots: Tensor, groups: list[range], to_host: bool
    ) -> HostTransfer:
        """Copy groups of layers one after another, on a GPU with one launch and event per group."""
        host = as_int64(host_slots)
        self._check_issued(host // self.page_size)
        rows = torch.from_numpy(host - self.page_size)  # the host has no memory for page 0
        self._check_device_slots(device_slots, len(rows))
        if self.pool.format() != self._accepted:
            raise ValueError("fp8 scales have changed; set them before creating the host tier")
        if self._stream is None:
            for group in groups:
                copy_rows(self.plan, rows, device_slots, group, to_host, self._impl)
            return HostTransfer()
        events: list[torch.cuda.Event] = []
        with torch.cuda.stream(self._stream):
            rows, slots = self._on_device(rows), self._on_device(device_slots)
            slots.record_stream(self._stream)  # the caller may release its tensor
        # Steps that are queued on the caller's stream may still write the rows that leave, or read
        # those that the arriving ones replace.
        self._stream.wait_stream(torch.cuda.current_stream(self.pool.device))
        with torch.cuda.stream(self._stream):
            for group in groups:
                copy_rows(self.plan, rows, slots, group, to_host, self._impl)
                events += [self._stream.record_event()] * len(group)
        return HostTransfer(events)

    def _on_device(self, slots: Tensor) -> Tensor:
        return to_device(slots.numpy(), self.pool.device) if slots.device.type == "cpu" else slots

    def _check_issued(self, pages: Int64Array) -> None:
        issued = self.allocator.ref_counts(pages) > 0
        assert issued.all(), f"host pages {pages[~issued]} are free"

    def _check_device_slots(self, slots: Tensor, count: int) -> None:
        check_loc("device_slots", slots, slots.device, count)
        first, end = self.page_size, self.page_size + self.pool.size
        inside = slots.device.type != "cpu" or ((slots >= first) & (slots < end)).all()
        assert inside, f"device slots are {first}..{end - 1}, got {slots.tolist()[:8]}"


def _sides(pool: TokenPool, block: Tensor, pages: int, layout: Layout) -> list[Side]:
    """Build the view of the host block for each part of the pool."""
    sides, start = [], 0
    page_bytes = pool.page_size * pool.bytes_per_token
    for part in pool.stored.values():
        rows = part.flatten(2).view(torch.uint8)
        layers, row = rows.shape[0], rows.shape[2]
        whole = pages if layout == "layer_first" else 1  # adjacent pages of a layer
        step = pool.page_size * row if layout == "layer_first" else page_bytes
        strides = (whole * pool.page_size * row, step, row, 1)
        shape = (layers, pages, pool.page_size, row)
        sides.append(Side(rows, block.as_strided(shape, strides, start)))
        start += layers * whole * pool.page_size * row
    return sides
