"""Triton kernels of `move.py`: rows go straight to their place, but for those whose slot is written
to as well.

Only such rows are staged before, so a move into slots that nobody reads, the usual one, passes
memory once.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_MAX_BLOCK = 1024
_TILE = 1024  # words that a program has under way
_STAGED_AT_ONCE = 16  # rows


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
