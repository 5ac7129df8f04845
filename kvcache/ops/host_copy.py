"""Copies slots of a pool to host memory and back, in Triton or torch.

A slot's row of one part and layer is contiguous on both sides, and moved as bytes. One launch
copies any number of layers and parts, in units: the widest of 16, 8, 4, 2 and 1 bytes that all
addresses, strides and rows are multiples of. The kernel reads and writes pinned memory itself,
which needs no packed copy of scattered slots on either side. There are no more programs than keep
the link busy: more of them would only wait, in the place of kernels that compute.
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

BLOCK = 4096  # units, of a copy to or from the host
PROGRAMS = 8
WARPS = 32
FIELDS = tl.constexpr(6)  # of a row of the plan's table
WORDS = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64, 16: tl.uint64}  # by bytes of a unit


@dataclass(frozen=True)
class Side:
    """A part of a slot: `device` uint8 `[L, N, R]`, `host` uint8 `[L, pages, ps, R]`."""

    device: Tensor
    host: Tensor


class HostCopyPlan:
    """The parts of a pool and where their host pages are; good as long as both addresses hold."""

    def __init__(self, parts: Sequence[Side]) -> None:
        self.parts = tuple(parts)
        self.layers, self.page_size = parts[0].device.shape[0], parts[0].host.shape[2]
        self.device = parts[0].device.device
        for part in parts:
            assert part.device.shape[2] == part.host.shape[3], "rows differ"
            assert part.device.stride(2) == part.host.stride(3) == 1, "rows have gaps"
            assert part.device.dtype == part.host.dtype == torch.uint8, "rows are moved as bytes"

    @cached_property
    def table(self) -> Tensor:
        """Return int64 `[L * parts, 6]` on the device, all parts of layer 0 first: device address,
        host address, bytes from slot to slot on the device, from page to page and from token to
        token on the host, row bytes.
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
        """Return the most bytes, up to 16, that divide all addresses, strides and rows."""
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
    """Copy, in neighbouring `layers`, slot `device_slots[i]` to row `host_rows[i]`, or back.

    Both int64 `[n]` on the device, not range-checked. On a GPU the kernel is queued on the current
    stream; the reference waits. A target named twice holds any of its rows.
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
    """An address as a pointer to words; VECTOR of them are a unit."""
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
    """Rows first..end - 1 of the table, of `blocks` blocks each."""
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
    # offsets in the block are int32, whose division is cheap; all that addresses memory is int64
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
