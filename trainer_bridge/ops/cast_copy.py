"""Cast tensors, write them where they belong, and digest the bits written: one pass over memory on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from memsaver.ops.digest import digest
from memsaver.ops.dispatch import Impl, use_triton
from memsaver.ops.segments import Segment, SegmentTable

_CHUNK = 1 << 20  # elements cast at once: bounds the temporary
_CHUNK_CUDA = 1 << 22
_PART_BYTES = 1 << 30
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

OnPart = Callable[[int, int], None]
"""Called before each part of the work with (placements written, all placements)."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Elements of contiguous `source`, cast to `dtype`, go to byte `offset` of the target; the first has number
    `index_base`."""

    source: Tensor
    offset: int
    dtype: torch.dtype
    index_base: int

    @property
    def nbytes(self) -> int:
        return self.source.numel() * self.dtype.itemsize


class CastCopy:
    """Many placements, to be written again and again: on a GPU in few launches, from tables made once, with one wait.

    The sources must keep their addresses. Device memory: the tables, under 16 MiB; nothing grows with the model.
    """

    def __init__(self, placements: Sequence[Placement], impl: Impl = "auto") -> None:
        """A ValueError names a source that is not contiguous, a byte offset or a dtype that does not do."""
        for each in placements:
            if not each.source.is_contiguous():
                raise ValueError(f"cast_copy: source {tuple(each.source.shape)} is not contiguous")
            if each.offset < 0 or each.offset % each.dtype.itemsize:
                raise ValueError(f"cast_copy: byte {each.offset} is not aligned to {each.dtype}")
            if each.dtype.itemsize > 4:
                raise ValueError(f"cast_copy writes elements of 1, 2 or 4 bytes, got {each.dtype}")
        self._placements = tuple(placements)
        self._end = max((each.offset + each.nbytes for each in placements), default=0)
        self._parts = _parts([each.nbytes for each in placements])
        self._table: SegmentTable | None = None
        devices = {each.source.device for each in placements}
        if len(devices) == 1 and use_triton(impl, *devices) and all(map(_in_kernel, placements)):
            self._table = SegmentTable([_segment(each) for each in placements], *devices)
        self._device = next(iter(devices), None)

    def run(self, target: Tensor, on_part: OnPart | None = None) -> int:
        """Write into `target`, uint8, whose byte 0 the offsets count from.

        Returns the digest of the cast values, computed from the source side: what the target should now hold. When
        `on_part` is called, what it counts as written has been; waiting for that costs a GPU a pause.
        """
        if target.dtype != torch.uint8 or not target.is_contiguous() or target.numel() < self._end:
            raise ValueError(f"cast_copy needs {self._end} bytes, got {target.dtype} {tuple(target.shape)}")
        if self._table is not None and target.device == self._device:
            return self._run_table(self._table, target, on_part)
        total = 0
        for done, each in enumerate(self._placements):
            if on_part is not None:
                on_part(done, len(self._placements))
            place = target[each.offset : each.offset + each.nbytes].view(each.dtype)
            total += cast_copy(place, each.source.detach().view(-1), each.index_base)
        return total % (1 << 64)

    def _run_table(self, table: SegmentTable, target: Tensor, on_part: OnPart | None) -> int:
        base = target.data_ptr()
        if on_part is None:
            table.launch(base)
            return table.digest()
        for first, last in self._parts:
            if target.is_cuda:
                torch.cuda.synchronize(target.device)
            on_part(first, len(self._placements))
            table.launch(base, first, last)
        return table.digest()


def cast_copy(target: Tensor, source: Tensor, index_base: int) -> int:
    """Write `source`, cast to target's dtype, into `target` (same shape, both contiguous), by torch on any device.

    Returns the digest of the cast values. index_base: number of the first element.
    """
    if target.shape != source.shape:
        raise ValueError(f"cast_copy: source {tuple(source.shape)} does not fit target {tuple(target.shape)}")
    assert target.is_contiguous() and source.is_contiguous()
    total = 0
    chunk = _CHUNK if source.device.type == "cpu" else _CHUNK_CUDA
    out, flat = target.view(-1), source.detach().view(-1)
    for first in range(0, flat.numel(), chunk):
        cast = flat[first : first + chunk].to(target.dtype)
        out[first : first + chunk].copy_(cast)
        total += digest(cast, index_base + first, impl="torch")
    return total % (1 << 64)


def all_finite(source: Tensor) -> bool:
    """No NaN and no infinity among the elements; contiguous, any float dtype."""
    flat = source.detach().view(-1)
    chunks = (flat[first : first + _CHUNK_CUDA] for first in range(0, flat.numel(), _CHUNK_CUDA))
    return all(bool(torch.isfinite(chunk).all()) for chunk in chunks)


def _parts(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges of placements, each of at most _PART_BYTES or of one placement; one of them starts at half of all."""
    parts, first, nbytes = [], 0, 0
    for i, size in enumerate(sizes):
        if i > first and (i == len(sizes) // 2 or nbytes + size > _PART_BYTES):
            parts.append((first, i))
            first, nbytes = i, 0
        nbytes += size
    if sizes:
        parts.append((first, len(sizes)))
    return parts


def _in_kernel(each: Placement) -> bool:
    return each.dtype == each.source.dtype or {each.dtype, each.source.dtype} <= set(_KERNEL_DTYPES)


def _segment(each: Placement) -> Segment:
    return Segment(
        dtype=each.dtype,
        target=each.offset,
        count=each.source.numel(),
        index_base=each.index_base,
        source=each.source.data_ptr(),
        source_dtype=each.source.dtype,
    )
