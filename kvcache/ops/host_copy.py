"""Copies of pool slots to host memory and back, in Triton or torch.

A slot's row of one part and layer is contiguous on both sides and is copied as bytes. One launch
copies any number of layers and parts, in units of 16, 8, 4, 2 or 1 bytes: the largest that divides
all addresses, strides and row sizes. The kernel accesses pinned memory directly, so scattered slots
need no packed copy on either side. It runs only as many programs as saturate the link; further
programs would occupy multiprocessors that other kernels need.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import triton
import triton.language as tl
from torch import Tensor

from memsaver.system.devices import Impl, use_triton

BLOCK = 4096  # units per block of a copy
PROGRAMS = 8
WARPS = 32
FIELDS = tl.constexpr(6)  # columns of the plan's table
WORDS = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64, 16: tl.uint64}  # by unit size


@dataclass(frozen=True)
class Side:
    """One part of the slots in both memories, as bytes."""

    device: Tensor  # uint8 [layers, slots, row bytes]
    host: Tensor  # uint8 [layers, pages, page size, row bytes]


class HostCopyPlan:
    """Addresses of a pool's parts and their host pages, valid while neither memory moves."""

    def __init__(self, parts: Sequence[Side]) -> None:
        self.parts = tuple(parts)
        self.layers, self.page_size = parts[0].device.shape[0], parts[0].host.shape[2]
        self.device = parts[0].device.device
        for part in parts:
            assert part.device.shape[2] == part.host.shape[3], "rows differ"
            assert part.device.stride(2) == part.host.stride(3) == 1, "rows have gaps"
            assert part.device.dtype == part.host.dtype == torch.uint8, "rows are copied as bytes"

    @cached_property
    def table(self) -> Tensor:
        """Return the kernel's table, int64 `[layers * parts, 6]` on the device, layer by layer.

        The columns are: device address, host address, bytes from slot to slot on the device, bytes
        from page to page on the host, bytes from token to token on the host, bytes per row.
        """
        rows = [
            (
                part.device.data_ptr() + layer * part.device.stride(0),
                part.host.data_ptr() + layer * part.host.stride(0),
                part.device.stride(1),
                part.host.stride(1),
                part.host.stride(2),
                part.device.shape[2],
            )
            for layer, part in itertools.product(range(self.layers), self.parts)
        ]
        return torch.tensor(rows, dtype=torch.int64, device=self.device)

    @cached_property
    def unit(self) -> int:
        """Return the bytes a thread copies: at most 16, and a divisor of addresses and strides."""
        numbers = [16]
        for part in self.parts:
            numbers += [part.device.data_ptr(), part.host.data_ptr(), part.device.shape[2]]
            numbers += [*part.device.stride()[:2], *part.host.stride()[:3]]
        return math.gcd(*numbers)


def copy_rows(
    plan: HostCopyPlan,
    host_rows: Tensor,
    device_slots: Tensor,
    layers: range,
    to_host: bool,
    impl: Impl = "auto",
) -> None:
    """Copy slots `device_slots[i]` to host rows `host_rows[i]`, or back, in consecutive layers.

    A host row is `page * page_size + offset`, with host pages counted from 0. Both index tensors
    are int64 `[n]` on the device and are not range-checked. A target that is listed twice contains
    either of the rows afterwards. The Triton kernel is queued on the current stream; the torch
    version waits for the copy.
    """
    if not len(host_rows) or not layers:
        return
    if not use_triton(impl, plan.device):
        rows = host_rows.cpu()
        page, token = rows // plan.page_size, rows % plan.page_size
        for part in plan.parts:
            device = part.device[layers.start : layers.stop]
            host = part.host[layers.start : layers.stop]
            if to_host:
                host[:, page, token] = device[:, device_slots].to(host.device)
            else:
                device[:, device_slots] = host[:, page, token].to(device.device)
        return
    n, parts, unit = len(host_rows), len(plan.parts), plan.unit
    widest = max(part.device.shape[2] for part in plan.parts)
    blocks = triton.cdiv(n * widest // unit, BLOCK)
    with torch.cuda.device_of(plan.table):
        copy_rows_kernel[(min(blocks * len(layers) * parts, PROGRAMS),)](
            plan.table, host_rows, device_slots, host_rows.stride(0), device_slots.stride(0),
            n, blocks, layers.start * parts, layers.stop * parts, plan.page_size, UNIT=unit,
            WORD=WORDS[unit], VECTOR=2 if unit == 16 else 1, BLOCK=BLOCK, TO_HOST=to_host,
            num_warps=WARPS,
        )  # fmt: skip


@triton.jit
def unit_pointer(address, WORD: tl.constexpr, VECTOR: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convert an address to a pointer to words, of which VECTOR make up a unit."""
    pointer = address.to(tl.int64).to(tl.pointer_type(WORD))
    if VECTOR == 2:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit(do_not_specialize=["host_stride", "device_stride", "n", "blocks", "first", "end"])
def copy_rows_kernel(  # type: ignore[no-untyped-def]
    table, host_rows, device_slots, host_stride, device_stride, n, blocks, first, end, page_size,
    UNIT: tl.constexpr, WORD: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
    TO_HOST: tl.constexpr,
):  # fmt: skip
    """Copy the `blocks` blocks of each table row from `first` to `end - 1`."""
    at = tl.program_id(0).to(tl.int64)
    while at < (end - first) * blocks.to(tl.int64):
        _copy_block(
            table + (first + at // blocks) * FIELDS, at % blocks * BLOCK, host_rows, device_slots,
            host_stride, device_stride, n, page_size, UNIT, WORD, VECTOR, BLOCK, TO_HOST,
        )  # fmt: skip
        at += tl.num_programs(0)


@triton.jit
def _copy_block(  # type: ignore[no-untyped-def]
    row, start, host_rows, device_slots, host_stride, device_stride, n, page_size,
    UNIT: tl.constexpr, WORD: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
    TO_HOST: tl.constexpr,
):  # fmt: skip
    device = unit_pointer(tl.load(row), WORD, VECTOR)
    host = unit_pointer(tl.load(row + 1), WORD, VECTOR)
    slot_step = tl.load(row + 2) // UNIT
    page_step = tl.load(row + 3) // UNIT
    token_step = tl.load(row + 4) // UNIT
    columns = tl.load(row + 5) // UNIT
    # Offsets within the block are int32, which divides fast; memory offsets are int64.
    inside = (start % columns).to(tl.int32) + tl.arange(0, BLOCK)
    token = start // columns + inside // columns.to(tl.int32)
    column = (inside % columns.to(tl.int32)).to(tl.int64)
    valid = token < n
    slot = tl.load(device_slots + token * device_stride, mask=valid, other=0)
    place = tl.load(host_rows + token * host_stride, mask=valid, other=0)
    on_host = place // page_size * page_step + place % page_size * token_step + column
    word = tl.arange(0, VECTOR)[None, :]
    device_at = device + (slot * slot_step + column)[:, None] * VECTOR + word
    host_at = host + on_host[:, None] * VECTOR + word
    if TO_HOST:
        tl.store(host_at, tl.load(device_at, mask=valid[:, None]), mask=valid[:, None])
    else:
        tl.store(device_at, tl.load(host_at, mask=valid[:, None]), mask=valid[:, None])
