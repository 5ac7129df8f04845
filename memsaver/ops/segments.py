"""Many runs of elements in one launch: cut into chunks, one a program, listed in a table on the device.

The table is made once; a run copies, casts and digests (or only digests) what it lists, and the host waits once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from memsaver.ops.hash import MASK64

_MIN_CHUNK = 1 << 14  # elements: a whole number of blocks of every kernel instance
_MAX_PROGRAMS = 1 << 18  # 8 MiB of table and 2 MiB of partial sums
_VECTOR = 16  # bytes an aligned access takes, and elements a chunk of an aligned segment is a multiple of


@dataclass(frozen=True, kw_only=True)
class Segment:
    """`count` elements of `dtype` at byte `target` from the base of a run (an address, if the base is 0).

    index_base: number of the first one in the digest. source: address of what is cast to `dtype` and copied there, of
    dtype `source_dtype`; without one the elements are only digested.
    """

    dtype: torch.dtype
    target: int
    count: int
    index_base: int
    source: int = 0
    source_dtype: torch.dtype | None = None

    @property
    def aligned(self) -> bool:
        return self.source % _VECTOR == self.target % _VECTOR == 0


@dataclass(frozen=True)
class Kind:
    """What one instance of the kernel handles. source None: digest only. aligned: 16-byte accesses."""

    source: torch.dtype | None
    target: torch.dtype
    aligned: bool


@dataclass(frozen=True)
class Launch:
    """The programs of one kind.

    rows: int64 [programs, 4] on the device: source address, target offset, elements, number of the first element.
    partials: int64 [programs], where they leave their sums. ends[s]: programs of the first s segments.
    """

    kind: Kind
    rows: Tensor
    partials: Tensor
    ends: list[int]


class SegmentTable:
    """Device tables of some segments, for as long as the addresses in them hold."""

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        chunk = _chunk(sum(segment.count for segment in segments))
        pieces = [_split(segment) for segment in segments]
        kinds = dict.fromkeys(_kind(piece) for split in pieces for piece in split)
        tables = {kind: [_rows(split, kind, chunk) for split in pieces] for kind in kinds}
        programs = sum(len(rows) for table in tables.values() for rows in table)
        self._partials = torch.zeros(programs, dtype=torch.int64, device=device)
        self._launches: list[Launch] = []
        first = 0
        for kind, table in tables.items():
            rows = torch.cat(table)
            ends = torch.tensor([0] + [len(part) for part in table]).cumsum(0).tolist()
            partials = self._partials[first : first + len(rows)]
            self._launches.append(Launch(kind, rows.to(device), partials, ends))
            first += len(rows)
        self._segments = len(segments)

    @property
    def nbytes(self) -> int:
        """Device memory of the tables."""
        return self._partials.nbytes + sum(launch.rows.nbytes for launch in self._launches)

    def launch(self, base: int, first: int = 0, last: int | None = None) -> None:
        """Start work on segments `first` to `last` (excluded; None: all) on the current stream. base: address."""
        from memsaver.ops.segments_triton import launch_rows  # Triton costs a second to import; a CPU engine needs none

        assert base % _VECTOR == 0
        last = self._segments if last is None else last
        for launch in self._launches:
            if launch.ends[first] < launch.ends[last]:
                launch_rows(launch, base, launch.ends[first], launch.ends[last])

    def digest(self) -> int:
        """Wait; digest of all segments as last launched, in [0, 2**64)."""
        return int(self._partials.sum().item()) & MASK64


def _chunk(elements: int) -> int:
    """Elements of one program: as few as the table's size allows, so that the last programs end together."""
    chunk = _MIN_CHUNK
    while elements > chunk * _MAX_PROGRAMS:
        chunk *= 2
    return chunk


def _split(segment: Segment) -> list[Segment]:
    """Whole vectors and what is left of them, so that one odd size costs no wide accesses."""
    rest = segment.count % _VECTOR
    whole = segment.count - rest
    if not segment.aligned or not rest or not whole:
        return [segment]
    source_width = 0 if segment.source_dtype is None else segment.source_dtype.itemsize
    tail = replace(
        segment,
        target=segment.target + whole * segment.dtype.itemsize,
        count=rest,
        index_base=segment.index_base + whole,
        source=segment.source + whole * source_width,
    )
    return [replace(segment, count=whole), tail]


def _kind(segment: Segment) -> Kind:
    return Kind(segment.source_dtype, segment.dtype, segment.aligned and segment.count % _VECTOR == 0)


def _rows(pieces: Sequence[Segment], kind: Kind, chunk: int) -> Tensor:
    """int64 [programs, 4] on the host: the chunks of those pieces that are of this kind."""
    parts = [torch.empty((0, 4), dtype=torch.int64)]
    source_width = 0 if kind.source is None else kind.source.itemsize
    for piece in pieces:
        if _kind(piece) == kind:
            starts = torch.arange(0, piece.count, chunk)
            addresses = [piece.source + starts * source_width, piece.target + starts * kind.target.itemsize]
            counts = (piece.count - starts).clamp_(max=chunk)
            parts.append(torch.stack([*addresses, counts, piece.index_base + starts], dim=1))
    return torch.cat(parts)
