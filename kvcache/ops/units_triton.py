"""Moving bytes in units: words of up to 8 bytes, or two of 8 in one access of 16 bytes."""

import triton
import triton.language as tl

WORDS = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64, 16: tl.uint64}  # by bytes of a unit


@triton.jit
def unit_pointer(address, WORD: tl.constexpr, VECTOR: tl.constexpr):  # type: ignore[no-untyped-def]
    """An address as a pointer to words; VECTOR of them are a unit."""
    pointer = address.to(tl.int64).to(tl.pointer_type(WORD))
    if VECTOR == 2:
        pointer = tl.multiple_of(pointer, 16)
    return pointer
