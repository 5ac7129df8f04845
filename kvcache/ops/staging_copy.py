"""Copies between pool pages and a staging buffer, in Triton or torch.

k `[L, N, H, D]` and v `[L, N, H, Dv]` are all layers of a pool (`kvcache.staging.pool_layers`).
They may have any element size and any strides, except that the last dimension is contiguous. Bytes
are copied unchanged. loc is int64 `[n]` with any stride. Staged bytes are uint8; a writer stages
`[K0..KL-1, V0..VL-1][token][head]`, and the writers of a range follow one another. All tensors are
on one device. Slots are not range-checked, and the functions do not synchronize on a GPU.

The kernel runs one program per layer (keys, then values) and block of tokens. It copies in units,
the largest up to 16 bytes that divides all addresses, strides and row sizes.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvcache.ops.host_copy import WORDS, unit_pointer
from memsaver.system.devices import Impl, use_triton

MAX_BLOCK = 1024  # units per program
# Limit of the second dimension of a CUDA grid; beyond it, a program copies several blocks.
MAX_BLOCKS = 65535
WARPS = 8


@dataclass(frozen=True)
class Writers:
    """The writers of a staged range and their heads."""

    # (First head in the pool, number of heads) of each writer, in staging order.
    heads: tuple[tuple[int, int], ...]
    # int64 [writers, 3] on the device: first head, number of heads, number of heads staged before.
    table: torch.Tensor

    @staticmethod
    def of(heads: Sequence[tuple[int, int]], device: torch.device | str) -> "Writers":
        """Build the writers of (first head in the pool, number of heads) pairs, in staging order.

        The pairs must not overlap. `device` is the device of the pool. The call synchronizes, so
        build writers once and not for every transfer.
        """
        ends = list(itertools.accumulate(count for _, count in heads))
        pairs = zip(heads, ends, strict=True)
        rows = [(first, count, end - count) for (first, count), end in pairs]
        covered = set[int]().union(*(range(first, first + count) for first, count in heads))
        disjoint = rows and len(covered) == ends[-1] and min(covered) >= 0
        assert disjoint, f"writers (first head, heads) {heads} are empty or overlap"
        return Writers(tuple(heads), torch.tensor(rows, device=device))

    @property
    def total(self) -> int:
        """Return the total number of heads."""
        return sum(count for _, count in self.heads)


def staged_bytes(k: torch.Tensor, v: torch.Tensor, tokens: int, heads: int) -> int:
    """Compute the staged size of tokens with `heads` heads each over all layers, in bytes."""
    return k.shape[0] * tokens * heads * sum(_row_bytes(k, v))


def gather_staged(
    k: torch.Tensor,
    v: torch.Tensor,
    loc: torch.Tensor,
    head_start: int,
    num_heads: int,
    staged: torch.Tensor,
    impl: Impl = "auto",
) -> None:
    """Copy `num_heads` heads of slots `loc`, from `head_start` on, to `staged`, in all layers.

    `staged` is contiguous uint8 `[staged_bytes(k, v, n, num_heads)]`.
    """
    _check(k, v, loc, staged, [(head_start, num_heads)])
    if len(loc) == 0:
        return
    k, v = (t.view(torch.uint8)[:, :, head_start : head_start + num_heads] for t in (k, v))
    if use_triton(impl, k.device):
        _copy_triton(k, v, loc, staged, [num_heads])
        return
    for pages, part in zip((k, v), _parts(staged, k, v, len(loc), num_heads), strict=True):
        part.copy_(pages[:, loc])


def scatter_staged(
    staged: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    loc: torch.Tensor,
    writers: Writers,
    impl: Impl = "auto",
) -> None:
    """Copy the staged heads of all writers to slots `loc`; heads without a writer stay unchanged.

    `staged` contains the bytes of each writer's `gather_staged` in order, contiguous uint8
    `[staged_bytes(k, v, n, writers.total)]`. A slot listed twice contains either of its rows
    afterwards.
    """
    _check(k, v, loc, staged, writers.heads)
    if len(loc) == 0:
        return
    k, v = k.view(torch.uint8), v.view(torch.uint8)
    if use_triton(impl, k.device):
        _copy_triton(k, v, loc, staged, [count for _, count in writers.heads], writers.table)
        return
    at = 0
    for first, count in writers.heads:
        size = staged_bytes(k, v, len(loc), count)
        parts = _parts(staged[at : at + size], k, v, len(loc), count)
        for pages, part in zip((k, v), parts, strict=True):
            pages[:, loc, first : first + count] = part
        at += size


def _parts(
    staged: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tokens: int, heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Split one writer's bytes into views of keys and values `[L, tokens, heads, row bytes]`."""
    keys, values = staged.split([k.shape[0] * tokens * heads * row for row in _row_bytes(k, v)])
    shape = (k.shape[0], tokens, heads, -1)
    return keys.view(shape), values.view(shape)


def _row_bytes(k: torch.Tensor, v: torch.Tensor) -> tuple[int, int]:
    return k.shape[3] * k.element_size(), v.shape[3] * v.element_size()


def _check(
    k: torch.Tensor,
    v: torch.Tensor,
    loc: torch.Tensor,
    staged: torch.Tensor,
    heads: Sequence[tuple[int, int]],
) -> None:
    assert k.ndim == v.ndim == 4 and k.shape[:3] == v.shape[:3], f"k {k.shape}, v {v.shape}"
    assert k.stride(3) == v.stride(3) == 1, "rows must be contiguous"
    assert loc.dtype == torch.int64 and loc.ndim == 1, (
        f"loc is {loc.dtype} of {loc.ndim} dimensions"
    )
    assert k.device == v.device == loc.device == staged.device, "tensors are on several devices"
    inside = all(first >= 0 and 1 <= count <= k.shape[2] - first for first, count in heads)
    assert inside, f"heads (first, count) {heads} are not in a pool of {k.shape[2]}"
    wanted = staged_bytes(k, v, len(loc), sum(count for _, count in heads))
    fits = staged.dtype == torch.uint8 and staged.shape == (wanted,) and staged.is_contiguous()
    assert fits, f"staged must be uint8 [{wanted}], got {staged.dtype} {staged.shape}"


def _copy_triton(
    k: torch.Tensor,
    v: torch.Tensor,
    loc: torch.Tensor,
    staged: torch.Tensor,
    counts: Sequence[int],
    writers: torch.Tensor | None = None,
) -> None:
    """Copy staged bytes to slots `loc` of k and v (uint8), or without `writers` the reverse.

    `counts` are the numbers of heads of the writers, and `writers` is `Writers.table`. The reverse
    copies all heads of k and v.
    """
    layers, tokens, unit = k.shape[0], len(loc), math.gcd(16, staged.data_ptr())
    for pages in (k, v):
        unit = math.gcd(unit, pages.data_ptr(), pages.shape[3], *pages.stride()[:3])
    widest = max(counts) * max(k.shape[3], v.shape[3]) // unit
    columns = min(MAX_BLOCK, triton.next_power_of_2(widest))
    chunks = triton.cdiv(widest, columns)
    blocks = triton.cdiv(tokens, MAX_BLOCK // columns) * chunks
    # Strides of layer, slot and head, in units.
    strides = [stride // unit for stride in (*k.stride()[:3], *v.stride()[:3])]
    with torch.cuda.device_of(k):
        copy_kernel[(len(counts) * 2 * layers, min(blocks, MAX_BLOCKS))](
            k.data_ptr(), v.data_ptr(), staged.data_ptr(), loc, loc.stride(0), layers, tokens,
            k.shape[2], writers, *strides, K_UNITS=k.shape[3] // unit, V_UNITS=v.shape[3] // unit,
            WORD=WORDS[unit], VECTOR=2 if unit == 16 else 1, COLUMNS=columns, CHUNKS=chunks,
            BLOCK=MAX_BLOCK, TO_PAGES=writers is not None, num_warps=WARPS,
        )  # fmt: skip


@triton.jit
def _copy_layer(  # type: ignore[no-untyped-def]
    pages, staged, loc, loc_stride, tokens, heads, slot_stride, head_stride,
    UNITS: tl.constexpr, VECTOR: tl.constexpr, COLUMNS: tl.constexpr, CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr, TO_PAGES: tl.constexpr,
):  # fmt: skip
    """Copy one layer of a writer's keys or values.

    `pages` points to the writer's first head in the layer, `staged` to its first token.
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
    """Copy one part (the keys or values of one layer) of one writer.

    k, v and staged are addresses; strides are in units. The first grid dimension runs over writers
    and their parts, the keys of each layer first.
    """
    program = tl.program_id(0).to(tl.int64)
    tokens = tokens.to(tl.int64)  # offsets are int64: pools and buffers may exceed 2**31 units
    stage = unit_pointer(staged, WORD, VECTOR)
    if TO_PAGES:
        writer = writers + program // (2 * layers) * 3
        first_head, count, before = tl.load(writer), tl.load(writer + 1), tl.load(writer + 2)
        stage += before * tokens * layers * (K_UNITS + V_UNITS) * VECTOR
    else:
        first_head, count = 0, heads.to(tl.int64)
    part, rows = program % (2 * layers), tokens * count
    if part < layers:
        pages = unit_pointer(k, WORD, VECTOR) + (part * k_layer + first_head * k_head) * VECTOR
        _copy_layer(
            pages, stage + part * rows * K_UNITS * VECTOR, loc, loc_stride, tokens, count,
            k_slot, k_head, K_UNITS, VECTOR, COLUMNS, CHUNKS, BLOCK, TO_PAGES,
        )  # fmt: skip
    else:
        layer = part - layers
        pages = unit_pointer(v, WORD, VECTOR) + (layer * v_layer + first_head * v_head) * VECTOR
        before_values = rows * (layers * K_UNITS + layer * V_UNITS)
        _copy_layer(
            pages, stage + before_values * VECTOR, loc, loc_stride, tokens, count,
            v_slot, v_head, V_UNITS, VECTOR, COLUMNS, CHUNKS, BLOCK, TO_PAGES,
        )  # fmt: skip
