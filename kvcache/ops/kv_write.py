"""Writes the key and value rows of new tokens into their pool slots."""

import torch
import triton
import triton.language as tl

from memsaver.ops.dispatch import Impl, use_triton

# Rows are moved as integers of the element's width: bit-exact, whatever a NaN carries.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MAX_BLOCK = 1024


def set_kv_buffer(
    k: torch.Tensor,
    v: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    loc: torch.Tensor,
    impl: Impl = "auto",
) -> None:
    """`k_buffer[loc[i]] = k[i]` and `v_buffer[loc[i]] = v[i]` for every i, bit for bit; inputs stay untouched.

    k `[n, H, D]`, v `[n, H, Dv]` of any strides, k_buffer `[N, H, D]` and v_buffer `[N, H, Dv]` with contiguous rows,
    loc int64 `[n]`, all of one device, element widths equal within each pair. Slots are not range-checked on a GPU
    (that would synchronise); a slot named twice holds either row afterwards.
    """
    if loc.shape[0] == 0:
        return
    k, k_buffer = _as_bits(k, k_buffer)
    v, v_buffer = _as_bits(v, v_buffer)
    if use_triton(impl, k_buffer.device):
        _set_triton(k, v, k_buffer, v_buffer, loc)
    else:
        k_buffer[loc] = k
        v_buffer[loc] = v


def _as_bits(rows: torch.Tensor, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    assert rows.dtype.itemsize == buffer.dtype.itemsize, f"{rows.dtype} rows for a {buffer.dtype} buffer"
    bits = _BITS[rows.dtype.itemsize]
    return rows.view(bits), buffer.view(bits)


def _set_triton(
    k: torch.Tensor, v: torch.Tensor, k_buffer: torch.Tensor, v_buffer: torch.Tensor, loc: torch.Tensor
) -> None:
    n, heads, k_dim = k.shape
    v_dim = v.shape[2]
    for buffer in (k_buffer, v_buffer):
        assert buffer.stride()[1:] == (buffer.shape[2], 1), "the rows of a KV buffer must be contiguous"
    widest = heads * max(k_dim, v_dim)
    block = min(_MAX_BLOCK, triton.next_power_of_2(widest))
    with torch.cuda.device_of(k_buffer):
        _set_kernel[(n, triton.cdiv(widest, block))](
            k,
            v,
            k_buffer,
            v_buffer,
            loc,
            loc.stride(0),
            *k.stride(),
            *v.stride(),
            k_buffer.stride(0),
            v_buffer.stride(0),
            HEADS=heads,
            K_DIM=k_dim,
            V_DIM=v_dim,
            BLOCK=block,
        )


@triton.jit
def _set_kernel(  # type: ignore[no-untyped-def]
    k,
    v,
    k_buffer,
    v_buffer,
    loc,
    loc_stride,
    k_stride_n,
    k_stride_h,
    k_stride_d,
    v_stride_n,
    v_stride_h,
    v_stride_d,
    k_row,
    v_row,
    HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)  # a pool may pass 2**31 elements: offsets are int64 throughout
    slot = tl.load(loc + i * loc_stride).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)

    inside = column < HEADS * K_DIM
    source = k + i * k_stride_n + column // K_DIM * k_stride_h + column % K_DIM * k_stride_d
    tl.store(k_buffer + slot * k_row + column, tl.load(source, mask=inside), mask=inside)

    inside = column < HEADS * V_DIM
    source = v + i * v_stride_n + column // V_DIM * v_stride_h + column % V_DIM * v_stride_d
    tl.store(v_buffer + slot * v_row + column, tl.load(source, mask=inside), mask=inside)
