"""Triton kernels for tests: a write that torch does not see, and a wrapper of a device function."""

import triton
import triton.language as tl

from kvcache.ops.quant import decode_fp8


@triton.jit
def increment(pointer, count, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(pointer + at, mask=at < count, other=0)
    tl.store(pointer + at, value + 1, mask=at < count)


@triton.jit
def decode_fp8_bytes(codes, out, MANTISSA: tl.constexpr):
    at = tl.arange(0, 256)
    tl.store(out + at, decode_fp8(tl.load(codes + at), MANTISSA))
