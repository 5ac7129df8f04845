"""Triton kernels of `move.py`.

Within a pool rows go straight to their place, but for those whose slot is written to as well. Only
such rows are staged before: a move into slots that nobody reads passes memory once.

To and from the host, bytes are moved in units, the widest of 16, 8, 4, 2 and 1 that all addresses,
strides and rows are multiples of. The kernel reads and writes pinned memory itself, which needs no
packed copy of scattered slots on either side. There are no more programs than keep the link busy:
more of them would only wait, in the place of kernels that compute.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_MAX_BLOCK = 1024
_TILE = 1024  # words that a program has under way
_STAGED_AT_ONCE = 16  # rows
BLOCK = 4096  # units, of a copy to or from the host
PROGRAMS = 8
WARPS = 32
FIELDS = tl.constexpr(6)  # of a row of the plan's table
WORDS = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64, 16: tl.uint64}  # by bytes of a unit


@triton.jit
def unit_pointer(address, WORD: tl.constexpr, VECTOR: tl.constexpr):  # type: ignore[no-untyped-def]
    """An address as a pointer to words; VECTOR of them are a unit."""
    pointer = address.to(tl.int64).to(tl.pointer_type(WORD))
    if VECTOR == 2:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


def move_triton(parts: Sequence[torch.Tensor], tgt: torch.Tensor, src: torch.Tensor) -> None:
    """Same contract as `move_rows`."""
    count, (layers, slots) = tgt.shape[0], parts[0].shape[:2]
    written = torch.zeros(slots, dtype=torch.uint8, device=tgt.device).index_fill_(0, tgt, 1)
    for part in parts:
        assert part.shape[:2] == (layers, slots) and part.stride(2) == 1, (
            "parts differ, or rows are not contiguous"
        )
        width = part.shape[2]
        staged = torch.empty((count, layers, width), dtype=part.dtype, device=part.device)
        block = min(_MAX_BLOCK, triton.next_power_of_2(width))
        rows = min(_TILE // block, triton.next_power_of_2(count))
        strides = (src.stride(0), *part.stride()[:2])
        sizes = {"WIDTH": width, "BLOCK": block}
        with torch.cuda.device_of(part):
            _stage_kernel[(triton.cdiv(count, _STAGED_AT_ONCE),)](
                part, staged, written, src, count, *strides,
                LAYERS=layers, ROWS=_STAGED_AT_ONCE, **sizes,
            )  # fmt: skip
            _move_kernel[(triton.cdiv(count, rows), layers)](
                part, staged, written, tgt, src, count, tgt.stride(0), *strides, ROWS=rows, **sizes
            )


@triton.jit
def _stage_kernel(  # type: ignore[no-untyped-def]
    part, staged, written, src, count, src_stride, layer_stride, slot_stride,
    LAYERS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program (ROWS rows): all layers of those whose slot is written to."""
    # a pool may pass 2**31 elements: offsets are int64 throughout
    first = tl.program_id(0).to(tl.int64) * ROWS
    rows = first + tl.arange(0, ROWS)
    slots = tl.load(src + rows * src_stride, mask=rows < count, other=0).to(tl.int64)
    is_written = tl.load(written + slots, mask=rows < count, other=0)
    if tl.max(is_written.to(tl.int32), 0) != 0:
        for nth in range(ROWS):
            i = first + nth
            slot = tl.load(src + i * src_stride, mask=i < count, other=0).to(tl.int64)
            if tl.load(written + slot, mask=i < count, other=0) != 0:
                at, to = part + slot * slot_stride, staged + i * LAYERS * WIDTH
                for _ in range(LAYERS):
                    for start in range(0, WIDTH, BLOCK):
                        column = start + tl.arange(0, BLOCK)
                        inside = column < WIDTH
                        tl.store(to + column, tl.load(at + column, mask=inside), mask=inside)
                    at += layer_stride
                    to += WIDTH


@triton.jit
def _move_kernel(  # type: ignore[no-untyped-def]
    part, staged, written, tgt, src, count, tgt_stride, src_stride, layer_stride, slot_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program (ROWS rows, layer)."""
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    layer = tl.program_id(1).to(tl.int64)
    exists = i < count
    slot = tl.load(src + i * src_stride, mask=exists, other=0).to(tl.int64)
    target = tl.load(tgt + i * tgt_stride, mask=exists, other=0).to(tl.int64)
    is_written = tl.load(written + slot, mask=exists, other=0)[:, None]
    here = part + layer * layer_stride + (slot * slot_stride)[:, None]
    there = staged + ((i * tl.num_programs(1) + layer) * WIDTH)[:, None]
    to = part + layer * layer_stride + (target * slot_stride)[:, None]
    for start in range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        inside = (column < WIDTH) & exists[:, None]
        direct = tl.load(here + column, mask=inside & (is_written == 0), other=0)
        kept = tl.load(there + column, mask=inside & (is_written != 0), other=0)
        tl.store(to + column, direct | kept, mask=inside)


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
    """Copies rows of `entries` of the plan's table. widest: bytes of a row; unit: bytes at once."""
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
