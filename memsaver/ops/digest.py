"""Layout-independent digest of weights.

digest = sum mod 2^64 over elements of hash(global element index i, stored bits b zero-extended to
32):

    k = (2 i + 1) * GOLDEN mod 2^64, hi and lo its halves
    x = (b ^ (b >> 16) ^ hi) * MUL32 mod 2^32;  x = x ^ (x >> 13)
    hash = x * (lo ^ (hi & ~1)), all 64 bits of it

A sum does not care about order, so slices, ranks and chunks can be digested apart and added; the
index inside the hash makes a swap, shift or repetition visible. For a fixed i the hash is injective
in b (every step is a bijection, the last factor is odd), so one changed element is always noticed;
about ten integer instructions let a GPU digest what it copies. It finds errors, not forgeries.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from memsaver.ops.hash import GOLDEN, MASK64, MUL32, signed
from memsaver.ops.layout import blocks
from memsaver.ops.segments import Segment, SegmentTable
from memsaver.system.machine import Impl, use_triton

# elements: stays in cache, and not above torch's grain size, so no chunk wakes threads ten times
CHUNK = 1 << 15
_CHUNK_CUDA = 1 << 21  # 16 MiB a buffer: few launches, no large temporaries
_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
_MASK32 = (1 << 32) - 1


def digest(
    tensor: Tensor, index_base: int, impl: Impl = "auto", *, index_pitch: int | None = None
) -> int:
    """Digest of a tensor of 1, 2 or 4 byte elements whose first one has number `index_base`.

    The tensor is contiguous; or, if `index_pitch` is given, a grid [rows, width] whose rows are
    contiguous, and numbers rise by so much from row to row. Returns an int in [0, 2**64). Additive:
    digest(whole, b) == (digest(head, b) + digest(tail, b + len(head))) % 2**64.
    """
    return Digest(
        [(tensor, index_base) if index_pitch is None else (tensor, index_base, index_pitch)], impl
    ).run()


Part = tuple[Tensor, int] | tuple[Tensor, int, int]
"""What `digest` takes: a contiguous tensor and its index_base, or a grid of rows, its index_base
and index_pitch.
"""


class Digest:
    """Digest of many tensors, to be taken often: on a GPU in one launch a kind, with one wait.

    The tensors keep their addresses; their memory may be paused between runs.
    """

    def __init__(self, parts: Sequence[Part], impl: Impl = "auto") -> None:
        """parts: tensors of one device. ValueError for a shape, strides or dtype that fails."""
        self._grids = [_grid(*part) for part in parts]
        self._value = 0
        self._table: SegmentTable | None = None
        if parts and use_triton(impl, parts[0][0].device):
            self._table = SegmentTable(
                [_segment(*grid) for grid in self._grids], parts[0][0].device
            )

    def run(self) -> int:
        """Returns the digest, in [0, 2**64), of what the tensors hold now."""
        self.start()
        return self.result()

    def start(self) -> None:
        """Begin, on the current stream, after what is queued there."""
        if self._table is not None:
            self._table.launch(0)
        else:
            self._value = sum(_digest_torch(*grid) for grid in self._grids) & MASK64

    def result(self) -> int:
        """Waits for the last ``start`` and returns its digest."""
        return self._value if self._table is None else self._table.digest()


class BytesDigest:
    """Digest of any bytes laid out so: a `Digest` whose tables hold no addresses."""

    def __init__(
        self, segments: Sequence[Segment], device: torch.device, impl: Impl = "auto"
    ) -> None:
        self._segments = tuple(segments)
        self._end = max((segment.end for segment in segments), default=0)
        self._on = device.type
        self._table = SegmentTable(segments, device) if use_triton(impl, device) else None

    def run(self, data: Tensor) -> int:
        """Returns the digest of `data`: uint8, contiguous, where segments begin to count."""
        if data.dtype != torch.uint8 or not data.is_contiguous() or data.numel() < self._end:
            raise ValueError(
                f"the digest reads {self._end} bytes, got {data.dtype} {tuple(data.shape)}"
            )
        if data.device.type != self._on:
            raise ValueError(f"the digest was made for {self._on}, got bytes on {data.device}")
        if self._table is not None:
            self._table.launch(data.data_ptr())
            return self._table.digest()
        return sum(_digest_torch(*_view(data, segment)) for segment in self._segments) & MASK64


_Grid = tuple[Tensor, int, int]
"""Bits [rows, width], number of the first element, and how much higher that of the next row's first
one is.
"""


def _grid(tensor: Tensor, index_base: int, index_pitch: int | None = None) -> _Grid:
    if tensor.element_size() not in _BITS:
        raise ValueError(f"digest takes elements of 1, 2 or 4 bytes, got {tensor.dtype}")
    bits = tensor.detach().view(_BITS[tensor.element_size()])
    if index_pitch is None:
        if not tensor.is_contiguous():
            raise ValueError(
                f"digest needs a contiguous tensor, got strides {tensor.stride()} of "
                f"{tuple(tensor.shape)}"
            )
        return bits.view(1, -1), index_base, 0
    if tensor.dim() != 2 or (tensor.shape[1] > 1 and tensor.stride(1) != 1):
        raise ValueError(
            f"digest needs contiguous rows, got strides {tensor.stride()} of {tuple(tensor.shape)}"
        )
    return bits, index_base, index_pitch


def _segment(bits: Tensor, index_base: int, index_pitch: int) -> Segment:
    return Segment(
        dtype=bits.dtype,
        target=bits.data_ptr(),
        count=bits.shape[1],
        index_base=index_base,
        rows=bits.shape[0],
        target_pitch=bits.stride(0),
        index_pitch=index_pitch,
    )


def _view(data: Tensor, segment: Segment) -> _Grid:
    bits = data[segment.target : segment.end].view(_BITS[segment.dtype.itemsize])
    grid = bits.as_strided((segment.rows, segment.count), (segment.target_pitch, 1))
    return grid, segment.index_base, segment.index_pitch


def _digest_torch(bits: Tensor, index_base: int, index_pitch: int) -> int:
    """Digests a grid in blocks of one size, the last ones of a row or column smaller."""
    (rows, width), device = bits.shape, bits.device
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
    """int64 [rows, width]: how much more the key of each element is than that of the first."""
    down = torch.arange(rows, device=device).mul_(pitch)
    return torch.arange(width, device=device).add(down[:, None]).mul_(signed(2 * GOLDEN))


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
