"""Copy, cast and digest strided elements in one pass: what is copied is listed once, as rows of
integers, and the list is run again and again.

A row is a strided copy: `rows` rows of `width` adjacent elements, as far from each other as the
pitches say, in the source, in the target and in the numbers that the digest gives to elements.
Without a source the target is only digested. On a GPU the rows are a table on the device
(`rows_triton.py`), elsewhere torch copies row by row.
"""

from __future__ import annotations

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

CHUNK = 1 << 20  # elements that torch casts at once: bounds the temporary
CHUNK_CUDA = 1 << 22
_KERNEL_DTYPES = {torch.float32, torch.bfloat16, torch.float16}

Strides = Sequence[int]


class Row(NamedTuple):
    """One strided copy.

    source: address; 0 without one. target: first byte, from the start of what is written into, or
    an address. index_base: number of the first element in the digest. Pitches are in elements, as
    the width is.
    """

    source: int
    target: int
    width: int
    index_base: int
    rows: int
    source_pitch: int
    target_pitch: int
    index_pitch: int


class Rows(NamedTuple):
    """Rows of the table that have one dtype: that of the target.

    source: the tensor in which the rows' sources lie, to be cast to `dtype`; None: rows are
    digested where they are. memory: the tensor whose addresses the targets are; None: targets count
    from what a run is given.
    """

    table: Sequence[Row]
    dtype: torch.dtype
    source: Tensor | None = None
    memory: Tensor | None = None

    @property
    def end(self) -> int:
        """Return the first byte of the target after all rows."""
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
    """Make as few rows as the strides allow of a box of elements.

    Args:
        shape: Of the box.
        dtype: Of its elements in the target: 1, 2 or 4 bytes.
        offset: Byte of the first element in the target.
        strides: Of the box in the target, in elements, one a dimension.
        index: Number of the first element in the digest.
        index_strides: By how much numbers rise along each dimension.
        source: Tensor of any strides, and of as many dimensions, to copy the box from.
        start: Where the box begins in `source`.

    Returns:
        Rows in which each element of the box is once; none for a box without elements.
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
    """Count the elements between the first one and the one at `index`."""
    return sum(map(mul, index, strides))


def _joined(shape: Sequence[int], *strides: Strides) -> list[tuple[int, ...]]:
    """Return (size, a stride in each space) of dimensions, outermost first; those that continue
    each other in every space are one.
    """
    dims = [dim for dim in zip(shape, *strides, strict=True) if dim[0] > 1]
    joined: list[tuple[int, ...]] = []
    for size, *by in sorted(dims, key=lambda dim: dim[1:], reverse=True):
        if joined and list(joined[-1][1:]) == [stride * size for stride in by]:
            size *= joined.pop()[0]
        joined.append((size, *by))
    return joined


class RowCopies:
    """Rows to be copied, or digested, again and again: on a GPU in few launches, from tables made
    once, with one wait.

    Sources must keep their addresses. Device memory: the tables, under 16 MiB; nothing grows with
    the model.
    """

    def __init__(self, rows: Sequence[Rows], device: torch.device, impl: Impl = "auto") -> None:
        """device: of the sources and of what is digested."""
        self._rows = tuple(rows)
        self._device = device
        self._end = max((each.end for each in rows), default=0)
        self._value: int | None = None  # by torch
        self._table = None
        if use_triton(impl, device) and all(each.in_kernel(device) for each in rows):
            # here: Triton costs a second to import, and a CPU engine needs none
            from memsaver.ops.rows_triton import DeviceTable

            self._table = DeviceTable(_by_dtypes(rows), device)

    @property
    def on_gpu(self) -> bool:
        """Return whether `start` returns before the copies are done."""
        return self._table is not None and self._device.type == "cuda"

    def start(self, target: Tensor | None = None, programs: int | None = None) -> None:
        """Begin to write into `target`, or to digest it, on the current stream.

        Args:
            target: uint8, contiguous; its byte 0 is what targets of rows count from. None: all rows
                have `memory`.
            programs: Of the kernel: one for each chunk of rows (None), or so many for all of them,
                which leaves the rest of the device to other kernels.

        Raises:
            ValueError: The target is too short, or not bytes. Nothing was written.
        """
        if target is not None and (
            target.dtype != torch.uint8 or not target.is_contiguous() or target.numel() < self._end
        ):
            raise ValueError(
                f"rows reach to byte {self._end}, got {target.dtype} {tuple(target.shape)}"
            )
        self._value = None
        # the target is perhaps of another GPU
        on_gpu = self._device.type == "cuda"
        if self._table is not None and (target is None or target.is_cuda == on_gpu):
            self._table.launch(0 if target is None else target.data_ptr(), programs)
            return
        self._value = sum(_by_torch(target, rows) for rows in self._rows) & MASK64

    def result(self) -> int:
        """Wait for the last `start`; return the digest of what it wrote or read, in [0, 2**64)."""
        if self._value is None:
            assert self._table is not None, "nothing was started"
            return self._table.digest()
        return self._value

    def run(self, target: Tensor | None = None) -> int:
        """Run all rows once; return their digest."""
        self.start(target)
        return self.result()


def _by_dtypes(rows: Iterable[Rows]) -> dict[tuple[torch.dtype | None, torch.dtype], list[Row]]:
    tables: dict[tuple[torch.dtype | None, torch.dtype], list[Row]] = defaultdict(list)
    for each in rows:
        if each.table:
            source = None if each.source is None else each.source.dtype
            tables[source, each.dtype] += each.table
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
    """Compute the digest of one tensor, as `memsaver.ops.digest` defines it.

    Args:
        tensor: Elements of 1, 2 or 4 bytes.
        index_base: Number of the first element.
        impl: The kernel or torch; "auto": the kernel on a GPU.
        index_pitch: By how much numbers rise from row to row of a tensor [rows, width]; None:
            elements have consecutive numbers.

    Returns:
        The digest, in [0, 2**64). It is additive: digest(whole, b) == (digest(head, b) +
        digest(tail, b + len(head))) % 2**64.
    """
    pitches = None if index_pitch is None else (index_pitch, 1)
    return RowCopies([tensor_rows(tensor, index_base, pitches)], tensor.device, impl).run()


def digest_table(parts: Sequence[tuple[Tensor, int]]) -> RowCopies:
    """Make what digests many tensors as one, again and again. They keep their addresses; their
    memory may be paused between runs.

    Args:
        parts: Tensors of one device, each with the number of its first element.
    """
    device = parts[0][0].device if parts else torch.device("cpu")
    return RowCopies([tensor_rows(*part) for part in parts], device)


def tensor_rows(tensor: Tensor, index: int, index_strides: Strides | None = None) -> Rows:
    """Make rows that digest a tensor where it lies.

    Args:
        tensor: Elements of 1, 2 or 4 bytes, of any strides.
        index: Number of the first element.
        index_strides: By how much numbers rise along each dimension; None: elements have
            consecutive numbers.
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
