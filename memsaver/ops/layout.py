"""Compute where bytes and elements lie: units (pages, file blocks), byte ranges, strides.

A range is (offset, nbytes).
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes, of every tensor in a packed transfer

Range = tuple[int, int]
Ranges = Sequence[Range]


def round_up(amount: int, unit: int) -> int:
    """Return the least multiple of ``unit`` that is not below ``amount``."""
    return -(-amount // unit) * unit


def joined(ranges: Ranges) -> list[Range]:
    """Merge ranges that follow each other without a gap."""
    out: list[Range] = []
    for offset, nbytes in ranges:
        if out and sum(out[-1]) == offset:
            out[-1] = (out[-1][0], out[-1][1] + nbytes)
        else:
            out.append((offset, nbytes))
    return out


def cut(ranges: Ranges, chunk: int) -> Iterator[tuple[int, list[Range]]]:
    """Pack ranges and yield (start in the packed bytes, ranges) of every ``chunk`` bytes."""
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
    """Copy small CPU tensors to the device, on CUDA in one asynchronous transfer.

    On CUDA the results are views of one buffer, for use on the current stream.
    """
    if device.type != "cuda":
        return [tensor.to(device) for tensor in tensors]
    nbytes = sum(_aligned(tensor) for tensor in tensors)
    staging = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    for view, tensor in zip(_views(staging, tensors), tensors, strict=True):
        view.copy_(tensor)
    return list(_views(staging.to(device, non_blocking=True), tensors))


def _views(buffer: Tensor, like: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield consecutive parts of a uint8 buffer, with the dtypes and shapes of `like`."""
    start = 0
    for tensor in like:
        yield buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        start += _aligned(tensor)


def _aligned(tensor: Tensor) -> int:
    return round_up(tensor.nbytes, _ALIGNMENT)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous tensor."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
