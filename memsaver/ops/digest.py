"""Layout-independent digest of weights.

digest = sum mod 2^64 over elements of hash(global element index i, stored bits b zero-extended to 32):

    k = (2 i + 1) * GOLDEN mod 2^64, hi and lo its halves
    x = (b ^ (b >> 16) ^ hi) * MUL32 mod 2^32;  x = x ^ (x >> 13)
    hash = x * (lo ^ (hi & ~1)), all 64 bits of it

A sum does not care about order, so slices, ranks and chunks can be digested apart and added; the index inside the hash
makes a swap, shift or repetition visible. For a fixed i the hash is injective in b (every step is a bijection, the last
factor is odd), so one changed element is always noticed; it takes about ten integer instructions, so a GPU can digest
what it copies. It finds errors, not forgeries.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from memsaver.ops.dispatch import Impl, use_triton
from memsaver.ops.hash import GOLDEN, MASK64, MUL32, signed
from memsaver.ops.segments import Segment, SegmentTable

_CHUNK = 1 << 15  # elements: not above torch's grain size, so no threads are woken up ten times a chunk; stays in cache
_CHUNK_CUDA = 1 << 21  # 16 MiB a buffer: few launches, no large temporaries
_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
_MASK32 = (1 << 32) - 1


def digest(tensor: Tensor, index_base: int, impl: Impl = "auto") -> int:
    """Digest of a contiguous tensor of 1, 2 or 4 byte elements whose first one has number `index_base`.

    Returns an int in [0, 2**64). Additive: digest(whole, b) == (digest(head, b) + digest(tail, b + len(head))) % 2**64.
    """
    return Digest([(tensor, index_base)], impl).run()


class Digest:
    """Digest of many tensors, to be taken again and again: on a GPU in one launch or two, with one wait.

    The tensors must keep their addresses; they are only read by `run`, so their memory may be paused between runs.
    """

    def __init__(self, parts: Sequence[tuple[Tensor, int]], impl: Impl = "auto") -> None:
        """parts: contiguous tensors of one device, each with the number of its first element."""
        self._parts = [(_check(tensor), index_base) for tensor, index_base in parts]
        self._value = 0
        self._table: SegmentTable | None = None
        if parts and use_triton(impl, parts[0][0].device):
            self._table = SegmentTable([_segment(*part) for part in self._parts], parts[0][0].device)

    def run(self) -> int:
        """In [0, 2**64), of what the tensors hold now."""
        self.start()
        return self.result()

    def start(self) -> None:
        """Begin, on the current stream, after what is queued there."""
        if self._table is not None:
            self._table.launch(0)
        else:
            self._value = sum(_digest_torch(tensor, index_base) for tensor, index_base in self._parts) & MASK64

    def result(self) -> int:
        """Of the last ``start``, for which this waits."""
        return self._value if self._table is None else self._table.digest()


def _check(tensor: Tensor) -> Tensor:
    if not tensor.is_contiguous():
        raise ValueError(f"digest needs a contiguous tensor, got strides {tensor.stride()} of {tuple(tensor.shape)}")
    if tensor.element_size() not in _BITS:
        raise ValueError(f"digest takes elements of 1, 2 or 4 bytes, got {tensor.dtype}")
    return tensor.detach()


def _segment(tensor: Tensor, index_base: int) -> Segment:
    return Segment(dtype=tensor.dtype, target=tensor.data_ptr(), count=tensor.numel(), index_base=index_base)


def _digest_torch(tensor: Tensor, index_base: int) -> int:
    bits = tensor.reshape(-1).view(_BITS[tensor.element_size()])
    size = min(_CHUNK if tensor.device.type == "cpu" else _CHUNK_CUDA, bits.numel())
    if size == 0:
        return 0
    ramp = torch.arange(size, device=tensor.device).mul_(signed(2 * GOLDEN))
    keys, scratch, values = torch.empty_like(ramp), torch.empty_like(ramp), torch.empty_like(ramp)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for first in range(0, bits.numel(), size):
        part = bits[first : first + size]
        n = part.numel()
        torch.add(ramp[:n], signed((2 * (index_base + first) + 1) * GOLDEN), out=keys[:n])
        total += _hash_sum(part, keys[:n], scratch[:n], values[:n])
    return int(total.item()) & MASK64


def _hash_sum(bits: Tensor, keys: Tensor, scratch: Tensor, x: Tensor) -> Tensor:
    """Sum of the hashes of one chunk. keys: k as int64, overwritten, as scratch and x are."""
    x.copy_(bits)
    if bits.element_size() == 4:
        x.bitwise_xor_(torch.bitwise_right_shift(x, 16, out=scratch))
    torch.bitwise_right_shift(keys, 32, out=scratch)  # its sign bits go with the masks below
    x.bitwise_xor_(scratch).mul_(MUL32).bitwise_and_(_MASK32)
    keys.bitwise_xor_(scratch.bitwise_and_(-2)).bitwise_and_(_MASK32)
    x.bitwise_xor_(torch.bitwise_right_shift(x, 13, out=scratch))
    return x.mul_(keys).sum()
