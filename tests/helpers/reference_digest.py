"""The digest's definition in Python integers, one element at a time."""

import torch

from memsaver.ops.hash import GOLDEN, MASK64, MUL32

_INT_OF_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_MASK32 = (1 << 32) - 1


def element(i: int, bits: int) -> int:
    """Return the hash of the element with number `i` and stored bits `bits`."""
    k = (2 * i + 1) * GOLDEN & MASK64
    high, low = k >> 32, k & _MASK32
    x = (bits ^ bits >> 16 ^ high) * MUL32 & _MASK32
    x ^= x >> 13
    return x * (low ^ (high & ~1))


def by_definition(tensor: torch.Tensor, base: int, pitch: int | None = None) -> int:
    """Return the digest of a tensor numbered from `base`, row by row if there is a `pitch`."""
    width = tensor.element_size()
    rows = tensor.reshape(1, -1) if pitch is None else tensor.contiguous()
    mask = (1 << 8 * width) - 1
    return (
        sum(
            element(base + row * (pitch or 0) + i, value & mask)
            for row, values in enumerate(rows.view(_INT_OF_WIDTH[width]).tolist())
            for i, value in enumerate(values)
        )
        & MASK64
    )
