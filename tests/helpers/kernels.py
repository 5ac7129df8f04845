"""Triton kernels that tests write memory with, behind everybody's back."""

import triton
import triton.language as tl


@triton.jit
def increment(pointer, count, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(pointer + at, mask=at < count, other=0)
    tl.store(pointer + at, value + 1, mask=at < count)
