"""The host tier: pages of a device pool in host memory, and the copies that are under way."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from kvcache.allocators import Indices, Int64Array, PagedTokenToKVPoolAllocator, as_int64, to_device
from kvcache.config import check_option
from kvcache.ops.host_copy import HostCopyPlan, Side, copy_rows
from kvcache.pools.token_pools import TokenPool, check_loc
from memsaver.memory import host_memory
from memsaver.system.devices import Impl


class HostTransfer:
    """Copies under way: an event for each layer; without any (on the CPU) all is done already."""

    def __init__(self, events: Sequence[torch.cuda.Event] = ()) -> None:
        self._events = events

    @property
    def done(self) -> bool:
        return all(event.query() for event in self._events)

    def wait(self, layer: int = -1) -> None:
        """Make what is queued on the current stream from now on wait for this layer and those
        before it (-1: for all); the host does not wait.
        """
        if self._events:
            torch.cuda.current_stream().wait_event(self._events[layer])

    def synchronize(self) -> None:
        """Wait on the host for all layers: before the pool is paused, or host pages are read."""
        for event in self._events:
            event.synchronize()


Layout = Literal["layer_first", "page_first"]


@dataclass(frozen=True, kw_only=True)
class HostCacheConfig:
    """The amount of host memory that is taken, and the order in which pages lie there.

    ratio: host tokens for a token of the device pool, or size_bytes: the most bytes; exactly one of
    them. Only whole pages are held.
    layout: layer_first keeps all pages of a part (keys, values) and layer together, page_first all
    of a page.
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
        layouts = get_args(Layout)
        check_option(self, "layout", self.layout in layouts, f"must be one of {', '.join(layouts)}")

    def pages(self, pool: TokenPool) -> int:
        """Return the host pages for a pool; ValueError where not even one fits."""
        page_bytes = pool.page_size * pool.bytes_per_token
        size = self.size_bytes or 0
        if self.ratio is not None:
            size = int(self.ratio * pool.size) * pool.bytes_per_token
        if size < page_bytes:
            raise ValueError(f"{size} bytes of host memory hold no page of {page_bytes}; take more")
        return size // page_bytes


class HostKVCache:
    """Pages of one pool in host memory (pinned for a GPU), bytes as stored; who holds which,
    `allocator` says, and where they lie, `plan`.

    Host slots are tokens `page * ps + offset` of pages that `allocator` issued, from 1 on as on the
    device. Device slots are int64 on the CPU, checked and sent, or on the device, unchecked, as
    that would synchronise. A pause of the pool's tag loses nothing here; transfers have to be over
    before it (`HostTransfer.synchronize`).

    All transfers run one after the other on a stream of their own, after what the current stream
    had queued when they were asked for. So a host page may be freed and used again at once; device
    slots may not be read after a load, nor written after a backup, without `HostTransfer.wait`. Not
    thread-safe.
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
        """Tokens."""
        return self.allocator.size

    def backup_from_device_all_layer(
        self, host_slots: Indices, device_slots: Tensor
    ) -> HostTransfer:
        """Start copying all layers to as many host slots."""
        return self._start(host_slots, device_slots, [range(self.num_layers)], to_host=True)

    def load_to_device(self, host_slots: Indices, device_slots: Tensor) -> HostTransfer:
        """Start copying all layers, in order: `HostTransfer.wait(i)` waits for those up to i."""
        layers = [range(layer, layer + 1) for layer in range(self.num_layers)]
        return self._start(host_slots, device_slots, layers, to_host=False)

    def read_page(self, page: int) -> Tensor:
        """Return a copy of a page, uint8 `[page_bytes]`: `[L, ps, row]` a part; wait for it."""
        return torch.cat([rows.flatten() for rows in self._page(page)])

    def write_page(self, page: int, content: Tensor) -> None:
        """Fill a page with what `read_page` gave; wait until nothing reads it."""
        assert content.dtype == torch.uint8 and content.shape == (self.page_bytes,)
        pages = self._page(page)
        for rows, part in zip(pages, content.split([rows.numel() for rows in pages]), strict=True):
            rows.copy_(part.view(rows.shape))

    def accept_scales(self) -> None:
        """Take the pool's scales of now for those of all pages; drop what was here before."""
        self._accepted = self.pool.format()

    def slots_of(self, pages: Int64Array) -> Tensor:
        """Return the token slots of host or device pages, int64 `[n * ps]` on the CPU."""
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
        """Copy groups of layers one after the other; on a GPU one launch and one event each."""
        host = as_int64(host_slots)
        self._check_issued(host // self.page_size)
        rows = torch.from_numpy(host - self.page_size)  # page 0 has no memory on the host
        self._check_device_slots(device_slots, len(rows))
        if self.pool.format() != self._accepted:
            raise ValueError("fp8 scales have changed; set them before making the host tier")
        if self._stream is None:
            for group in groups:
                copy_rows(self.plan, rows, device_slots, group, to_host, self._impl)
            return HostTransfer()
        events: list[torch.cuda.Event] = []
        with torch.cuda.stream(self._stream):
            rows, slots = self._on_device(rows), self._on_device(device_slots)
            slots.record_stream(self._stream)  # it may be the caller's, who may drop it
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
    """Return each part of the pool with its place in the host block."""
    sides, start = [], 0
    page_bytes = pool.page_size * pool.bytes_per_token
    for part in pool.stored.values():
        rows = part.flatten(2).view(torch.uint8)
        layers, row = rows.shape[0], rows.shape[2]
        whole = pages if layout == "layer_first" else 1  # pages of a layer that lie together
        step = pool.page_size * row if layout == "layer_first" else page_bytes
        strides = (whole * pool.page_size * row, step, row, 1)
        shape = (layers, pages, pool.page_size, row)
        sides.append(Side(rows, block.as_strided(shape, strides, start)))
        start += layers * whole * pool.page_size * row
    return sides
