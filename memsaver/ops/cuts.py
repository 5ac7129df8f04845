"""Cuts segments into the programs of a table, on whole int64 tensors, without a loop over them.

Segments come as a matrix with the columns of FIELDS. A segment of several rows stays a *grid*,
which a program takes a range of, unless each of its rows is so long that it makes *runs*.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_PITCHES = ("source_pitch", "target_pitch", "index_pitch")
FIELDS = ("source", "target", "count", "index", "rows", *_PITCHES)
SOURCE, TARGET, COUNT, INDEX, ROWS = range(5)  # addresses in bytes, count: elements of a row
PITCHES = slice(5, 8)  # elements
VECTOR = 16  # bytes an aligned access takes, and elements an aligned run is a multiple of
_LONG = 4  # chunks of a row that is cut for itself: at most a quarter more programs than chunks


@dataclass(frozen=True)
class Cut:
    """The programs of one kind, by rising segment.

    rows: int64 [programs, 4], of runs: source address, target offset, elements, number of the first
    element. Of grids [programs, 6]: the first three and the number are those of the program's first
    row, of which it leaves out so many elements, the fifth column; the sixth is the row of
    `shapes`. shapes: int64 [different shapes, 4], of grids: elements of a row, then its pitches in
    source, target and numbers. owners: int64 [programs], the segment of each.
    """

    rows: Tensor
    owners: Tensor
    shapes: Tensor | None = None


def cut(
    fields: Tensor, owners: Tensor, widths: tuple[int, int], chunk: int
) -> dict[tuple[bool, bool], Cut]:
    """(aligned, grid) -> programs of at most `chunk` elements, a power of two, VECTOR or more.

    fields: int64 [segments, len(FIELDS)]. owners: int64 [segments], rising. widths: bytes of a
    source and of a target element.
    """
    fields = _joined(fields, widths)
    some = fields[:, COUNT] * fields[:, ROWS] > 0
    apart = some & ((fields[:, ROWS] == 1) | (fields[:, COUNT] >= _LONG * chunk))
    found: dict[tuple[bool, bool], Cut] = {}
    runs, run_owners = _rows_apart(fields[apart], owners[apart], widths)
    for aligned, part, its in _whole_vectors(runs, run_owners, widths):
        found[aligned, False] = _cut_runs(part, its, widths, chunk)
    grids, grid_owners = fields[some & ~apart], owners[some & ~apart]
    wide = _aligned_grids(grids, widths)
    for aligned, these in ((True, wide), (False, ~wide)):
        found[aligned, True] = _cut_grids(grids[these], grid_owners[these], widths, chunk)
    return {kind: part for kind, part in found.items() if len(part.rows)}


def _joined(fields: Tensor, widths: tuple[int, int]) -> Tensor:
    """Makes one row of those that follow each other in every space."""
    pitches = fields[:, PITCHES] == fields[:, COUNT, None]
    if not widths[0]:
        pitches = pitches[:, 1:]
    joined = pitches.all(1)
    fields = fields.clone()
    fields[joined, COUNT] *= fields[joined, ROWS]
    fields[joined, ROWS] = 1
    return fields


def _repeat(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Item i counts[i] times: (i, how often it was there before) of each."""
    which = torch.repeat_interleave(torch.arange(len(counts)), counts)
    return which, torch.arange(len(which)) - (counts.cumsum(0) - counts)[which]


def _rows_apart(fields: Tensor, owners: Tensor, widths: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Every row a run: int64 [runs, 4] as in `Cut`, and owners."""
    which, row = _repeat(fields[:, ROWS])
    down = row[:, None] * fields[:, PITCHES][which]
    runs = fields[which, :ROWS]
    runs[:, SOURCE] += down[:, 0] * widths[0]
    runs[:, TARGET] += down[:, 1] * widths[1]
    runs[:, INDEX] += down[:, 2]
    return runs, owners[which]


def _whole_vectors(
    runs: Tensor, owners: Tensor, widths: tuple[int, int]
) -> tuple[tuple[bool, Tensor, Tensor], tuple[bool, Tensor, Tensor]]:
    """(aligned, runs, owners), twice: whole vectors of 16 bytes, and what is left."""
    aligned = (runs[:, SOURCE] | runs[:, TARGET]) % VECTOR == 0
    whole = torch.where(aligned, runs[:, COUNT] - runs[:, COUNT] % VECTOR, 0)
    vectors, rest = runs.clone(), runs.clone()
    vectors[:, COUNT] = whole
    rest[:, COUNT] -= whole
    _skip(rest, whole, widths)
    vector, odd = whole > 0, rest[:, COUNT] > 0
    return (True, vectors[vector], owners[vector]), (False, rest[odd], owners[odd])


def _skip(runs: Tensor, elements: Tensor, widths: tuple[int, int]) -> None:
    """Let runs begin so many elements later; counts stay."""
    runs[:, SOURCE] += elements * widths[0]
    runs[:, TARGET] += elements * widths[1]
    runs[:, INDEX] += elements


def _cut_runs(runs: Tensor, owners: Tensor, widths: tuple[int, int], chunk: int) -> Cut:
    which, piece = _repeat((runs[:, COUNT] + chunk - 1) // chunk)
    rows, first = runs[which], piece * chunk
    _skip(rows, first, widths)
    rows[:, COUNT] = (rows[:, COUNT] - first).clamp_(max=chunk)
    return Cut(rows, owners[which])


def _aligned_grids(grids: Tensor, widths: tuple[int, int]) -> Tensor:
    """bool [grids]: all rows of the target are whole vectors of 16 bytes at such addresses."""
    lane = VECTOR // widths[1]
    source, target = (grids[:, PITCHES][:, space] for space in (0, 1))
    odd = (grids[:, SOURCE] | grids[:, TARGET] | source * widths[0] | target * widths[1]) % VECTOR
    odd |= (grids[:, COUNT] | target) % lane  # lane: a power of two
    if widths[0]:
        odd |= source % lane
    return odd == 0


def _cut_grids(grids: Tensor, owners: Tensor, widths: tuple[int, int], chunk: int) -> Cut:
    width, elements = grids[:, COUNT], grids[:, COUNT] * grids[:, ROWS]
    which, piece = _repeat((elements + chunk - 1) // chunk)
    first = piece * chunk
    row = first // width[which]
    down = row[:, None] * grids[:, PITCHES][which]
    shapes, shape = torch.unique(
        grids[:, [COUNT, *range(len(FIELDS))[PITCHES]]], dim=0, return_inverse=True
    )
    rows = torch.stack(
        [
            grids[which, SOURCE] + down[:, 0] * widths[0],
            grids[which, TARGET] + down[:, 1] * widths[1],
            (elements[which] - first).clamp_(max=chunk),
            grids[which, INDEX] + down[:, 2],
            first - row * width[which],
            shape[which],
        ],
        dim=1,
    )
    return Cut(rows, owners[which], shapes)


@dataclass(frozen=True)
class Kind:
    """A kind of work: what one instance of the kernel handles.

    source None: digest only. aligned: 16-byte accesses. grid: rows.
    """

    source: torch.dtype | None
    target: torch.dtype
    aligned: bool
    grid: bool = False


@dataclass(frozen=True)
class Launch:
    """The programs of one kind.

    rows, shapes: on the device, as in `memsaver.ops.cuts.Cut`. partials: int64 [programs], where
    they leave their sums. ends[s]: of the first s segments.
    """

    kind: Kind
    rows: Tensor
    shapes: Tensor | None
    partials: Tensor
    ends: list[int]
