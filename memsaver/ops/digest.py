"""Define the digest of weights, which does not depend on their layout; compute it with torch.

digest = sum mod 2^64 over elements of hash(global element index i, stored bits b zero-extended to
32):

    k = (2 i + 1) * GOLDEN mod 2^64, hi and lo its halves
    x = (b ^ (b >> 16) ^ hi) * MUL32 mod 2^32;  x = x ^ (x >> 13)
    hash = x * (lo ^ (hi & ~1)), all 64 bits of it

A sum does not depend on order, so slices, ranks and chunks can be digested separately and added.
The index inside the hash makes a swap, shift or repetition visible. For a fixed i the hash is
injective in b (every step is a bijection, the last factor is odd), so one changed element is always
noticed. The hash is about ten integer instructions, so a GPU can digest data while it copies. The
digest detects errors, not forgeries.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from memsaver.ops.hash import GOLDEN, MASK64, MUL32, signed

# elements: fits in cache, and is not above torch's grain size, so that no operation wakes threads
CHUNK = 1 << 15
_CHUNK_CUDA = 1 << 21  # 16 MiB a buffer: few launches, no large temporaries
_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
_MASK32 = (1 << 32) - 1


def blocks(rows: int, width: int, limit: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices (rows, columns) that cut a grid into blocks of at most `limit` elements."""
    across = max(1, min(width, limit))
    down = limit // across
    for row in range(0, rows, down):
        for column in range(0, width, across):
            yield slice(row, min(row + down, rows)), slice(column, min(column + across, width))


def digest_by_torch(grid: Tensor, index_base: int, index_pitch: int) -> int:
    """Return the digest, in [0, 2**64), of a tensor [rows, width].

    Elements have 1, 2 or 4 bytes, and any strides. Their numbers begin at `index_base` and increase
    by `index_pitch` from row to row. Blocks have one size, and are smaller only at the edges.
    """
    bits, device = grid.detach().view(_BITS[grid.element_size()]), grid.device
    rows, width = bits.shape
    if index_pitch == width and bits.is_contiguous():
        bits, rows, width = bits.view(1, -1), 1, rows * width
    limit = CHUNK if device.type == "cpu" else _CHUNK_CUDA
    ramp, total = None, torch.zeros((), dtype=torch.int64, device=device)
    for down, across in blocks(rows, width, limit):
        if ramp is None:  # the first block is the largest
            ramp = _ramp(down.stop, across.stop, index_pitch, device)
            buffers = [torch.empty_like(ramp) for _ in range(3)]
        part = bits[down, across]
        first = index_base + down.start * index_pitch + across.start
        at = tuple(slice(n) for n in part.shape)
        keys, scratch, values = (buffer[at] for buffer in buffers)
        torch.add(ramp[at], signed((2 * first + 1) * GOLDEN), out=keys)
        total += _hash_sum(part, keys, scratch, values)
    return int(total.item()) & MASK64


def _ramp(rows: int, width: int, pitch: int, device: torch.device) -> Tensor:
    """Return int64 [rows, width]: the key of each element minus the key of the first."""
    down = torch.arange(rows, device=device).mul_(pitch)
    return torch.arange(width, device=device).add(down[:, None]).mul_(signed(2 * GOLDEN))


def _hash_sum(bits: Tensor, keys: Tensor, scratch: Tensor, x: Tensor) -> Tensor:
    """Sum the hashes of a chunk with int64 keys k; overwrites `keys`, `scratch` and `x`."""
    x.copy_(bits)
    if bits.element_size() == 4:
        x.bitwise_xor_(torch.bitwise_right_shift(x, 16, out=scratch))
    torch.bitwise_right_shift(keys, 32, out=scratch)  # the masks below clear its sign bits
    x.bitwise_xor_(scratch).mul_(MUL32).bitwise_and_(_MASK32)
    keys.bitwise_xor_(scratch.bitwise_and_(-2)).bitwise_and_(_MASK32)
    x.bitwise_xor_(torch.bitwise_right_shift(x, 13, out=scratch))
    return x.mul_(keys).sum()
