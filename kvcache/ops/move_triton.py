"""Triton kernels of `move.py`: rows go straight to their place, but for those whose slot is written to as well.

Only such rows are staged before, so a move into slots that nobody reads, the usual one, passes memory once.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_MAX_BLOCK = 1024


def move_triton(parts: Sequence[torch.Tensor], tgt: torch.Tensor, src: torch.Tensor) -> None:
    """Same contract as `move_rows`."""
    count, (layers, slots) = tgt.shape[0], parts[0].shape[:2]
    written = torch.zeros(slots, dtype=torch.uint8, device=tgt.device).index_fill_(0, tgt, 1)
    for part in parts:
        assert part.shape[:2] == (layers, slots) and part.stride(2) == 1, "parts differ, or rows are not contiguous"
        width = part.shape[2]
        staged = torch.empty((count, layers, width), dtype=part.dtype, device=part.device)
        sizes = {"WIDTH": width, "BLOCK": min(_MAX_BLOCK, triton.next_power_of_2(width))}
        strides = (src.stride(0), *part.stride()[:2])
        with torch.cuda.device_of(part):
            _stage_kernel[(count,)](part, staged, written, src, *strides, LAYERS=layers, **sizes)
            _move_kernel[(count, layers)](part, staged, written, tgt, src, tgt.stride(0), *strides, **sizes)


@triton.jit
def _stage_kernel(  # type: ignore[no-untyped-def]
    part, staged, written, src, src_stride, layer_stride, slot_stride,
    LAYERS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row): all layers of it, if its slot is written to."""
    i = tl.program_id(0).to(tl.int64)  # a pool may pass 2**31 elements: offsets are int64 throughout
    slot = tl.load(src + i * src_stride).to(tl.int64)
    if tl.load(written + slot) != 0:
        at, to = part + slot * slot_stride, staged + i * LAYERS * WIDTH
        for _ in range(LAYERS):
            for start in range(0, WIDTH, BLOCK):
                column = start + tl.arange(0, BLOCK)
                tl.store(to + column, tl.load(at + column, mask=column < WIDTH), mask=column < WIDTH)
            at += layer_stride
            to += WIDTH


@triton.jit
def _move_kernel(  # type: ignore[no-untyped-def]
    part, staged, written, tgt, src, tgt_stride, src_stride, layer_stride, slot_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, layer)."""
    i, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = tl.load(src + i * src_stride).to(tl.int64)
    is_written = tl.load(written + slot)
    here = part + layer * layer_stride + slot * slot_stride
    there = staged + (i * tl.num_programs(1) + layer) * WIDTH
    to = part + layer * layer_stride + tl.load(tgt + i * tgt_stride).to(tl.int64) * slot_stride
    for start in range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < WIDTH
        direct = tl.load(here + column, mask=inside & (is_written == 0), other=0)
        kept = tl.load(there + column, mask=inside & (is_written != 0), other=0)
        tl.store(to + column, direct | kept, mask=inside)
