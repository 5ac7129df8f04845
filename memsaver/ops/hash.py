"""Compute splitmix64 of int64 tensors (as uint64) and integers, the same on every device."""

import hashlib

import torch
from torch import Tensor

MASK64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
MUL32 = 0x85EBCA6B  # odd, from murmur3's finalizer; used by the digest
MUL1 = 0xBF58476D1CE4E5B9
MUL2 = 0x94D049BB133111EB


def hash_text(text: str) -> int:
    """Return the first 64 bits of the text's SHA-256."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def signed(value: int) -> int:
    """Return the int64 with the same 64 bits as `value` mod 2**64."""
    value &= MASK64
    return value - (1 << 64) if value >> 63 else value


def _xor_shift_(x: Tensor, bits: int, scratch: Tensor) -> None:
    """Compute x ^= x >>> bits in place."""
    # torch shifts int64 arithmetically: mask the copied sign bits off
    scratch = scratch.copy_(x).bitwise_right_shift_(bits).bitwise_and_((1 << (64 - bits)) - 1)
    x.bitwise_xor_(scratch)


def splitmix64_int(i: int) -> int:
    """Return the i-th output of the splitmix64 stream from 0."""
    x = ((i + 1) * GOLDEN) & MASK64
    x = ((x ^ (x >> 30)) * MUL1) & MASK64
    x = ((x ^ (x >> 27)) * MUL2) & MASK64
    return x ^ (x >> 31)


def splitmix64(i: Tensor) -> Tensor:
    """Return `splitmix64_int` of every element of int64 `i`."""
    x = i.add(1).mul_(signed(GOLDEN))
    scratch = torch.empty_like(x)
    _xor_shift_(x, 30, scratch)
    x.mul_(signed(MUL1))
    _xor_shift_(x, 27, scratch)
    x.mul_(signed(MUL2))
    _xor_shift_(x, 31, scratch)
    return x
