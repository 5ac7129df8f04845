"""fp8 and FP4 (E2M1) arithmetic in torch: the definition that the Triton kernels equal bit for bit.

**fp8.** stored = round_to_even(clamp(x * (1 / scale))), 1 / scale rounded to fp32, the product in
fp32, clamped to the largest finite value; NaN becomes 0. Read: fp8 value * scale in fp32, then
rounded to the wanted dtype.

**FP4.** A magnitude code 0..7 stands for {0, .5, 1, 1.5, 2, 3, 4, 6}; bit 3 is the sign. The code
is the number of bounds {.25, .75, 1.25, 1.75, 2.5, 3.5, 5} that |x| / 2**e passes; exactly on a
bound the even code is taken, as IEEE rounding does: .25, 1.25, 2.5 and 5 go down, .75, 1.75 and 3.5
up. Two codes a byte, the element with the even index in the low nibble. 16 neighbours share e, the
least exponent with amax <= 6 * 2**e, that is ceil(log2(amax / 6)), found without a logarithm and
kept within -125..125: every value read is zero or a normal fp32. Stored as e + 127; a block of
zeros stores 0, and scale byte 0 reads as zeros whatever the codes, so a zeroed page reads as zeros.
NaN becomes 0, infinity the largest value (its neighbours then vanish), elements keep their sign.
"""

import torch

from kvcache.config import FP4_BLOCK, FP4_MAX_EXPONENT
from memsaver.common.machine import Impl, use_triton

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
FP4_LIMIT = 6 * 2.0**FP4_MAX_EXPONENT


def quantise_fp8(
    rows: torch.Tensor, inverse_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """`rows` (any shape, floating) times `inverse_scale` (fp32, one element) as fp8, saturated."""
    limit = torch.finfo(dtype).max
    scaled = (rows.float() * inverse_scale).nan_to_num(0.0, limit, -limit)
    return scaled.clamp(-limit, limit).to(dtype)


def read_fp8(
    buffer: torch.Tensor,
    loc: torch.Tensor,
    scale: torch.Tensor,
    stored: torch.dtype,
    dtype: torch.dtype,
    impl: Impl = "auto",
) -> torch.Tensor:
    """Rows `loc` (int64 `[n]`) of a uint8 buffer `[N, H, D]` of fp8 `stored`, times `scale` (fp32,
    one element), as `dtype` `[n, H, D]`, saturated. Contiguous rows; `dtype` as in `read_fp4`.
    """
    if use_triton(impl, buffer.device) and loc.shape[0]:
        from kvcache.ops.quant_triton import read_fp8_triton

        return read_fp8_triton(buffer, loc, scale, stored, dtype)
    limit = torch.finfo(dtype).max
    return (buffer[loc].view(stored).float() * scale).clamp(-limit, limit).to(dtype)


def quantise_fp4(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`rows` `[..., W]`, floating -> codes uint8 `[..., W / 2]`, scales uint8 `[..., W / 16]`."""
    blocks = rows.float().nan_to_num(0.0, FP4_LIMIT, -FP4_LIMIT).clamp(-FP4_LIMIT, FP4_LIMIT)
    blocks = blocks.unflatten(-1, (-1, FP4_BLOCK))
    amax = blocks.abs().amax(-1)
    # amax = mantissa * 2**exponent, mantissa in [.5, 1): it fits 6 * 2**e = .75 * 2**(e + 3)
    mantissa, exponent = torch.frexp(amax)
    e = (exponent - 3 + (mantissa > 0.75)).clamp(-FP4_MAX_EXPONENT, FP4_MAX_EXPONENT)
    scaled = torch.ldexp(blocks, -e.unsqueeze(-1)).abs()
    codes = sum(
        (scaled > bound if i % 2 == 0 else scaled >= bound).to(torch.uint8)
        for i, bound in enumerate(FP4_BOUNDS)
    )
    codes = codes + 8 * blocks.signbit().to(torch.uint8)
    packed = codes[..., ::2] | codes[..., 1::2] << 4
    return packed.flatten(-2), torch.where(amax == 0, 0, e + 127).to(torch.uint8)


def dequantise_fp4(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of `quantise_fp4`: `[..., W]` of `dtype`, saturated in fp16."""
    values = torch.tensor((*FP4_VALUES, *(-value for value in FP4_VALUES)), device=codes.device)
    pairs = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).long()
    # e + 127 is fp32's own exponent field
    factor = (scales.to(torch.int32) << 23).view(torch.float32)
    limit = torch.finfo(dtype).max
    blocks = values[pairs].unflatten(-1, (-1, FP4_BLOCK)) * factor.unsqueeze(-1)
    # NaN and infinity: only from scale bytes that were never written
    return blocks.flatten(-2).nan_to_num(0.0, limit, -limit).clamp(-limit, limit).to(dtype)


def read_fp4(
    codes: torch.Tensor,
    scales: torch.Tensor,
    loc: torch.Tensor,
    dtype: torch.dtype,
    impl: Impl = "auto",
) -> torch.Tensor:
    """Rows `loc` (int64 `[n]`) of codes and block scales, uint8, as `dtype` `[n, H, D]`.

    Only the asked rows are read, and contiguous. `dtype`: float32, float16 or bfloat16.
    """
    if use_triton(impl, codes.device) and loc.shape[0]:
        from kvcache.ops.quant_triton import read_fp4_triton

        return read_fp4_triton(codes, scales, loc, dtype)
    return dequantise_fp4(codes[loc], scales[loc], dtype)
