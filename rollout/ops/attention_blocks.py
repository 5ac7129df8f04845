"""Cuts the kernels of paged attention into programs: compile-time arguments, tuned for Hopper."""

from typing import Any

import torch
import triton
from torch import Tensor

MAX_HEADS = 16  # query heads of a decode program, at most


def is_wide(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
    """Tells whether everything is widened to fp32; otherwise products are those of the
    half-precision tensors.
    """
    stored = {k_cache.dtype, v_cache.dtype}
    half = q.dtype in (torch.bfloat16, torch.float16) and stored <= {q.dtype, torch.uint8}
    return not (half and q.is_cuda)


def is_latent(k_cache: Tensor, v_cache: Tensor) -> bool:
    """Tells whether values are the first elements of their keys, in the same memory."""
    same = k_cache.data_ptr() == v_cache.data_ptr() and k_cache.stride() == v_cache.stride()
    return same and k_cache.dtype == v_cache.dtype and v_cache.shape[2] < k_cache.shape[2]


def decode_blocks(
    group: int, dim: int, value_dim: int, wide: bool, latent: bool = False, fp8: int = 0
) -> dict[str, Any]:
    """Compile-time arguments of `decode_split`.

    Only tensor cores need 16 rows; elsewhere padding rows cost time.
    """
    constants = _dims(group, dim, value_dim, wide, latent, fp8)
    rows = min(MAX_HEADS, triton.next_power_of_2(group))
    # half for the slots, half for what hangs on them: 2 blocks or 1
    stages = 5 if constants["BLOCK_D"] <= 128 else 3
    if wide:
        block_n = 32 if constants["BLOCK_V"] <= 256 else 16
        warps = 4 if rows * constants["BLOCK_V"] <= 1024 else 8
    else:
        # more latent rows at once are spilled while they are converted
        rows, block_n, warps = MAX_HEADS, 32 if fp8 and latent else 64, 4
    tuning = {"num_warps": warps, "num_stages": stages}
    return {**constants, "BLOCK_G": rows, "BLOCK_N": block_n, **tuning}


def combine_warps(block_v: int) -> int:
    """Warps of a `decode_combine` program: a few registers of each thread for the rows of all
    splits.
    """
    return max(1, block_v // 128)


def prefill_blocks(
    group: int,
    dim: int,
    value_dim: int,
    wide: bool,
    latent: bool = False,
    fp8: int = 0,
    windowed: bool = False,
) -> dict[str, Any]:
    """Compile-time arguments of `prefill`.

    A program computes BLOCK_M rows (query token, head), whatever the batch.
    """
    constants = _dims(group, dim, value_dim, wide, latent, fp8)
    # sums of 512 elements a row: what is just not spilled
    if latent and constants["BLOCK_D"] > 128:
        block_m, block_n = (16, 16) if wide else (16 if fp8 > 0 else 32, 32)
        tuning = {"num_warps": 8, "num_stages": 1 if wide else 3}
    elif wide:
        # without tensor cores registers are the limit: of 128 two programs fit, and none is spilled
        block_m = 64 if constants["BLOCK_D"] <= 64 else 32
        block_n = 64 if constants["BLOCK_D"] == 128 else 32
        # three loops would spill
        tuning = {"num_warps": 8, "num_stages": 2, "maxnreg": 192 if windowed else 128}
    else:
        block_m, block_n = 128, 64 if constants["BLOCK_D"] <= 128 else 32
        tuning = {"num_warps": 8, "num_stages": 3}
    return {**constants, "WINDOWED": windowed, "BLOCK_M": block_m, "BLOCK_N": block_n, **tuning}


def _dims(
    group: int, dim: int, value_dim: int, wide: bool, latent: bool, fp8: int
) -> dict[str, Any]:
    """DIM: width of keys, without the tail of latent rows.

    TAIL: its width, 0 where values have rows of their own.
    """
    tail = dim - value_dim if latent else 0
    widths = (dim - tail, value_dim, tail)
    padded = (max(16, triton.next_power_of_2(width)) for width in widths)
    return {
        "GROUP": group,
        "WIDE": wide,
        "FP8": fp8,
        **dict(zip(("DIM", "VALUE_DIM", "TAIL"), widths, strict=True)),
        **dict(zip(("BLOCK_D", "BLOCK_V", "BLOCK_T"), padded, strict=True)),
    }
