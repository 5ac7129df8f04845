"""Bytes in whole units (pages, blocks of a file), and ranges (offset, nbytes) of a tag, packed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
