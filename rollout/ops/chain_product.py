"""The definition of an exact run's matrix products, as a Triton kernel.

Element (m, n) of x [M, K] times the transposed weight [N, K] is one fp32 sum over ascending K, to
which the bias is added in fp32, and which is rounded once. Neither the number of rows nor the tile
changes its bits. cuBLASLt without split-K computes the same bits on an H100, in less time.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_ROWS = (16, 64, 128)
"""Rows of the tiles: the smallest tile that has room for all rows is used, or the largest."""
_TILES: dict[int, dict[str, Any]] = {
    16: {"BLOCK_N": 32, "BLOCK_K": 128, "num_warps": 4, "num_stages": 4},
    64: {"BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4},
    128: {"BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3},
}
_GROUP = 8  # tiles of rows that are computed together, because they share weights


def chain_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    wide: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply x [M, K] by the transposed weight [N, K], and add the bias [N].

    All are bf16 or fp16. With `wide`, the result is the fp32 sums. `out`, if given, receives the
    result [M, N]; its rows are contiguous.
    """
    (rows, depth), columns = x.shape, len(weight)
    assert x.dtype == weight.dtype != torch.float32 and (bias is None or bias.is_contiguous())
    x, weight = (part if part.stride(1) == 1 else part.contiguous() for part in (x, weight))
    if out is None:
        out = x.new_empty((rows, columns), dtype=torch.float32 if wide else x.dtype)
    height = next((tile for tile in TILE_ROWS if rows <= tile), TILE_ROWS[-1])
    tile = _TILES[height]
    programs = triton.cdiv(rows, height) * triton.cdiv(columns, tile["BLOCK_N"])
    if programs:
        with torch.cuda.device_of(x):
            _chain[(programs,)](
                x, weight, bias, out, rows, columns, depth,
                x.stride(0), weight.stride(0), out.stride(0),
                BLOCK_M=height, GROUP=_GROUP, EVEN=depth % tile["BLOCK_K"] == 0,
                WIDE=not x.is_cuda, **tile,
            )  # fmt: skip
    return out


@triton.jit
def cell(program, rows, columns, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return row and column of a program: GROUP rows column by column, then the next GROUP."""
    size = GROUP * columns
    first = program // size * GROUP
    height = tl.minimum(rows - first, GROUP)
    return first + program % size % height, program % size // height


@triton.jit(do_not_specialize=["rows"])
def _chain(  # type: ignore[no-untyped-def]
    x, weight, bias, out, rows, columns, depth, stride_x, stride_weight, stride_out,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    EVEN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute a tile of `chain_product`.

    Programs: (tile), see `cell`. WIDE is for the interpreter, whose fp32 sums depend on the
    tile: sums are fp64, rounded to fp32.
    """
    row, column = cell(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N), GROUP)
    row = row * BLOCK_M + tl.arange(0, BLOCK_M)
    column = column * BLOCK_N + tl.arange(0, BLOCK_N)
    # lanes past the end repeat the last row or column, and are not stored
    source = tl.minimum(row, rows - 1).to(tl.int64)
    words = tl.minimum(column, columns - 1)
    k = tl.arange(0, BLOCK_K)
    left = x + source[:, None] * stride_x + k[None, :]
    right = weight + words[None, :].to(tl.int64) * stride_weight + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float64 if WIDE else tl.float32)
    for start in range(0, depth, BLOCK_K):
        here = k < depth - start
        a = _load(left, here[None, :], EVEN, WIDE)
        b = _load(right, here[:, None], EVEN, WIDE)
        total = tl.dot(a, b, total, out_dtype=total.dtype)
        left += BLOCK_K
        right += BLOCK_K
    total = total.to(tl.float32)
    if bias is not None:  # known at compile time
        total += tl.load(bias + words).to(tl.float32)[None, :]
    to = out + row[:, None].to(tl.int64) * stride_out + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _load(at, mask, EVEN: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    value = tl.load(at) if EVEN else tl.load(at, mask=mask, other=0.0)
    return value.to(tl.float64) if WIDE else value
