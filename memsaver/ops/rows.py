"""Copy, cast and digest strided elements in one pass, from a table that is made once.

A row of the table is a strided copy: `rows` rows of `width` adjacent elements. Its pitches are the
distances of these rows in the source, in the target, and in the numbers that the digest gives to
elements. Without a source the target is only digested. On a GPU the table is on the device
(`rows_triton.py`); elsewhere torch copies row by row.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from operator import mul
from typing import NamedTuple

import torch
from torch import Tensor

from memsaver.ops.digest import blocks, digest_by_torch
from memsaver.ops.hash import MASK64
from memsaver.ops.layout import row_major
from memsaver.system.devices import Impl, use_triton

CHUNK = 1 << 20  # elements that torch casts at a time, to bound the temporary
CHUNK_CUDA = 1 << 22
_KERNEL_DTYPES = {torch.float32, torch.bfloat16, torch.float16}

Strides = Sequence[int]


class Row(NamedTuple):
    """One strided copy. Pitches are in elements, from one row to the next."""

    source: int  # address of the first element; 0 without a source
    target: int  # first byte: an offset in the target of a run, or an address
    width: int  # adjacent elements in a row
    index_base: int  # number of the first element in the digest
    rows: int
    source_pitch: int
    target_pitch: int
    index_pitch: int  # increase of the number


class Rows(NamedTuple):
    """Rows of the table with one source and one target dtype."""

    table: Sequence[Row]
    dtype: torch.dtype  # of the target
    source: Tensor | None = None  # has the sources, to be cast to `dtype`; None: only digest
    memory: Tensor | None = None  # has the targets, which are addresses; None: they are offsets

    @property
    def end(self) -> int:
        """Return the first byte after all rows in the target."""
        size = self.dtype.itemsize
        spans = ((row.rows - 1) * row.target_pitch + row.width for row in self.table)
        ends = (row.target + n * size for row, n in zip(self.table, spans, strict=True))
        return max(ends, default=0)

    def in_kernel(self, device: torch.device) -> bool:
        """Return whether the kernel can read the source, if any, and cast it."""
        if self.source is None:
            return True
        cast = {self.source.dtype, self.dtype}
        return self.source.device == device and (len(cast) == 1 or cast <= _KERNEL_DTYPES)


def box_rows(
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    offset: int,
    strides: Strides,
    index: int,
    index_strides: Strides,
    source: Tensor | None = None,
    start: Sequence[int] = (),
) -> Rows:
    """Describe each element of a box once, by as few rows as its strides allow; none if empty.

    Args:
        shape: Shape of the box.
        dtype: Dtype of its elements in the target, of 1, 2 or 4 bytes.
        offset: Byte of the first element in the target.
        strides: Strides of the box in the target, in elements.
        index: Number of the first element in the digest.
        index_strides: Increase of the number along each dimension.
        source: Tensor with the same number of dimensions, and any strides, to copy the box from.
        start: Index of the box's first element in `source`.
    """
    if dtype.itemsize not in (1, 2, 4):
        raise ValueError(f"rows have elements of 1, 2 or 4 bytes, got {dtype}")
    address, size = 0, 0
    first = strides
    if source is not None:
        first, size = source.stride(), source.element_size()
        address = source.data_ptr() + size * dot(start, first)
    if 0 in shape:
        return Rows((), dtype, source)
    dims = _joined(shape, first, strides, index_strides)
    width = 1
    if dims and set(dims[-1][1:]) == {1}:
        width = dims.pop()[0]
    count, *pitches = longest = max(dims, key=lambda dim: dim[0], default=(1, 0, 0, 0))
    outer = [dim for dim in dims if dim is not longest]
    _, *by_space = zip(*outer, strict=True) if outer else ((), (), (), ())
    table: list[Row] = []
    for at in itertools.product(*(range(dim[0]) for dim in outer)):
        far, along, number = (dot(at, strides_of) for strides_of in by_space)
        place = address + far * size, offset + along * dtype.itemsize
        table.append(Row(*place, width, index + number, count, *pitches))
    return Rows(table, dtype, source)


def dot(index: Sequence[int], strides: Strides) -> int:
    """Return the distance in elements from the first element to the one at `index`."""
    return sum(map(mul, index, strides))


def _joined(shape: Sequence[int], *strides: Strides) -> list[tuple[int, ...]]:
    """Return (size, a stride in each space) of each dimension, outermost first.

    Dimensions that continue each other in every space are merged.
    """
    dims = [dim for dim in zip(shape, *strides, strict=True) if dim[0] > 1]
    joined: list[tuple[int, ...]] = []
    for size, *by in sorted(dims, key=lambda dim: dim[1:], reverse=True):
        if joined and list(joined[-1][1:]) == [stride * size for stride in by]:
            size *= joined.pop()[0]
        joined.append((size, *by))
    return joined


class RowCopies:
    """Rows that are copied or digested repeatedly, on a GPU in few launches from one table.

    Sources must keep their addresses. The table takes at most some 16 MiB of device memory, however
    large the model is. `device` is that of the sources, and of memory that is only digested.
    """

    def __init__(self, rows: Sequence[Rows], device: torch.device, impl: Impl = "auto") -> None:
        self._rows = tuple(rows)
        self._device = device
        self._end = max((group.end for group in rows), default=0)
        self._value: int | None = None  # computed by torch
        self._table = None
        if use_triton(impl, device) and all(group.in_kernel(device) for group in rows):
            # imported here: it takes a second, and a CPU engine does not need it
            from memsaver.ops.rows_triton import DeviceTable

            self._table = DeviceTable(_by_dtypes(rows), device)

    @property
    def on_gpu(self) -> bool:
        """Return whether `start` returns before the copies are done."""
        return self._table is not None and self._device.type == "cuda"

    def start(self, target: Tensor | None = None, programs: int | None = None) -> None:
        """Begin to write into `target`, or to digest it, on the current stream.

        `target` is a contiguous uint8 tensor in which the rows' targets are offsets; None if all
        rows have `memory`. `programs`, at least 1, limits the programs of a launch, which leaves
        the rest of the device to other kernels (None: one program for each chunk).
        """
        if target is not None and (
            target.dtype != torch.uint8 or not target.is_contiguous() or target.numel() < self._end
        ):
            raise ValueError(
                f"rows reach to byte {self._end}, got {target.dtype} {tuple(target.shape)}"
            )
        self._value = None
        # the target may be on another GPU
        on_gpu = self._device.type == "cuda"
        if self._table is not None and (target is None or target.is_cuda == on_gpu):
            self._table.launch(0 if target is None else target.data_ptr(), programs)
            return
        self._value = sum(_by_torch(target, rows) for rows in self._rows) & MASK64

    def result(self) -> int:
        """Wait for the last `start`; return the digest of the targets, in [0, 2**64)."""
        if self._value is None:
            assert self._table is not None, "nothing was started"
            return self._table.digest()
        return self._value

    @property
    def seen_finite(self) -> bool:
        """Return whether the last digest also saw that each element of 2 or 4 bytes is finite.

        False if nobody looked: of copies, and where torch computed the digest.
        """
        looked = self._value is None and all(rows.source is None for rows in self._rows)
        return looked and self._table is not None and self._table.finite

    def run(self, target: Tensor | None = None) -> int:
        """Run all rows once; return their digest."""
        self.start(target)
        return self.result()


def _by_dtypes(rows: Iterable[Rows]) -> dict[tuple[torch.dtype | None, torch.dtype], list[Row]]:
    tables: dict[tuple[torch.dtype | None, torch.dtype], list[Row]] = defaultdict(list)
    for group in rows:
        if group.table:
            source = None if group.source is None else group.source.dtype
            tables[source, group.dtype] += group.table
    return tables


def _by_torch(target: Tensor | None, rows: Rows) -> int:
    first = 0
    if rows.memory is not None and rows.table:
        first = rows.memory.data_ptr()
        span = (rows.end - first) // rows.dtype.itemsize
        target = rows.memory.detach().as_strided((span,), (1,)).view(torch.uint8)
    total = 0
    for row in rows.table:
        assert target is not None
        total += _row_by_torch(target, rows, row, first)
    return total


def _row_by_torch(target: Tensor, rows: Rows, row: Row, base: int) -> int:
    source, offset, width, index, count, source_pitch, target_pitch, index_pitch = row
    span = ((count - 1) * target_pitch + width) * rows.dtype.itemsize
    place = target[offset - base : offset - base + span].view(rows.dtype)
    place = place.as_strided((count, width), (target_pitch, 1))
    if rows.source is None:
        return digest_by_torch(place, index, index_pitch)
    held, total = rows.source.detach(), 0
    first = held.storage_offset() + (source - held.data_ptr()) // held.element_size()
    values = held.as_strided((count, width), (source_pitch, 1), first)
    for down, across in blocks(count, width, CHUNK if held.device.type == "cpu" else CHUNK_CUDA):
        cast = values[down, across].to(rows.dtype)
        place[down, across].copy_(cast)
        number = index + down.start * index_pitch + across.start
        total += digest_by_torch(cast, number, index_pitch)
    return total


def digest(
    tensor: Tensor, index_base: int, impl: Impl = "auto", *, index_pitch: int | None = None
) -> int:
    """Return the digest of one tensor, in [0, 2**64), as `memsaver.ops.digest` defines it.

    Elements have 1, 2 or 4 bytes. Their numbers begin at `index_base` and are consecutive or, with
    an `index_pitch`, increase by it from row to row of a tensor [rows, width]. Digests add up:
    digest(whole, b) == (digest(head, b) + digest(tail, b + len(head))) % 2**64.
    """
    pitches = None if index_pitch is None else (index_pitch, 1)
    return RowCopies([tensor_rows(tensor, index_base, pitches)], tensor.device, impl).run()


def digest_table(parts: Sequence[tuple[Tensor, int]]) -> RowCopies:
    """Build a table that digests many tensors of one device as one, repeatedly.

    Each tensor comes with the number of its first element, and must keep its address; its memory
    may be paused between runs.
    """
    device = parts[0][0].device if parts else torch.device("cpu")
    return RowCopies([tensor_rows(*part) for part in parts], device)


def tensor_rows(tensor: Tensor, index: int, index_strides: Strides | None = None) -> Rows:
    """Build rows that digest a tensor in place.

    Args:
        tensor: Tensor of any strides, whose elements have 1, 2 or 4 bytes.
        index: Number of the first element in the digest.
        index_strides: How far the numbers of neighbors along each dimension are apart; None: the
            elements are numbered in row-major order.

    Returns:
        The rows, which keep the tensor alive.
    """
    rows = box_rows(
        tensor.shape,
        tensor.dtype,
        offset=tensor.data_ptr(),
        strides=tensor.stride(),
        index=index,
        index_strides=index_strides or row_major(tensor.shape),
    )
    return rows._replace(memory=tensor)
