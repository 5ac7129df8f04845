"""Run a table of rows on a device: its programs copy, cast and digest in one pass over memory.

There is one launch for each kind of program. Rows are cut into programs by operations on whole
int64 tensors, without a Python loop over rows. Rows that follow each other without a gap become one
*run*. Others stay a *grid*, of which a program takes a range, unless each row is long enough to
become a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from memsaver.ops.hash import GOLDEN, MASK64, MUL32

MIN_CHUNK = 1 << 15  # elements: a whole number of blocks of every kernel instance
_MAX_PROGRAMS = 1 << 18  # at most 12 MiB of table and 4 MiB of partial sums
_LONG = 4  # rows of at least this many chunks become runs: a quarter more programs at most
_ALIGN = 16  # bytes of an aligned access; the elements of an aligned run are a multiple of it, too
_SOURCE, _TARGET, _WIDTH, _INDEX, _ROWS = range(5)  # columns of `memsaver.ops.rows.Row`
_PITCHES = slice(5, 8)

# 16-byte vectors in a block, and warps: each thread has four vectors in flight. Blocks of half the
# size copy 3 to 5 % slower on H100 and H200; blocks of twice the size read 12 to 40 % slower.
BLOCK, WARPS = 2048, 16
_BITS = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32}
_FLOATS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# The bits of infinity: a number without its sign is finite below them, NaN is above.
_INFINITY = {torch.float32: 0x7F800000, torch.bfloat16: 0x7F80, torch.float16: 0x7C00}

GOLDEN_KEY = tl.constexpr(GOLDEN)
STEP = tl.constexpr(2 * GOLDEN & MASK64)  # from one element's key to the next one's
_MASK64 = tl.constexpr(MASK64)
_MUL32 = tl.constexpr(MUL32)


Tables = Mapping[tuple[torch.dtype | None, torch.dtype], Sequence[tuple[int, ...]]]
"""(source dtype, target dtype) -> rows, at least one; source None: digest only."""


class Launch(NamedTuple):
    """The programs of one kind, on the device; `cut` describes programs and shapes."""

    constants: dict[str, Any]  # compile-time arguments of the kernel
    programs: Tensor  # int64 [n, 6]
    shapes: Tensor  # int64 [shapes, 4]; empty for runs
    partials: Tensor  # int64 [n, 2]: the sum of a program, and whether it read NaN or infinity


class DeviceTable:
    """Programs that run a table of rows, in one launch for each kind; valid while addresses are."""

    def __init__(self, tables: Tables, device: torch.device) -> None:
        rows_of_all = chain.from_iterable(tables.values())
        chunk = _chunk(sum(row[_WIDTH] * row[_ROWS] for row in rows_of_all))
        kinds = []
        for (source, target), table in tables.items():
            widths = 0 if source is None else source.itemsize, target.itemsize
            for aligned, grid, programs, shapes in cut(torch.tensor(table), widths, chunk):
                constants = instance(source, target, aligned=aligned, grid=grid)
                kinds.append((constants, programs.to(device), shapes.to(device)))
        sizes = [len(programs) for _, programs, _ in kinds]
        self._partials = torch.zeros(sum(sizes), 2, dtype=torch.int64, device=device)
        self.launches = [
            Launch(*kind, partials)
            for kind, partials in zip(kinds, self._partials.split(sizes), strict=True)
        ]
        self._stream: torch.cuda.Stream | None = None
        self._total = torch.zeros(2, dtype=torch.int64, pin_memory=device.type == "cuda")

    @property
    def nbytes(self) -> int:
        """Return the device memory of the table, in bytes."""
        tables = (launch.programs.nbytes + launch.shapes.nbytes for launch in self.launches)
        return self._partials.nbytes + sum(tables)

    def launch(self, base: int, programs: int | None = None) -> None:
        """Start all rows on the current stream, with `base` added to their targets.

        `RowCopies.start` describes `programs`.
        """
        assert base % _ALIGN == 0
        if programs is not None and programs < 1:
            raise ValueError(
                f"programs={programs} must be at least 1 (None: one for each row of the table)"
            )
        if self._partials.is_cuda:
            self._stream = torch.cuda.current_stream(self._partials.device)
        for constants, table, shapes, partials in self.launches:
            count = len(table)
            looping = programs is not None
            size = min(programs, count) if programs is not None else count
            with torch.cuda.device_of(table):
                run_rows[(size,)](
                    shapes, table, partials, base, count,
                    **constants, LOOPING=looping, num_warps=WARPS,
                )  # fmt: skip
        # here, so that the host launches it while the device still copies
        self._total.copy_(self._partials.sum(0), non_blocking=True)

    def digest(self) -> int:
        """Wait for the last launch; return its digest, in [0, 2**64)."""
        if self._stream is not None:
            self._stream.synchronize()
        return int(self._total[0]) & MASK64

    @property
    def finite(self) -> bool:
        """Return whether the last `digest` read no NaN or infinity; copies look for neither."""
        return not self._total[1]


def instance(
    source: torch.dtype | None, target: torch.dtype, *, aligned: bool, grid: bool
) -> dict[str, Any]:
    """Return the kernel's compile-time arguments; without a cast, elements move as integers."""
    width = target.itemsize
    cast = source is not None and source != target
    return {
        "SOURCE": _FLOATS[source] if cast and source is not None else _BITS[width],
        "TARGET": _FLOATS[target] if cast else _BITS[width],
        "BITS": _BITS[width],
        "COPY": source is not None,
        "INFINITY": 0 if source is not None else _INFINITY.get(target, 0),
        "ALIGNED": aligned,
        "GRID": grid,
        "VECTOR": 16 // width if aligned else 1,
        "BLOCK": BLOCK,
    }


def _chunk(elements: int) -> int:
    """Return the elements of a program: few, so that programs end together, in a bounded table."""
    chunk = MIN_CHUNK
    while elements > chunk * _MAX_PROGRAMS:
        chunk *= 2
    return chunk


# ---------------------------------------------------------------- cutting


def cut(
    table: Tensor, widths: tuple[int, int], chunk: int
) -> Iterator[tuple[bool, bool, Tensor, Tensor]]:
    """Cut rows, int64 [rows, 8], into programs of at most `chunk` elements.

    `chunk` is a power of two, 16 or more; `widths` are the bytes of a source and a target element.

    Yields:
        (aligned, grid, programs, shapes) of one kind. The columns of programs, int64 [n, 6], are
        source, target, elements, number of the first element, and for grids two more. A program of
        a grid begins at the first element of a row, skips the elements in the fifth column, and has
        its row of shapes in the sixth. The columns of shapes, int64 [different shapes, 4], are the
        elements of a row and its pitches in source, target and numbers.
    """
    table = _joined(table)
    filled = table[:, _WIDTH] * table[:, _ROWS] > 0
    single = (table[:, _ROWS] == 1) | (table[:, _WIDTH] >= _LONG * chunk)
    runs, grids = _runs(table[filled & single], widths), table[filled & ~single]
    aligned = _aligned_grids(grids, widths)
    kinds = [
        *((vectors, False, part) for vectors, part in _whole_vectors(runs, widths)),
        (True, True, grids[aligned]),
        (False, True, grids[~aligned]),
    ]
    for vectors, is_grid, part in kinds:
        if len(part):
            make = _cut_grids if is_grid else _cut_runs
            yield vectors, is_grid, *make(part, widths, chunk)


def _joined(table: Tensor) -> Tensor:
    """Turn rows that follow each other in every space into one long row."""
    joined = (table[:, _PITCHES] == table[:, _WIDTH, None]).all(1)
    table = table.clone()
    table[joined, _WIDTH] *= table[joined, _ROWS]
    table[joined, _ROWS] = 1
    return table


def _repeat(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Expand counts to (index of the count, running number within the count)."""
    which = torch.repeat_interleave(torch.arange(len(counts)), counts)
    return which, torch.arange(len(which)) - (counts.cumsum(0) - counts)[which]


def _runs(table: Tensor, widths: tuple[int, int]) -> Tensor:
    """Return every single row as a run, int64 [runs, 4]."""
    which, row = _repeat(table[:, _ROWS])
    return _moved(table[which, :_ROWS], row[:, None] * table[:, _PITCHES][which], widths)


def _moved(runs: Tensor, elements: Tensor, widths: tuple[int, int]) -> Tensor:
    """Advance the beginning of runs, int64 [runs, 4 or more], by `elements`.

    These are int64 [runs, 3], in source, target and numbers, or [runs, 1] for all three. `widths`
    are the bytes of a source and a target element.
    """
    runs = runs.clone()
    elements = elements.expand(-1, 3)
    runs[:, _SOURCE] += elements[:, 0] * widths[0]
    runs[:, _TARGET] += elements[:, 1] * widths[1]
    runs[:, _INDEX] += elements[:, 2]
    return runs


def _whole_vectors(runs: Tensor, widths: tuple[int, int]) -> tuple[tuple[bool, Tensor], ...]:
    """Split runs into whole aligned vectors of 16 bytes and the rest: two of (aligned, runs)."""
    aligned = (runs[:, _SOURCE] | runs[:, _TARGET]) % _ALIGN == 0
    whole = torch.where(aligned, runs[:, _WIDTH] - runs[:, _WIDTH] % _ALIGN, 0)
    vectors, rest = runs.clone(), _moved(runs, whole[:, None], widths)
    vectors[:, _WIDTH] = whole
    rest[:, _WIDTH] -= whole
    return (True, vectors[whole > 0]), (False, rest[rest[:, _WIDTH] > 0])


def _cut_runs(runs: Tensor, widths: tuple[int, int], chunk: int) -> tuple[Tensor, Tensor]:
    which, piece = _repeat((runs[:, _WIDTH] + chunk - 1) // chunk)
    first = piece * chunk
    programs = _moved(runs[which], first[:, None], widths)
    programs[:, _WIDTH] = (programs[:, _WIDTH] - first).clamp_(max=chunk)
    return torch.nn.functional.pad(programs, (0, 2)), torch.zeros(0, 4, dtype=torch.int64)


def _aligned_grids(grids: Tensor, widths: tuple[int, int]) -> Tensor:
    """Return bool [grids]: whether all rows are whole vectors of 16 bytes at aligned addresses."""
    lane = _ALIGN // widths[1]
    source, target = (grids[:, _PITCHES][:, space] for space in (0, 1))
    odd = (grids[:, _SOURCE] | grids[:, _TARGET] | source * widths[0] | target * widths[1]) % _ALIGN
    odd |= (grids[:, _WIDTH] | target) % lane  # lane: a power of two
    if widths[0]:
        odd |= source % lane
    return odd == 0


def _cut_grids(grids: Tensor, widths: tuple[int, int], chunk: int) -> tuple[Tensor, Tensor]:
    width, elements = grids[:, _WIDTH], grids[:, _WIDTH] * grids[:, _ROWS]
    which, piece = _repeat((elements + chunk - 1) // chunk)
    first = piece * chunk
    row = first // width[which]
    shapes, shape = torch.unique(
        torch.cat([width[:, None], grids[:, _PITCHES]], dim=1), dim=0, return_inverse=True
    )
    runs = _moved(grids[which, :_ROWS], row[:, None] * grids[:, _PITCHES][which], widths)
    runs[:, _WIDTH] = (elements[which] - first).clamp_(max=chunk)
    skipped = first - row * width[which]
    return torch.cat([runs, skipped[:, None], shape[which, None]], dim=1), shapes


# ---------------------------------------------------------------- kernels


@triton.jit
def _hash(bits, key, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Hash uint32 bits with uint64 keys k, as defined in `memsaver.ops.digest`."""
    if WIDTH == 32:
        bits = bits ^ (bits >> 16)
    high = (key >> 32).to(tl.uint32)
    x = (bits ^ high) * _MUL32
    x = x ^ (x >> 13)
    return x.to(tl.uint64) * (key.to(tl.uint32) ^ (high & 0xFFFFFFFE)).to(tl.uint64)


@triton.jit
def _move(  # type: ignore[no-untyped-def]
    source, target, inside, key,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, BITS: tl.constexpr, COPY: tl.constexpr,
    INFINITY: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Copy or read elements at [rows, VECTOR] pointers.

    Returns their hash sums, uint64 [rows], and their largest bits without the sign, uint32 [rows];
    without INFINITY, zeros.
    """
    if COPY:
        values = tl.load(source, mask=inside)
        if SOURCE != TARGET:
            values = values.to(tl.float32).to(TARGET)
        tl.store(target, values, mask=inside)
    else:
        values = tl.load(target, mask=inside)
    column = tl.arange(0, VECTOR)[None, :]
    keys = key[:, None] + column.to(tl.uint64) * STEP
    bits = values.to(BITS, bitcast=True).to(tl.uint32)
    hashes = _hash(bits, keys, BITS.primitive_bitwidth)
    sizes = bits & ((1 << (BITS.primitive_bitwidth - 1)) - 1 if INFINITY else 0)
    if inside is not None:
        hashes, sizes = tl.where(inside, hashes, 0), tl.where(inside, sizes, 0)
    return tl.sum(hashes, 1), tl.max(sizes, 1)


@triton.jit
def _block(  # type: ignore[no-untyped-def]
    source, target, key, unit, inside, width, source_pitch, target_pitch, index_pitch,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, BITS: tl.constexpr, COPY: tl.constexpr,
    INFINITY: tl.constexpr, GRID: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Apply `_move` to the vectors with numbers `unit`, int32 [rows], of a run or a grid."""
    lane = tl.arange(0, VECTOR)[None, :]
    if GRID:
        down = unit.to(tl.uint32) // width
        across = unit.to(tl.uint32) - down * width
        # a pitch times rows exceeds 32 bits
        far, near = down.to(tl.int64), across.to(tl.int64)
        source += ((far * source_pitch + near) * VECTOR)[:, None] + lane
        target += ((far * target_pitch + near) * VECTOR)[:, None] + lane
        key += (far * index_pitch + near * VECTOR).to(tl.uint64) * STEP
    else:
        source += unit[:, None] * VECTOR + lane
        target += unit[:, None] * VECTOR + lane
    return _move(source, target, inside, key, SOURCE, TARGET, BITS, COPY, INFINITY, VECTOR)


@triton.jit
def _program(  # type: ignore[no-untyped-def]
    shapes, rows, partials, base, program,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, BITS: tl.constexpr, COPY: tl.constexpr,
    INFINITY: tl.constexpr, ALIGNED: tl.constexpr, GRID: tl.constexpr, VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Run one program of the table: whole blocks, then the rest."""
    row = rows + program * 6
    source = tl.load(row)
    target = tl.load(row + 1) + base
    units = tl.load(row + 2).to(tl.int32) // VECTOR
    index = tl.load(row + 3)
    if ALIGNED:
        source, target = tl.multiple_of(source, 16), tl.multiple_of(target, 16)
    source = source.to(tl.pointer_type(SOURCE))
    target = target.to(tl.pointer_type(TARGET))
    if ALIGNED:  # the hint does not survive the cast
        source, target = tl.multiple_of(source, 16), tl.multiple_of(target, 16)
    lane = tl.arange(0, BLOCK)
    key = (index * 2 + 1).to(tl.uint64) * GOLDEN_KEY
    first = 0
    width, source_pitch, target_pitch, index_pitch = 1, 0, 0, 0
    if GRID:
        first = tl.load(row + 4).to(tl.int32) // VECTOR
        shape = shapes + tl.load(row + 5) * 4
        width = tl.load(shape).to(tl.uint32) // VECTOR
        source_pitch, target_pitch = tl.load(shape + 1) // VECTOR, tl.load(shape + 2) // VECTOR
        index_pitch = tl.load(shape + 3)
    else:
        # carried from block to block, because constants of each element would fill the registers
        key = key + lane.to(tl.uint64) * (VECTOR * STEP & _MASK64)
    sums = tl.zeros((BLOCK,), tl.uint64)
    peaks = tl.zeros((BLOCK,), tl.uint32)
    done = 0
    while done + BLOCK <= units:
        hashes, sizes = _block(
            source, target, key, first + done + lane, None,
            width, source_pitch, target_pitch, index_pitch,
            SOURCE, TARGET, BITS, COPY, INFINITY, GRID, VECTOR,
        )  # fmt: skip
        sums, peaks = sums + hashes, tl.maximum(peaks, sizes)
        if not GRID:
            key += BLOCK * VECTOR * STEP & _MASK64
        done += BLOCK
    if done < units:
        inside = (lane[:, None] + tl.zeros((BLOCK, VECTOR), tl.int32)) < units - done
        hashes, sizes = _block(
            source, target, key, first + done + lane, inside,
            width, source_pitch, target_pitch, index_pitch,
            SOURCE, TARGET, BITS, COPY, INFINITY, GRID, VECTOR,
        )  # fmt: skip
        sums, peaks = sums + hashes, tl.maximum(peaks, sizes)
    tl.store(partials + program * 2, tl.sum(sums, 0).to(tl.int64))
    if INFINITY:
        tl.store(partials + program * 2 + 1, (tl.max(peaks, 0) >= INFINITY).to(tl.int64))


@triton.jit(do_not_specialize=["partials", "base", "count"])
def run_rows(  # type: ignore[no-untyped-def]
    shapes, rows, partials, base: tl.int64, count,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, BITS: tl.constexpr, COPY: tl.constexpr,
    INFINITY: tl.constexpr, ALIGNED: tl.constexpr, GRID: tl.constexpr, VECTOR: tl.constexpr,
    BLOCK: tl.constexpr, LOOPING: tl.constexpr,
):  # fmt: skip
    """Run row p of the table in program p, and if LOOPING every n-th row after it (n programs)."""
    program = tl.program_id(0).to(tl.int64)
    if LOOPING:
        while program < count:
            _program(
                shapes, rows, partials, base, program,
                SOURCE, TARGET, BITS, COPY, INFINITY, ALIGNED, GRID, VECTOR, BLOCK,
            )  # fmt: skip
            program += tl.num_programs(0)
    else:
        _program(
            shapes, rows, partials, base, program,
            SOURCE, TARGET, BITS, COPY, INFINITY, ALIGNED, GRID, VECTOR, BLOCK,
        )  # fmt: skip
