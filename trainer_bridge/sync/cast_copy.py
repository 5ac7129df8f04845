"""Cast tensors, write them in their places, digest the bits written: one pass over GPU memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from memsaver.ops.digest import digest
from memsaver.ops.layout import blocks, grids
from memsaver.ops.segments import Segment, SegmentTable
from memsaver.system.machine import Impl, use_triton
from trainer_bridge.sync.plan import Copy
from trainer_bridge.sync.shards import dot, torch_dtype

CHUNK = 1 << 20  # elements cast at once: bounds the temporary
CHUNK_CUDA = 1 << 22
PART_BYTES = 1 << 30
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

OnPart = Callable[[int, int], None]
"""Called before each part of the work with (placements written, all placements)."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Rows of `count` elements of contiguous `source`, cast to `dtype`, go to the target.

    offset: byte of the first element, which has number `index_base`. count: None: all of `source`.
    Pitches: elements from one of `rows` rows to the next, in the source, in the target and in the
    numbers.
    """

    source: Tensor
    offset: int
    dtype: torch.dtype
    index_base: int
    count: int | None = None
    rows: int = 1
    source_pitch: int = 0
    target_pitch: int = 0
    index_pitch: int = 0

    @property
    def width(self) -> int:
        """Counts the elements of a row."""
        return self.source.numel() if self.count is None else self.count

    @property
    def nbytes(self) -> int:
        """Counts the bytes written."""
        return self.rows * self.width * self.dtype.itemsize

    @property
    def end(self) -> int:
        """Returns the first byte of the target after it."""
        return self.offset + _span(self, self.target_pitch) * self.dtype.itemsize


def placements(copy: Copy, source: Tensor) -> list[Placement]:
    """Return a copy as rows of adjacent elements. source: of any strides; `copy.start` is in it."""
    strides, dtype = source.stride(), torch_dtype(copy.dtype)
    flat, first = _memory(source), dot(copy.start, strides)
    return [
        Placement(
            source=flat[first + grid.starts[0] :],
            count=grid.width,
            offset=copy.offset + grid.starts[1] * dtype.itemsize,
            dtype=dtype,
            index_base=copy.index_base + grid.starts[2],
            rows=grid.rows,
            source_pitch=grid.pitches[0],
            target_pitch=grid.pitches[1],
            index_pitch=grid.pitches[2],
        )
        for grid in grids(copy.shape, strides, copy.strides, copy.index_strides)
    ]


def _memory(source: Tensor) -> Tensor:
    """Return what lies from the first element of a tensor to its last one."""
    pairs = zip(source.shape, source.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in pairs) if source.numel() else 0
    return source.detach().as_strided((span,), (1,))


class CastCopy:
    """Many placements, to be written again and again: on a GPU in few launches, from tables made
    once, with one wait.

    The sources must keep their addresses. Device memory: the tables, under 16 MiB; nothing grows
    with the model.
    """

    def __init__(self, placements: Sequence[Placement], impl: Impl = "auto") -> None:
        """A ValueError names a wrong source, offset, pitch or dtype."""
        for each in placements:
            _check(each)
        self._placements = tuple(placements)
        self._end = max((each.end for each in placements), default=0)
        self._parts = parts([each.nbytes for each in placements])
        self._value: int | None = None  # by torch
        self._table: SegmentTable | None = None
        self._launched = False
        devices = {each.source.device for each in placements}
        if len(devices) == 1 and use_triton(impl, *devices) and all(map(_in_kernel, placements)):
            self._table = SegmentTable([_segment(each) for each in placements], *devices)

    @property
    def on_gpu(self) -> bool:
        """Tells whether `start` returns before it is done."""
        return self._table is not None and self._table.is_cuda

    def start(
        self, target: Tensor, on_part: OnPart | None = None, programs: int | None = None
    ) -> None:
        """Begin to write into `target`, uint8, whose byte 0 the offsets count from, on the current
        stream.

        Returns before it is done on a GPU. When `on_part` is called, what it counts as written has
        been; waiting for that costs a GPU a pause. programs: as in `SegmentTable.launch`; without a
        kernel it means nothing.
        """
        if target.dtype != torch.uint8 or not target.is_contiguous() or target.numel() < self._end:
            raise ValueError(
                f"cast_copy needs {self._end} bytes, got {target.dtype} {tuple(target.shape)}"
            )
        self._value, self._launched = None, False
        # perhaps of another GPU
        if self._table is not None and target.is_cuda == self._table.is_cuda:
            self._start_table(self._table, target, on_part, programs)
            self._launched = True
            return
        total = 0
        for done, each in enumerate(self._placements):
            if on_part is not None:
                on_part(done, len(self._placements))
            total += _by_torch(target, each)
        self._value = total % (1 << 64)

    def result(self) -> int:
        """Waits for the last `start`; returns the digest of the cast values, from the sources."""
        if self._launched:
            assert self._table is not None
            return self._table.digest()
        if self._value is None:
            raise ValueError("cast_copy was not started, or its start failed; call start first")
        return self._value

    def _start_table(
        self, table: SegmentTable, target: Tensor, on_part: OnPart | None, programs: int | None
    ) -> None:
        base = target.data_ptr()
        if on_part is None:
            table.launch(base, programs=programs)
            return
        for first, last in self._parts:
            if target.is_cuda:
                torch.cuda.synchronize(target.device)
            on_part(first, len(self._placements))
            table.launch(base, first, last, programs=programs)


def cast_copy(
    target: Tensor, source: Tensor, index_base: int, index_pitch: int | None = None
) -> int:
    """Write `source`, cast to target's dtype, into `target` (same shape), by torch on any device,
    in bounded pieces.

    Both are contiguous; or, if `index_pitch` is given, [rows, width] with contiguous rows, and
    numbers rise by so much from row to row. index_base: number of the first element. Returns the
    digest of the cast values.
    """
    if target.shape != source.shape:
        raise ValueError(
            f"cast_copy: source {tuple(source.shape)} does not fit target {tuple(target.shape)}"
        )
    if index_pitch is None:
        assert target.is_contiguous() and source.is_contiguous()
        target, source = target.view(1, -1), source.view(1, -1)
    source, pitch, total = source.detach(), index_pitch or 0, 0
    rows, width = source.shape
    for down, across in blocks(rows, width, CHUNK if source.device.type == "cpu" else CHUNK_CUDA):
        cast = source[down, across].to(target.dtype)
        target[down, across].copy_(cast)
        first = index_base + down.start * pitch + across.start
        total += digest(cast, first, impl="torch", index_pitch=pitch)
    return total % (1 << 64)


def all_finite(source: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Tells whether no element (any float dtype), cast to `dtype`, is NaN or infinite: where that
    has the smaller range, a large number is.
    """
    flat = source.detach().reshape(-1)
    chunks = (chunk.to(dtype or source.dtype) for chunk in flat.split(CHUNK_CUDA))
    # isfinite knows no fp8.
    readable = (chunk if chunk.itemsize > 1 else chunk.float() for chunk in chunks)
    return all(bool(torch.isfinite(chunk).all()) for chunk in readable)


def parts(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Returns ranges of placements, of at most PART_BYTES or one; one starts at half of all."""
    parts, first, nbytes = [], 0, 0
    for i, size in enumerate(sizes):
        if i > first and (i == len(sizes) // 2 or nbytes + size > PART_BYTES):
            parts.append((first, i))
            first, nbytes = i, 0
        nbytes += size
    if sizes:
        parts.append((first, len(sizes)))
    return parts


def _span(each: Placement, pitch: int) -> int:
    """Counts the elements from the first one to the end of the last row."""
    return (each.rows - 1) * pitch + each.width if each.rows and each.width else 0


def _check(each: Placement) -> None:
    if not each.source.is_contiguous():
        raise ValueError(f"cast_copy: source {tuple(each.source.shape)} is not contiguous")
    if each.offset < 0 or each.offset % each.dtype.itemsize:
        raise ValueError(f"cast_copy: byte {each.offset} is not aligned to {each.dtype}")
    if each.dtype.itemsize > 4:
        raise ValueError(f"cast_copy writes elements of 1, 2 or 4 bytes, got {each.dtype}")
    numbers = (each.rows, each.width, each.source_pitch, each.target_pitch, each.index_pitch)
    if min(numbers) < 0:
        raise ValueError(f"cast_copy: rows, count and pitches must not be negative, got {numbers}")
    if each.rows > 1 and each.width > each.target_pitch:
        text = f"rows of {each.width} elements overlap at a target_pitch of {each.target_pitch}"
        raise ValueError(f"cast_copy: {text}")
    if _span(each, each.source_pitch) > each.source.numel():
        text = f"{each.rows} rows of {each.width} elements, {each.source_pitch} apart, reach beyond"
        raise ValueError(f"cast_copy: {text} the end of source {tuple(each.source.shape)}")


def _by_torch(target: Tensor, each: Placement) -> int:
    shape = (each.rows, each.width)
    place = target[each.offset : each.end].view(each.dtype)
    place = place.as_strided(shape, (each.target_pitch, 1))
    source = each.source.detach().view(-1).as_strided(shape, (each.source_pitch, 1))
    return cast_copy(place, source, each.index_base, each.index_pitch)


def _in_kernel(each: Placement) -> bool:
    return each.dtype == each.source.dtype or {each.dtype, each.source.dtype} <= set(_KERNEL_DTYPES)


def _segment(each: Placement) -> Segment:
    return Segment(
        dtype=each.dtype,
        target=each.offset,
        count=each.width,
        index_base=each.index_base,
        source=each.source.data_ptr(),
        source_dtype=each.source.dtype,
        rows=each.rows,
        source_pitch=each.source_pitch,
        target_pitch=each.target_pitch,
        index_pitch=each.index_pitch,
    )
