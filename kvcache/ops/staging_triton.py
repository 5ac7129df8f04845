"""Triton kernels of `staging.py`: a program a layer (keys, then values) and block of tokens.

Bytes are moved in units, the widest that divide all addresses, strides and rows, 16 at most.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kvcache.ops.move_triton import WORDS, unit_pointer

MAX_BLOCK = 1024  # units a program
# programs in the second dimension of a CUDA grid; where there is more to do, they go round
MAX_BLOCKS = 65535
WARPS = 8


def copy_triton(
    k: torch.Tensor,
    v: torch.Tensor,
    loc: torch.Tensor,
    staged: torch.Tensor,
    counts: Sequence[int],
    writers: torch.Tensor | None = None,
) -> None:
    """k and v: uint8. Copies what writers of so many heads each (`counts`) staged into slots `loc`;
    writers: the table of `Writers`. Without one, copies all heads of k and v to `staged`.
    """
    layers, tokens = k.shape[0], len(loc)
    unit, constants, blocks = _instance(k, v, staged, max(counts), tokens)
    with torch.cuda.device_of(k):
        copy_kernel[(len(counts) * 2 * layers, blocks)](
            k.data_ptr(), v.data_ptr(), staged.data_ptr(), loc, loc.stride(0), layers, tokens,
            k.shape[2], writers, *_strides(k, unit), *_strides(v, unit), **constants,
            TO_PAGES=writers is not None, num_warps=WARPS,
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
    """A layer of keys or values of a writer: `pages` at its first head, `staged` at its token."""
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


_NUMBERS = [
    "k", "v", "staged", "loc_stride", "layers", "tokens", "heads",
    "k_layer", "k_slot", "k_head", "v_layer", "v_slot", "v_head",
]  # fmt: skip


@triton.jit(do_not_specialize=_NUMBERS)
def copy_kernel(  # type: ignore[no-untyped-def]
    k, v, staged, loc, loc_stride, layers, tokens, heads, writers,
    k_layer, k_slot, k_head, v_layer, v_slot, v_head,
    K_UNITS: tl.constexpr, V_UNITS: tl.constexpr, WORD: tl.constexpr, VECTOR: tl.constexpr,
    COLUMNS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, TO_PAGES: tl.constexpr,
):  # fmt: skip
    """k, v, staged: addresses. Strides of pages in units. The grid's first dimension goes over
    writers, where there are some, then their parts: keys of each layer, then values.
    """
    program = tl.program_id(0).to(tl.int64)
    tokens = tokens.to(tl.int64)  # as all offsets: pools and buffers may pass 2**31
    stage = unit_pointer(staged, WORD, VECTOR)
    if TO_PAGES:
        writer = writers + program // (2 * layers) * 3
        first_head, mine, before = tl.load(writer), tl.load(writer + 1), tl.load(writer + 2)
        stage += before * tokens * layers * (K_UNITS + V_UNITS) * VECTOR
    else:
        first_head, mine = 0, heads.to(tl.int64)
    part, rows = program % (2 * layers), tokens * mine
    if part < layers:
        pages = unit_pointer(k, WORD, VECTOR) + (part * k_layer + first_head * k_head) * VECTOR
        _copy_layer(
            pages, stage + part * rows * K_UNITS * VECTOR, loc, loc_stride, tokens, mine,
            k_slot, k_head, K_UNITS, VECTOR, COLUMNS, CHUNKS, BLOCK, TO_PAGES,
        )  # fmt: skip
    else:
        layer = part - layers
        pages = unit_pointer(v, WORD, VECTOR) + (layer * v_layer + first_head * v_head) * VECTOR
        before_values = rows * (layers * K_UNITS + layer * V_UNITS)
        _copy_layer(
            pages, stage + before_values * VECTOR, loc, loc_stride, tokens, mine,
            v_slot, v_head, V_UNITS, VECTOR, COLUMNS, CHUNKS, BLOCK, TO_PAGES,
        )  # fmt: skip
