"""Tells where bytes and elements lie: in whole units (pages, blocks of a file), ranges (offset,
nbytes) of a tag, boxes with strides in several spaces at once, as source and target.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes, of every tensor in a packed transfer

Range = tuple[int, int]
Ranges = Sequence[Range]


def round_up(amount: int, unit: int) -> int:
    """The least multiple of ``unit`` that is not below ``amount``."""
    return -(-amount // unit) * unit


def joined(ranges: Ranges) -> list[Range]:
    """Makes neighbours one."""
    out: list[Range] = []
    for offset, nbytes in ranges:
        if out and sum(out[-1]) == offset:
            out[-1] = (out[-1][0], out[-1][1] + nbytes)
        else:
            out.append((offset, nbytes))
    return out


def cut(ranges: Ranges, chunk: int) -> Iterator[tuple[int, list[Range]]]:
    """Yields (start in the packed bytes, the ranges in it) of every ``chunk`` packed bytes."""
    at, room, parts = 0, chunk, []
    for offset, nbytes in joined(ranges):
        while nbytes:
            size = min(nbytes, room)
            parts.append((offset, size))
            offset, nbytes, room = offset + size, nbytes - size, room - size
            if not room:
                yield at, parts
                at, room, parts = at + chunk, chunk, []
    if parts:
        yield at, parts


@dataclass(frozen=True)
class Grid:
    """`rows` runs of `width` adjacent elements, in each of several spaces.

    starts, pitches: one entry a space, in elements; pitches: 0 for a single row.
    """

    rows: int
    width: int
    starts: tuple[int, ...]
    pitches: tuple[int, ...]


@dataclass(frozen=True)
class _Dim:
    size: int
    strides: tuple[int, ...]  # one a space


def grids(shape: Sequence[int], *strides: Sequence[int]) -> list[Grid]:
    """A box of `shape` as few grids: each element in one of them, `width` adjacent in all spaces.

    strides: for every space one stride a dimension, in elements. Starts count from the first
    element of the box. Raises ValueError for strides of another length than `shape`.
    """
    if not strides or any(len(space) != len(shape) for space in strides):
        raise ValueError(
            f"grids needs strides of {len(shape)} dimensions in each space, got {strides}"
        )
    if 0 in shape:
        return []
    sides = zip(shape, zip(*strides, strict=True), strict=True)
    dims = _merged([_Dim(size, by) for size, by in sides if size > 1])
    width = 1
    if dims and set(dims[-1].strides) == {1}:
        width = dims.pop().size
    rows = max(dims, key=lambda dim: dim.size, default=_Dim(1, (0,) * len(strides)))
    outer = [dim for dim in dims if dim is not rows]
    steps = [range(dim.size) for dim in outer]
    return [
        Grid(rows.size, width, _start(at, outer, len(strides)), rows.strides)
        for at in itertools.product(*steps)
    ]


def blocks(rows: int, width: int, limit: int) -> Iterator[tuple[slice, slice]]:
    """(rows, columns) of the parts of a grid, of at most `limit` elements each."""
    across = max(1, min(width, limit))
    down = limit // across
    for row in range(0, rows, down):
        for column in range(0, width, across):
            yield slice(row, min(row + down, rows)), slice(column, min(column + across, width))


def send_together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Small CPU tensors on the device; on CUDA views of one buffer, by one transfer that nothing
    waits for here: what is queued on the stream after it does.
    """
    if device.type != "cuda":
        return [each.to(device) for each in tensors]
    nbytes = sum(_aligned(each) for each in tensors)
    staging = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    for view, each in zip(_views(staging, tensors), tensors, strict=True):
        view.copy_(each)
    return list(_views(staging.to(device, non_blocking=True), tensors))


def _views(buffer: Tensor, like: Sequence[Tensor]) -> Iterator[Tensor]:
    """Consecutive parts of a uint8 buffer, with the dtypes and shapes of `like`."""
    start = 0
    for each in like:
        yield buffer[start : start + each.nbytes].view(each.dtype).view(each.shape)
        start += _aligned(each)


def _aligned(tensor: Tensor) -> int:
    return round_up(tensor.nbytes, _ALIGNMENT)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _merged(dims: list[_Dim]) -> list[_Dim]:
    """Joins dimensions that go on over each other in every space; outermost of the first first."""
    merged: list[_Dim] = []
    for dim in sorted(dims, key=lambda dim: dim.strides, reverse=True):
        if merged and merged[-1].strides == tuple(stride * dim.size for stride in dim.strides):
            dim = _Dim(merged.pop().size * dim.size, dim.strides)
        merged.append(dim)
    return merged


def _start(at: Sequence[int], dims: Sequence[_Dim], spaces: int) -> tuple[int, ...]:
    start = [0] * spaces
    for i, dim in zip(at, dims, strict=True):
        start = [sofar + i * stride for sofar, stride in zip(start, dim.strides, strict=True)]
    return tuple(start)
