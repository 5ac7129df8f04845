"""fp8 and FP4 (E2M1) arithmetic, defined by the torch code; the Triton code is bit-identical.

The Triton code works on the bits of fp32. It needs no fp8 hardware and avoids the fp8 conversion of
Triton's interpreter, which is wrong.

**fp8.** The stored value is round_to_even(clamp(x * (1 / scale))). 1 / scale is rounded to fp32,
the product is computed in fp32 and clamped to the largest finite fp8 value. NaN and infinity become
fp8's NaN, so that attention, and then the log-probabilities, show them. A read multiplies the fp8
value by the scale in fp32 and rounds to the requested dtype.

**FP4.** Magnitude codes 0 to 7 stand for {0, .5, 1, 1.5, 2, 3, 4, 6}; bit 3 is the sign. The code
is the number of bounds {.25, .75, 1.25, 1.75, 2.5, 3.5, 5} that |x| / 2**e exceeds. A value exactly
on a bound rounds to the even code as in IEEE: .25, 1.25, 2.5 and 5 round down, .75, 1.75 and 3.5
up. A byte contains two codes, the element with the even index in the low nibble.

A block of 16 adjacent elements shares the exponent e, the smallest with amax <= 6 * 2**e, which is
ceil(log2(amax / 6)). It is computed without a logarithm and kept within -125..125, so that every
value read is zero or a normal fp32. The scale byte is e + 127. A block of zeros stores 0, and a
scale byte of 0 reads as zeros for any codes, so a zeroed page reads as zeros. A block with NaN or
infinity stores a scale byte of 255, which reads as NaN for any codes. Elements keep their sign.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcache.config import FP4_BLOCK, FP4_MAX_EXPONENT
from memsaver.system.devices import Impl, use_triton

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
FP4_LIMIT = 6 * 2.0**FP4_MAX_EXPONENT
FP4_NAN = 255  # scale byte
_MAX_EXPONENT = tl.constexpr(FP4_MAX_EXPONENT)
_MAX_BLOCK = 1024
# On an H100, writes and reads reach 84 % and 81 % of the copy rate with one warp, 73 % with four.
FP4_WARPS = 1


def quantise_fp8(rows: Tensor, inverse_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply floating-point rows by `inverse_scale` (fp32, one element) and saturate to fp8.

    Elements that are not finite become NaN.
    """
    limit = torch.finfo(dtype).max
    scaled = (rows.float() * inverse_scale).clamp(-limit, limit)
    return scaled.masked_fill(~rows.isfinite(), math.nan).to(dtype)


def read_fp8(
    buffer: Tensor,
    loc: Tensor,
    scale: Tensor,
    stored: torch.dtype,
    dtype: torch.dtype,
    impl: Impl = "auto",
) -> Tensor:
    """Dequantize rows of an fp8 buffer into contiguous `[n, H, D]` of `dtype`, saturated.

    `buffer` is uint8 `[N, H, D]` with a contiguous last dimension and elements of the fp8 dtype
    `stored`, which are multiplied by `scale`, one fp32 element. `loc` is int64 `[n]`, and `dtype`
    is float32, float16 or bfloat16.
    """
    limit = torch.finfo(dtype).max
    if not use_triton(impl, buffer.device) or not loc.shape[0]:
        return (buffer[loc].view(stored).float() * scale).clamp(-limit, limit).to(dtype)
    assert buffer.stride(2) == 1
    n, (heads, dim) = loc.shape[0], buffer.shape[1:]
    out = torch.empty((n, heads, dim), dtype=dtype, device=buffer.device)
    block = min(_MAX_BLOCK, triton.next_power_of_2(heads * dim))
    with torch.cuda.device_of(buffer):
        _read_fp8_kernel[(n, triton.cdiv(heads * dim, block))](
            buffer, scale, loc, out, loc.stride(0), *buffer.stride()[:2],
            HEADS=heads, DIM=dim, BLOCK=block, LIMIT=limit,
            MANTISSA=3 if stored == torch.float8_e4m3fn else 2,
        )  # fmt: skip
    return out


def quantise_fp4(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize floating-point rows `[..., W]` to FP4; W is a multiple of 16.

    Returns:
        Codes uint8 `[..., W / 2]` and block scales uint8 `[..., W / 16]`.
    """
    blocks = rows.float().nan_to_num(0.0, FP4_LIMIT, -FP4_LIMIT).clamp(-FP4_LIMIT, FP4_LIMIT)
    blocks = blocks.unflatten(-1, (-1, FP4_BLOCK))
    amax = blocks.abs().amax(-1)
    # amax = mantissa * 2**exponent with mantissa in [.5, 1), to be <= 6 * 2**e = .75 * 2**(e + 3).
    mantissa, exponent = torch.frexp(amax)
    e = (exponent - 3 + (mantissa > 0.75)).clamp(-FP4_MAX_EXPONENT, FP4_MAX_EXPONENT)
    scaled = torch.ldexp(blocks, -e.unsqueeze(-1)).abs()
    codes = sum(
        (scaled > bound if i % 2 == 0 else scaled >= bound).to(torch.uint8)
        for i, bound in enumerate(FP4_BOUNDS)
    )
    codes = codes + 8 * blocks.signbit().to(torch.uint8)
    packed = codes[..., ::2] | codes[..., 1::2] << 4
    scale = torch.where(amax == 0, 0, e + 127)
    finite = rows.isfinite().unflatten(-1, (-1, FP4_BLOCK)).all(-1)
    return packed.flatten(-2), torch.where(finite, scale, FP4_NAN).to(torch.uint8)


def dequantise_fp4(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert codes and block scales of `quantise_fp4` to `[..., W]` of `dtype`, saturated."""
    values = torch.tensor((*FP4_VALUES, *(-value for value in FP4_VALUES)), device=codes.device)
    pairs = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).long()
    # The scale byte e + 127 is the exponent field of fp32.
    factor = (scales.to(torch.int32) << 23).view(torch.float32)
    limit = torch.finfo(dtype).max
    blocks = values[pairs].unflatten(-1, (-1, FP4_BLOCK)) * factor.unsqueeze(-1)
    blocks = blocks.masked_fill((scales == FP4_NAN).unsqueeze(-1), math.nan)
    return blocks.flatten(-2).clamp(-limit, limit).to(dtype)


def read_fp4(
    codes: Tensor, scales: Tensor, loc: Tensor, dtype: torch.dtype, impl: Impl = "auto"
) -> Tensor:
    """Dequantize rows of an FP4 buffer into contiguous `[n, H, D]` of `dtype`, saturated.

    Only the requested rows are read. `codes` are uint8 `[N, H, D / 2]` and `scales` uint8
    `[N, H, D / 16]`, both with a contiguous last dimension; `loc` is int64 `[n]`. `dtype` is
    float32, float16 or bfloat16.
    """
    if not use_triton(impl, codes.device) or not loc.shape[0]:
        return dequantise_fp4(codes[loc], scales[loc], dtype)
    assert codes.stride(2) == scales.stride(2) == 1
    n, heads, dim = loc.shape[0], codes.shape[1], codes.shape[2] * 2
    out = torch.empty((n, heads, dim), dtype=dtype, device=codes.device)
    blocks = heads * dim // FP4_BLOCK
    at_once = min(_MAX_BLOCK // FP4_BLOCK, triton.next_power_of_2(blocks))
    with torch.cuda.device_of(codes):
        _read_fp4_kernel[(n, triton.cdiv(blocks, at_once))](
            codes, scales, loc, out, loc.stride(0), *codes.stride()[:2], *scales.stride()[:2],
            HEADS=heads, DIM=dim, BLOCKS=at_once, LIMIT=torch.finfo(dtype).max, num_warps=FP4_WARPS,
        )  # fmt: skip
    return out


@triton.jit
def saturate(x, LIMIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Clamp fp32 to [-LIMIT, LIMIT]; NaN becomes 0."""
    x = tl.where(x == x, x, 0.0)
    return tl.minimum(tl.maximum(x, -LIMIT), LIMIT)


@triton.jit
def encode_fp8(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Round saturated fp32 to fp8 bits as uint8; (MANTISSA, BIAS): e4m3 (3, 7), e5m2 (2, 15)."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Normal numbers: add half an ulp and drop 23 - MANTISSA bits. A carry correctly increments the
    # exponent.
    DROP: tl.constexpr = 23 - MANTISSA
    odd = (magnitude >> DROP) & 1
    normal = ((magnitude + ((1 << (DROP - 1)) - 1) + odd) >> DROP) - ((127 - BIAS) << MANTISSA)
    # Subnormal numbers: adding a number whose ulp is fp8's smallest step makes the hardware round
    # to that step.
    MAGIC: tl.constexpr = (127 + 24 - BIAS - MANTISSA) << 23
    magic = tl.full(magnitude.shape, MAGIC, tl.int32)
    rounded = magnitude.to(tl.float32, bitcast=True) + magic.to(tl.float32, bitcast=True)
    small = rounded.to(tl.int32, bitcast=True) - MAGIC
    code = tl.where(magnitude < ((128 - BIAS) << 23), small, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def decode_fp8(code, MANTISSA: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convert fp8 bits to fp32 exactly, including NaN and infinity; MANTISSA: e4m3 3, e5m2 2."""
    magnitude = code.to(tl.int32) & 0x7F
    # One multiplication rebiases the exponent of normal and subnormal numbers: by 2**120 for e4m3,
    # by 2**112 for e5m2.
    REBIAS: tl.constexpr = (127 + 128 - (1 << (6 - MANTISSA))) << 23
    factor = tl.full(magnitude.shape, REBIAS, tl.int32).to(tl.float32, bitcast=True)
    finite = (magnitude << (23 - MANTISSA)).to(tl.float32, bitcast=True) * factor
    special = 0x7F800000 | ((magnitude & 3) << 21)
    bits = tl.where(
        magnitude < (0x7F if MANTISSA == 3 else 0x7C), finite.to(tl.int32, bitcast=True), special
    )
    return (bits | ((code.to(tl.int32) & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def fp4_scale(even, odd):  # type: ignore[no-untyped-def]
    """Compute scale bytes int32 [B] of fp32 blocks without NaN, even and odd elements [B, 8]."""
    amax = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), 1)
    bits = amax.to(tl.int32, bitcast=True)
    # amax = 1.m * 2**x <= 6 * 2**e = 1.5 * 2**(e + 2), so e is x - 2, plus one if 1.m exceeds 1.5.
    e = (bits >> 23) - 127 - 2 + ((bits & 0x7FFFFF) > 0x400000).to(tl.int32)
    e = tl.minimum(tl.maximum(e, -_MAX_EXPONENT), _MAX_EXPONENT)
    return tl.where(bits == 0, 0, e + 127)


@triton.jit
def encode_fp4(x, scale):  # type: ignore[no-untyped-def]
    """Compute saturated codes int32 [B, 8] of fp32 [B, 8] without NaN, for scale bytes [B]."""
    # 2**-e; for a block of zeros, any finite number.
    inverse = ((254 - scale) << 23).to(tl.float32, bitcast=True)
    bits = (x * inverse[:, None]).to(tl.int32, bitcast=True)
    magnitude = tl.minimum(bits & 0x7FFFFFFF, 0x40C00000)
    # The step is .5 below 2, 1 below 4 and 2 above. Adding a number with that ulp makes the
    # hardware round to it.
    binade = tl.maximum(magnitude, 0x3F800000) & 0x7F800000
    magic = binade + (22 << 23)
    rounded = magnitude.to(tl.float32, bitcast=True) + magic.to(tl.float32, bitcast=True)
    code = rounded.to(tl.int32, bitcast=True) - magic + (binade >> 22) - 254
    return code | ((bits >> 28) & 8)


@triton.jit
def decode_fp4(code, scale):  # type: ignore[no-untyped-def]
    """Convert codes int32 [B, 8] with scale bytes int32 [B] to fp32 [B, 8]."""
    magnitude = code & 7
    normal = (((magnitude >> 1) + 126) << 23) | ((magnitude & 1) << 22)
    small = tl.where(magnitude == 0, 0, 126 << 23)  # 0 and .5
    # Set the sign bit directly: Triton negates as 0 - x, which loses the sign of -0.
    bits = tl.where(magnitude < 2, small, normal) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * (scale << 23).to(tl.float32, bitcast=True)[:, None]


@triton.jit
def _read_fp4_kernel(  # type: ignore[no-untyped-def]
    codes, scales, loc, out, loc_stride, code_slot, code_head, scale_slot, scale_head,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCKS: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Dequantize BLOCKS blocks of 16 elements of one row."""
    i = tl.program_id(0).to(tl.int64)
    slot = tl.load(loc + i * loc_stride).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < HEADS * DIM // 16
    head, first = block * 16 // DIM, block * 16 % DIM
    pair = tl.arange(0, 8)
    at = slot * code_slot + (head * code_head + first // 2)[:, None] + pair[None, :]
    byte = tl.load(codes + at, mask=inside[:, None], other=0).to(tl.int32)
    scale = tl.load(
        scales + slot * scale_slot + head * scale_head + first // 16, mask=inside, other=0
    ).to(tl.int32)
    even, odd = decode_fp4(byte & 15, scale), decode_fp4(byte >> 4, scale)
    values = saturate(tl.reshape(tl.join(even, odd), (BLOCKS, 16)), LIMIT)
    values = tl.where(scale[:, None] == 255, float("nan"), values)
    to = out + i * HEADS * DIM + (block * 16)[:, None] + tl.arange(0, 16)[None, :]
    tl.store(to, values.to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _read_fp8_kernel(  # type: ignore[no-untyped-def]
    buffer, scale, loc, out, loc_stride, slot_stride, head_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    LIMIT: tl.constexpr, MANTISSA: tl.constexpr,
):  # fmt: skip
    """Dequantize BLOCK elements of one row."""
    i = tl.program_id(0).to(tl.int64)
    slot = tl.load(loc + i * loc_stride).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HEADS * DIM
    at = slot * slot_stride + (column // DIM) * head_stride + column % DIM
    value = decode_fp8(tl.load(buffer + at, mask=inside, other=0), MANTISSA) * tl.load(scale)
    limited = tl.minimum(tl.maximum(value, -LIMIT), LIMIT)
    # NaN comes from rows that were given as fp8 or never written; keep it.
    value = tl.where(value == value, limited, value)
    tl.store(out + i * HEADS * DIM + column, value.to(out.dtype.element_ty), mask=inside)
