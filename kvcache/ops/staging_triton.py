"""Triton kernels of `staging.py`: a program a layer (keys, then values) and block of tokens.

Bytes are moved in units, the widest of 16, 8, 4, 2 and 1 that all addresses, strides and rows are
multiples of.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kvcache.ops.units_triton import WORDS, unit_pointer

MAX_BLOCK = 1024  # units a program
# programs in the second dimension of a CUDA grid; where there is more to do, they go round
MAX_BLOCKS = 65535
WARPS = 8


def gather_triton(
    k: torch.Tensor, v: torch.Tensor, loc: torch.Tensor, staged: torch.Tensor
) -> None:
    """k and v: uint8, sliced to the heads wanted."""
    layers, heads, tokens = k.shape[0], k.shape[2], len(loc)
    unit, constants, blocks = _instance(k, v, staged, heads, tokens)
    with torch.cuda.device_of(k):
        gather_kernel[(2 * layers, blocks)](
            k.data_ptr(), v.data_ptr(), staged.data_ptr(), loc, loc.stride(0), layers, tokens,
            heads, *_strides(k, unit), *_strides(v, unit), **constants, num_warps=WARPS,
        )  # fmt: skip


def scatter_triton(
    staged: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    loc: torch.Tensor,
    heads: Sequence[tuple[int, int]],
    writers: torch.Tensor,
) -> None:
    """k and v: uint8. heads, writers: both fields of the `Writers`."""
    layers, tokens = k.shape[0], len(loc)
    unit, constants, blocks = _instance(k, v, staged, max(count for _, count in heads), tokens)
    with torch.cuda.device_of(k):
        scatter_kernel[(len(heads) * 2 * layers, blocks)](
            k.data_ptr(), v.data_ptr(), staged.data_ptr(), loc, loc.stride(0), layers, tokens,
            writers, *_strides(k, unit), *_strides(v, unit), **constants, num_warps=WARPS,
        )  # fmt: skip


def _strides(pages: torch.Tensor, unit: int) -> tuple[int, ...]:
    """Returns the strides of layer, slot and head, in units."""
    return tuple(stride // unit for stride in pages.stride()[:3])


def _instance(
    k: torch.Tensor, v: torch.Tensor, staged: torch.Tensor, heads: int, tokens: int
) -> tuple[int, dict[str, object], int]:
    """The unit in bytes, compile-time arguments, and how many blocks a layer takes."""
    unit = math.gcd(16, staged.data_ptr())
    for pages in (k, v):
        unit = math.gcd(unit, pages.data_ptr(), pages.shape[3], *pages.stride()[:3])
    widest = heads * max(k.shape[3], v.shape[3]) // unit
    columns = min(MAX_BLOCK, triton.next_power_of_2(widest))
    chunks = triton.cdiv(widest, columns)
    blocks = triton.cdiv(tokens, MAX_BLOCK // columns) * chunks
    constants = {
        "K_UNITS": k.shape[3] // unit,
        "V_UNITS": v.shape[3] // unit,
        "WORD": WORDS[unit],
        "VECTOR": 2 if unit == 16 else 1,
        "COLUMNS": columns,
        "CHUNKS": chunks,
        "BLOCK": MAX_BLOCK,
    }
    return unit, constants, min(blocks, MAX_BLOCKS)


@triton.jit
def _copy_layer(  # type: ignore[no-untyped-def]
    pages, staged, loc, loc_stride, tokens, heads, slot_stride, head_stride,
    UNITS: tl.constexpr, VECTOR: tl.constexpr, COLUMNS: tl.constexpr, CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr, TO_PAGES: tl.constexpr,
):  # fmt: skip
    """One layer of keys or of values of one writer: `pages` at its first head, `staged` at its
    first token.
    """
    lane = tl.arange(0, BLOCK)
    word = tl.arange(0, VECTOR)[None, :]
    block = tl.program_id(1).to(tl.int64)
    while block // CHUNKS * (BLOCK // COLUMNS) < tokens:
        token = block // CHUNKS * (BLOCK // COLUMNS) + lane // COLUMNS
        column = (block % CHUNKS).to(tl.int32) * COLUMNS + lane % COLUMNS
        inside = (token < tokens) & (column < heads * UNITS)
        slot = tl.load(loc + token * loc_stride, mask=inside, other=0).to(tl.int64)
        head = (column // UNITS).to(tl.int64)
        in_pages = slot * slot_stride + head * head_stride + column % UNITS
        in_stage = token * heads * UNITS + column
        page_at = pages + in_pages[:, None] * VECTOR + word
        stage_at = staged + in_stage[:, None] * VECTOR + word
        if TO_PAGES:
            tl.store(page_at, tl.load(stage_at, mask=inside[:, None]), mask=inside[:, None])
        else:
            tl.store(stage_at, tl.load(page_at, mask=inside[:, None]), mask=inside[:, None])
        block += tl.num_programs(1)


@triton.jit
def _copy_part(  # type: ignore[no-untyped-def]
    part, k, v, staged, loc, loc_stride, layers, tokens, heads, first_head,
    k_layer, k_slot, k_head, v_layer, v_slot, v_head,
    K_UNITS: tl.constexpr, V_UNITS: tl.constexpr, WORD: tl.constexpr, VECTOR: tl.constexpr,
    COLUMNS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, TO_PAGES: tl.constexpr,
):  # fmt: skip
    """Part < layers: keys of that layer, else values. `staged`: where the writer's bytes begin."""
    rows = tokens * heads  # int64, as all offsets: pools and buffers may pass 2**31
    if part < layers:
        pages = unit_pointer(k, WORD, VECTOR) + (part * k_layer + first_head * k_head) * VECTOR
        _copy_layer(
            pages, staged + part * rows * K_UNITS * VECTOR, loc, loc_stride, tokens, heads,
            k_slot, k_head, K_UNITS, VECTOR, COLUMNS, CHUNKS, BLOCK, TO_PAGES,
        )  # fmt: skip
    else:
        layer = part - layers
        pages = unit_pointer(v, WORD, VECTOR) + (layer * v_layer + first_head * v_head) * VECTOR
        before = rows * (layers * K_UNITS + layer * V_UNITS)
        _copy_layer(
            pages, staged + before * VECTOR, loc, loc_stride, tokens, heads, v_slot, v_head,
            V_UNITS, VECTOR, COLUMNS, CHUNKS, BLOCK, TO_PAGES,
        )  # fmt: skip


_NUMBERS = [
    "k", "v", "staged", "loc_stride", "layers", "tokens", "heads",
    "k_layer", "k_slot", "k_head", "v_layer", "v_slot", "v_head",
]  # fmt: skip


@triton.jit(do_not_specialize=_NUMBERS)
def gather_kernel(  # type: ignore[no-untyped-def]
    k, v, staged, loc, loc_stride, layers, tokens, heads,
    k_layer, k_slot, k_head, v_layer, v_slot, v_head,
    K_UNITS: tl.constexpr, V_UNITS: tl.constexpr, WORD: tl.constexpr, VECTOR: tl.constexpr,
    COLUMNS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """k, v, staged: addresses. Strides of pages in units."""
    part = tl.program_id(0).to(tl.int64)
    tokens = tokens.to(tl.int64)
    _copy_part(
        part, k, v, unit_pointer(staged, WORD, VECTOR), loc, loc_stride, layers, tokens,
        heads.to(tl.int64), 0, k_layer, k_slot, k_head, v_layer, v_slot, v_head,
        K_UNITS, V_UNITS, WORD, VECTOR, COLUMNS, CHUNKS, BLOCK, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=[name for name in _NUMBERS if name != "heads"])
def scatter_kernel(  # type: ignore[no-untyped-def]
    k, v, staged, loc, loc_stride, layers, tokens, writers,
    k_layer, k_slot, k_head, v_layer, v_slot, v_head,
    K_UNITS: tl.constexpr, V_UNITS: tl.constexpr, WORD: tl.constexpr, VECTOR: tl.constexpr,
    COLUMNS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Counts as `gather_kernel`; the grid's first dimension goes over writers, then their parts."""
    program = tl.program_id(0).to(tl.int64)
    writer = writers + program // (2 * layers) * 3
    tokens = tokens.to(tl.int64)
    first_head, heads, before = tl.load(writer), tl.load(writer + 1), tl.load(writer + 2)
    begins = before * tokens * layers * (K_UNITS + V_UNITS)
    _copy_part(
        program % (2 * layers), k, v, unit_pointer(staged, WORD, VECTOR) + begins * VECTOR,
        loc, loc_stride, layers, tokens, heads, first_head,
        k_layer, k_slot, k_head, v_layer, v_slot, v_head,
        K_UNITS, V_UNITS, WORD, VECTOR, COLUMNS, CHUNKS, BLOCK, True,
    )  # fmt: skip
