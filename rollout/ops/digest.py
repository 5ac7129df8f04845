"""Layout-independent digest of weights.

digest = sum mod 2^64 over elements of finalize(splitmix64(global element index) ^ stored bits zero-extended to 64).
A sum does not care about order, so slices, ranks and chunks can be digested apart and added; the index inside the hash
makes a swap, shift or repetition visible.
"""

import torch
from torch import Tensor

from rollout.ops.hash import GOLDEN, MASK64, finalize_, signed

_CHUNK = 1 << 15  # elements: below torch's grain size, so no threads are woken up 30 times a chunk; stays in cache
_CHUNK_CUDA = 1 << 21  # 16 MiB a buffer: few launches, no large temporaries
_BITS = {1: (torch.uint8, None), 2: (torch.int16, 0xFFFF), 4: (torch.int32, 0xFFFFFFFF), 8: (torch.int64, None)}


def digest(tensor: Tensor, index_base: int) -> int:
    """Digest of a contiguous tensor of 1, 2, 4 or 8 byte elements whose first one has number `index_base`.

    Returns an int in [0, 2**64). Additive: digest(whole, b) == (digest(head, b) + digest(tail, b + len(head))) % 2**64.
    """
    if not tensor.is_contiguous():
        raise ValueError(f"digest needs a contiguous tensor, got strides {tensor.stride()} of {tuple(tensor.shape)}")
    width, mask = _BITS[tensor.element_size()]
    bits = tensor.detach().reshape(-1).view(width)
    size = min(_CHUNK if tensor.device.type == "cpu" else _CHUNK_CUDA, bits.numel())
    if size == 0:
        return 0
    ramp = torch.arange(1, size + 1, device=tensor.device).mul_(signed(GOLDEN))
    keys, scratch = torch.empty_like(ramp), torch.empty_like(ramp)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for first in range(0, bits.numel(), size):
        part = bits[first : first + size]
        n = part.numel()
        torch.add(ramp[:n], signed((index_base + first) * GOLDEN), out=keys[:n])
        total += _hash_sum(part, keys[:n], scratch[:n], mask)
    return int(total.item()) & MASK64


def _hash_sum(bits: Tensor, keys: Tensor, scratch: Tensor, mask: int | None) -> Tensor:
    """Sum of the hashes of one chunk. keys: (index + 1) * GOLDEN, overwritten."""
    finalize_(keys, scratch)
    scratch.copy_(bits)
    if mask is not None:
        scratch.bitwise_and_(mask)  # the copy to int64 extended the sign
    keys.bitwise_xor_(scratch)
    return finalize_(keys, scratch).sum()
