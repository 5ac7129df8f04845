"""Boxes of elements of an n-dimensional parameter, and the bytes of an element: plain integers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import mul
from typing import NamedTuple

import torch

Ints = tuple[int, ...]


class Box(NamedTuple):
    """The elements from `start` to `start + shape` (excluded), one entry a dimension."""

    start: Ints
    shape: Ints

    @property
    def volume(self) -> int:
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """Returns what both contain; None if that is nothing."""
        start, shape = [], []
        for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True):
            first = max(a, b)
            if (size := min(a + n, b + m) - first) <= 0:
                return None
            start.append(first)
            shape.append(size)
        return Box(tuple(start), tuple(shape))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Returns where it lies in a tensor of what `outer` holds."""
        bounds = zip(self.start, self.shape, outer.start, strict=True)
        return tuple(slice(first - begin, first - begin + size) for first, size, begin in bounds)

    def minus(self, other: Box) -> list[Box]:
        """Returns disjoint boxes with what `other` does not contain."""
        if (common := self.intersect(other)) is None:
            return [self]
        rest: list[Box] = []
        start, shape = list(self.start), list(self.shape)
        for dim, (first, size) in enumerate(zip(*common, strict=True)):
            for low, high in ((start[dim], first), (first + size, start[dim] + shape[dim])):
                if low < high:
                    corner = (*start[:dim], low, *start[dim + 1 :])
                    rest.append(Box(corner, (*shape[:dim], high - low, *shape[dim + 1 :])))
            start[dim], shape[dim] = first, size
        return rest


def uncovered(box: Box, parts: Iterable[Box]) -> list[Box]:
    """Returns disjoint boxes with the elements of `box` that are in none of `parts`."""
    rest = [box] if box.volume else []
    for part in parts:
        rest = list(chain.from_iterable(each.minus(part) for each in rest))
    return rest


def dot(index: Sequence[int], strides: Sequence[int]) -> int:
    """Counts the elements between the first one and the one at `index`."""
    return sum(map(mul, index, strides))


def difference(a: Ints, b: Ints) -> Ints:
    """Subtracts each entry of `b` from that of `a`."""
    return tuple(x - y for x, y in zip(a, b, strict=True))


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Returns first element and length of part `index`, as by `torch.chunk`: may be empty."""
    each = -(-size // parts)
    first = min(size, index * each)
    return first, min(size, first + each) - first


def itemsize(dtype: str) -> int:
    """Counts the bytes of an element of "float32", "bfloat16", ..."""
    return torch_dtype(dtype).itemsize


def torch_dtype(name: str) -> torch.dtype:
    """Returns the dtype that manifests and plans call so; a ValueError if there is none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no torch dtype")
    return dtype
