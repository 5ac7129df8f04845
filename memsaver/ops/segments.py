"""Many runs and grids of elements, one launch a kind, in chunks that a table on the device lists.

The table is made once; a run copies, casts and digests what it lists, and the host waits once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from memsaver.ops.cuts import VECTOR, Cut, Kind, Launch, cut
from memsaver.ops.hash import MASK64

MIN_CHUNK = 1 << 15  # elements: a whole number of blocks of every kernel instance
_MAX_PROGRAMS = 1 << 18  # at most 12 MiB of table and 2 MiB of partial sums


@dataclass(frozen=True, kw_only=True)
class Segment:
    """`rows` rows of `count` elements of `dtype`, the first at byte `target` from the base of a run
    (an address, if the base is 0).

    index_base: number of the first one in the digest. source: address of what is cast to `dtype`
    and copied there, of dtype `source_dtype`; without one the elements are only digested. Pitches:
    elements from one row to the next, in the source, in the target and in the numbers.
    """

    dtype: torch.dtype
    target: int
    count: int
    index_base: int
    source: int = 0
    source_dtype: torch.dtype | None = None
    rows: int = 1
    source_pitch: int = 0
    target_pitch: int = 0
    index_pitch: int = 0

    @property
    def end(self) -> int:
        """First byte after the target, from the base of a run."""
        return (
            self.target
            + (max(self.rows - 1, 0) * self.target_pitch + self.count) * self.dtype.itemsize
        )


class SegmentTable:
    """Device tables of segments, good while their addresses hold. launches: one a kind."""

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        chunk = _chunk(sum(segment.count * segment.rows for segment in segments))
        cuts: dict[Kind, Cut] = {}
        for (source, target), (fields, owners) in _by_dtypes(segments).items():
            parts = cut(fields, owners, _widths(source, target), chunk)
            cuts |= {Kind(source, target, *how): part for how, part in parts.items()}
        self._partials = torch.zeros(
            sum(len(part.rows) for part in cuts.values()), dtype=torch.int64, device=device
        )
        self.launches: list[Launch] = []
        first, borders = 0, torch.arange(len(segments) + 1)
        for kind, part in cuts.items():
            partials = self._partials[first : first + len(part.rows)]
            ends = torch.searchsorted(part.owners, borders).tolist()
            shapes = None if part.shapes is None else part.shapes.to(device)
            self.launches.append(Launch(kind, part.rows.to(device), shapes, partials, ends))
            first += len(part.rows)
        self._segments = len(segments)
        self._stream: torch.cuda.Stream | None = None
        self._total = torch.zeros((), dtype=torch.int64, pin_memory=self.is_cuda)

    @property
    def is_cuda(self) -> bool:
        return self._partials.is_cuda

    @property
    def nbytes(self) -> int:
        """Device memory of the tables."""
        shapes = [launch.shapes for launch in self.launches if launch.shapes is not None]
        tables = [self._partials, *(launch.rows for launch in self.launches), *shapes]
        return sum(table.nbytes for table in tables)

    def launch(
        self, base: int, first: int = 0, last: int | None = None, *, programs: int | None = None
    ) -> None:
        """Start segments `first` to `last` (excluded; None: all) on the current stream.

        base: address. programs: one for each row of the table (None), or so many for all rows,
        which leaves the rest of the device to other kernels; ValueError for less than one.
        """
        # here: Triton costs a second to import, and a CPU engine needs none
        from memsaver.ops.segments_triton import launch_rows

        assert base % VECTOR == 0
        if programs is not None and programs < 1:
            raise ValueError(
                f"programs={programs} must be at least 1 (None: one for each row of the table)"
            )
        if self.is_cuda:
            self._stream = torch.cuda.current_stream(self._partials.device)
        last = self._segments if last is None else last
        for launch in self.launches:
            if launch.ends[first] < launch.ends[last]:
                launch_rows(launch, base, launch.ends[first], launch.ends[last], programs)
        if last == self._segments:  # now: the host launches this while the device still copies
            self._total.copy_(self._partials.sum(), non_blocking=True)

    def digest(self) -> int:
        """Wait; digest of all segments as last launched, the last one included, in [0, 2**64)."""
        if self._stream is not None:
            self._stream.synchronize()
        return int(self._total) & MASK64


def _chunk(elements: int) -> int:
    """Elements of one program: as few as the table's size allows, so that all end together."""
    chunk = MIN_CHUNK
    while elements > chunk * _MAX_PROGRAMS:
        chunk *= 2
    return chunk


def _widths(source: torch.dtype | None, target: torch.dtype) -> tuple[int, int]:
    return 0 if source is None else source.itemsize, target.itemsize


def _by_dtypes(
    segments: Sequence[Segment],
) -> dict[tuple[torch.dtype | None, torch.dtype], tuple[Tensor, Tensor]]:
    """(source dtype, dtype) -> what `cut` takes: their fields and their places in `segments`."""
    found: dict[
        tuple[torch.dtype | None, torch.dtype], tuple[list[tuple[int, ...]], list[int]]
    ] = {}
    for place, each in enumerate(segments):
        fields, owners = found.setdefault((each.source_dtype, each.dtype), ([], []))
        pitches = (each.source_pitch, each.target_pitch, each.index_pitch)
        fields.append((each.source, each.target, each.count, each.index_base, each.rows, *pitches))
        owners.append(place)
    return {
        pair: (torch.tensor(fields), torch.tensor(owners))
        for pair, (fields, owners) in found.items()
    }
