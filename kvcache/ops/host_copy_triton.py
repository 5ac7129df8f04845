"""The Triton kernel of `host_copy.py`: programs that go over blocks of units, each of one part and
layer.

Bytes are moved in units, the widest of 16, 8, 4, 2 and 1 that all addresses, strides and rows are
multiples of. Reading and writing pinned memory from the kernel itself needs no packed copy of
scattered slots on either side. There are no more programs than keep the link busy: more of them
would only wait, in the place of kernels that compute.
"""

import torch
import triton
import triton.language as tl

from kvcache.ops.units_triton import WORDS, unit_pointer

BLOCK = 4096  # units
PROGRAMS = 8
WARPS = 32
FIELDS = tl.constexpr(6)  # of a row of the plan's table


def copy_rows_triton(
    table: torch.Tensor,
    entries: range,
    host_rows: torch.Tensor,
    device_slots: torch.Tensor,
    *,
    page_size: int,
    widest: int,
    unit: int,
    to_host: bool,
) -> None:
    """Copies rows as `copy_rows` does, those of `entries` of the plan's table. widest: bytes of the
    longest row; unit: bytes that are moved at once.
    """
    n = len(host_rows)
    blocks = triton.cdiv(n * widest // unit, BLOCK)
    with torch.cuda.device_of(table):
        copy_rows_kernel[(min(blocks * len(entries), PROGRAMS),)](
            table, host_rows, device_slots, host_rows.stride(0), device_slots.stride(0),
            n, blocks, entries.start, entries.stop, page_size, UNIT=unit,
            WORD=WORDS[unit], VECTOR=2 if unit == 16 else 1, BLOCK=BLOCK, TO_HOST=to_host,
            num_warps=WARPS,
        )  # fmt: skip


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
