"""Tells where bytes and elements lie: in whole units (pages, blocks of a file), ranges (offset,
nbytes) of a tag, strides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

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
