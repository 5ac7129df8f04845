"""Operations whose result for a row is bitwise independent of the other rows.

These are dense products, RMS norms with or without a residual addition, and the gated activation of
MLPs.

For few rows, cuBLAS splits the inner dimension of a product over several programs, which changes
the order of rounding. cuBLASLt without this split computes a row of a half-precision product with
the same bits for any number of rows, with two exceptions at few rows: for some shapes it only has a
kernel that is up to eleven times slower, and the bits of a single row may differ. `product_probe`
finds these cases. On a GPU, products of fp32 tensors keep the library's choice. On the CPU, rows
are padded to a multiple of `CPU_ROWS`, and weights with fewer outputs to `CPU_ROWS`, so that a rank
with a part of the outputs computes the bits of the whole weight.

Norm and activation have a torch reference and a Triton kernel. As in transformers, the norm is fp32
up to the weight and the model dtype from there on. The kernel rounds at the same points; only the
order of its sum of squares differs. A program computes one wide row or several short ones
(attention heads). With `zero_centred`, the gain is 1 + weight, in fp32, as in Qwen3-Next.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from memsaver.ops.layout import round_up
from memsaver.system.devices import Impl, use_triton
from rollout.ops.chain_product import chain_product

CPU_ROWS = 16  # fewer rows or outputs of fp32 may take another path through the library
_TILE = 1024  # elements of a norm's program, unless one row is longer
_BLOCK = 1024
_REDUCTIONS = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")

ProductKey = tuple[torch.device, torch.dtype, torch.Size, bool, bool]
padded: dict[ProductKey, tuple[int, ...]] = {}
"""Padded number of rows by number of rows, for the shapes on a device that need padding.

`product_probe` writes it, and `chained`.
"""
chained = set[ProductKey]()
"""Shapes on a device whose products are `chain_product`."""


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    wide: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply x [T, K] by the transposed weight [N, K], and add the bias [N].

    Inside `row_invariant_products`, the bits of a row depend only on that row. With `wide`, the
    result is the fp32 sums of the exact products, not rounded to x's dtype. `out`, if given,
    receives the result. `bias` must be None with `wide` or `out`, which ignore it.
    """
    count, key = x.shape[0], product_key(weight, bias, wide)
    if key in chained:
        return chain_product(x, weight, bias, wide=wide, out=out)
    if not x.is_cuda and (outputs := weight.shape[0]) < CPU_ROWS:
        weight, bias = _padded_outputs(weight, bias)
        result = linear(x, weight, bias, wide=wide)[:, :outputs].contiguous()
        return result if out is None else out.copy_(result)
    chosen = padded.get(key, ())
    if count < len(chosen):
        rows = chosen[count]
    else:
        rows = count if x.is_cuda else round_up(count, CPU_ROWS)
    if rows == count:
        return library_product(x, weight, bias, wide, out)
    result = library_product(F.pad(x, (0, 0, 0, rows - count)), weight, bias, wide)[:count]
    return result if out is None else out.copy_(result)


def add_parts(parts: Iterable[Tensor]) -> Tensor:
    """Add partial sums in order, and round after each addition."""
    first, *others = parts
    return sum(others, first)


def _padded_outputs(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    spare = CPU_ROWS - len(weight)
    return F.pad(weight, (0, 0, 0, spare)), None if bias is None else F.pad(bias, (0, spare))


def product_key(weight: Tensor, bias: Tensor | None, wide: bool) -> ProductKey:
    """Return the key of a product's shape in `padded` and `chained`."""
    return weight.device, weight.dtype, weight.shape, bias is not None, wide


def library_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, wide: bool, out: Tensor | None = None
) -> Tensor:
    """Compute `linear` by the device's library, for exactly these rows."""
    if wide and x.is_cuda and x.dtype != torch.float32:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    if wide:
        return F.linear(x.float(), weight.float())
    return F.linear(x, weight, bias) if out is None else torch.mm(x, weight.t(), out=out)


@contextlib.contextmanager
def row_invariant_products(device: torch.device) -> Iterator[None]:
    """Launch half-precision products on a GPU without split-K, and restore torch's settings.

    The settings are global: they apply to products that other threads launch meanwhile.
    """
    if device.type != "cuda":
        yield
        return
    matmul, library = torch.backends.cuda.matmul, torch.backends.cuda.preferred_blas_library()
    saved = {
        name: (getattr(matmul, name), getattr(matmul, f"{name}_split_k")) for name in _REDUCTIONS
    }
    try:
        torch.backends.cuda.preferred_blas_library("cublaslt")
        for name in _REDUCTIONS:
            setattr(matmul, name, (False, False))
        yield
    finally:
        for name, setting in saved.items():
            setattr(matmul, name, setting)
        torch.backends.cuda.preferred_blas_library(library)


def same_products(device: torch.device) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return a function whose contexts launch products with the bits of those launched now."""
    matmul = torch.backends.cuda.matmul
    if device.type != "cuda" or getattr(matmul, f"{_REDUCTIONS[0]}_split_k"):
        return contextlib.nullcontext
    return partial(row_invariant_products, device)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, impl: Impl = "auto", *, zero_centred: bool = False
) -> Tensor:
    """Compute weight * x / rms(x) over the last dimension, contiguous [..., H] of x's dtype.

    The last dimension of x [..., H] is contiguous; other strides of a matrix or a [T, heads, H]
    view are arbitrary. weight is [H], of x's dtype. `eps` is added to the mean of squares. With
    `zero_centred`, the gain is 1 + weight, in fp32.
    """
    if use_triton(impl, x.device):
        return _norm_triton(x, None, weight, eps, zero_centred)[0]
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * (1 + weight.float())).to(x.dtype) if zero_centred else weight * wide.to(x.dtype)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    impl: Impl = "auto",
    *,
    zero_centred: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return rms_norm(x + residual) and x + residual, both [..., H].

    The sum is rounded to the model dtype before the norm. Arguments as in `rms_norm`.
    """
    if use_triton(impl, x.device):
        assert x.shape == residual.shape and x.dtype == residual.dtype
        return _norm_triton(x, residual, weight, eps, zero_centred)
    residual = x + residual
    return rms_norm(residual, weight, eps, "torch", zero_centred=zero_centred), residual


def _norm_triton(
    x: Tensor, added: Tensor | None, weight: Tensor, eps: float, zero_centred: bool
) -> tuple[Tensor, Tensor]:
    """Return the norm of x + added, and x + added itself, which is undefined without `added`."""
    assert weight.dtype == x.dtype and weight.is_contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = out if added is None else torch.empty_like(out)
    residual = x if added is None else added
    size = x.shape[-1]
    x, residual = (part if part.dim() == 3 else part.reshape(-1, 1, size) for part in (x, residual))
    assert x.stride(2) == residual.stride(2) == 1, "the elements of a row must be contiguous"
    heads, rows = x.shape[1], x.shape[0] * x.shape[1]
    block = triton.next_power_of_2(size)
    per_program = max(1, _TILE // block)
    with torch.cuda.device_of(out):
        _rms_norm[(triton.cdiv(rows, per_program),)](
            x, residual, weight, out, total, eps, rows, heads,
            x.stride(0), x.stride(1), residual.stride(0), residual.stride(1),
            SIZE=size, BLOCK=block, ROWS=per_program, ADD=added is not None,
            ZERO_CENTRED=zero_centred, num_warps=min(16, max(1, block * per_program // 256)),
            enable_fp_fusion=False,
        )  # fmt: skip
    return out, total


@triton.jit(do_not_specialize=["rows"])
def _rms_norm(  # type: ignore[no-untyped-def]
    x, residual, weight, out, total, eps, rows, heads,
    stride_x, stride_x_head, stride_residual, stride_residual_head, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr, ZERO_CENTRED: tl.constexpr,
):  # fmt: skip
    """Compute `rms_norm`, with ADD `add_rms_norm`, of ROWS rows.

    Programs: (block of ROWS rows of the flattened leading dimensions).
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < SIZE)[None, :]
    token, head = (row // heads).to(tl.int64), row % heads
    to = row.to(tl.int64)[:, None] * SIZE + column[None, :]
    dtype = out.dtype.element_ty

    source = x + (token * stride_x + head * stride_x_head)[:, None] + column[None, :]
    value = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        source = (
            residual
            + (token * stride_residual + head * stride_residual_head)[:, None]
            + column[None, :]
        )
        rounded = (value + tl.load(source, mask=inside, other=0.0).to(tl.float32)).to(dtype)
        tl.store(total + to, rounded, mask=inside)
        value = rounded.to(tl.float32)
    # multiply by 1 / SIZE, as torch.mean does on a GPU
    scale = tl.rsqrt(tl.sum(value * value, 1) * (1.0 / SIZE) + eps)
    normed = value * scale[:, None]
    gain = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    if ZERO_CENTRED:
        gain += 1.0
    else:
        normed = normed.to(dtype).to(tl.float32)
    tl.store(out + to, (gain[None, :] * normed).to(dtype), mask=inside)


def silu_mul(gate: Tensor, up: Tensor, impl: Impl = "auto") -> Tensor:
    """Compute silu(gate) * up, contiguous [T, I].

    silu is computed in fp32 and rounded to the model dtype before the product, as in transformers.
    Both are [T, I], of the same strides, such as halves of [T, 2I]. Elements of a row are
    contiguous; the row stride is arbitrary.
    """
    if not use_triton(impl, gate.device):
        wide = gate.float()  # torch's own silu gives the last elements of a row other bits
        return (wide / (1 + (-wide).exp())).to(gate.dtype) * up
    tokens, size = gate.shape
    assert gate.stride() == up.stride() and gate.stride(1) == 1
    out = torch.empty((tokens, size), dtype=gate.dtype, device=gate.device)
    block = min(_BLOCK, triton.next_power_of_2(size))
    with torch.cuda.device_of(out):
        _silu_mul[(tokens, triton.cdiv(size, block))](
            gate, up, out, gate.stride(0), size, BLOCK=block, enable_fp_fusion=False
        )
    return out


@triton.jit
def _silu_mul(gates, ups, out, stride, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute `silu_mul`. Programs: (token, block of the intermediate size)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(gates + token * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(ups + token * stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * size + column, gated(gate, up, out.dtype.element_ty), mask=inside)


@triton.jit
def gated(gate, up, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return silu(gate) * up of fp32 values; silu and the product are rounded to `dtype`."""
    return (tl.div_rn(gate, 1.0 + accurate_exp(-gate)).to(dtype).to(tl.float32) * up).to(dtype)


@triton.jit
def accurate_exp(x):  # type: ignore[no-untyped-def]
    """Return e**x of fp32 x to 2 ulp; tl.exp is off by |x| / 2 ulp as it rounds x * log2(e).

    x = n * ln(2) + rest, where ln(2) is a sum of two parts, the first with few enough bits that its
    product with n is exact. The result is 0 below -87, near the subnormal numbers, and infinite
    above 88.
    """
    low, high = x < -87.0, x > 88.0
    safe = tl.where(low | high, 0.0, x)
    n = tl.floor(safe * 1.4426950408889634 + 0.5)
    rest = (safe - n * 0.693145751953125) - n * 1.4286068203094172e-06
    power = tl.exp2(rest * 1.4426950408889634) * tl.exp2(n)
    return tl.where(low, 0.0, tl.where(high, float("inf"), power))
