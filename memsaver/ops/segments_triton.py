"""The kernels behind `SegmentTable`: copy, cast and digest in one pass over memory.

`run_segments` is for plain rows of the table, `run_grids` for rows with pitches.
"""

import torch
import triton
import triton.language as tl

from memsaver.ops.cuts import Kind, Launch
from memsaver.ops.hash import GOLDEN, MASK64, MUL32

# vectors of 16 bytes a block, and warps: each thread has four vectors in flight. Blocks of half the
# size copy 3 to 5 % slower on H100 and H200; those of twice the size read 12 to 40 % slower
ROWS, WARPS = 2048, 16
_BITS = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32}
_FLOATS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

GOLDEN_KEY = tl.constexpr(GOLDEN)
STEP = tl.constexpr(2 * GOLDEN & MASK64)  # from one element's key to the next one's
_MASK64 = tl.constexpr(MASK64)
_MUL32 = tl.constexpr(MUL32)


def launch_rows(launch: Launch, base: int, first: int, last: int, programs: int | None) -> None:
    """Start rows `first` to `last` (excluded) of a launch, one or more a program."""
    looping = programs is not None
    size = min(programs, last - first) if programs is not None else last - first
    arguments = (launch.rows, launch.partials, base, first, last)
    constants = instance(launch.kind, looping)
    with torch.cuda.device_of(launch.rows):
        if launch.kind.grid:
            run_grids[(size,)](launch.shapes, *arguments, **constants, num_warps=WARPS)
        else:
            run_segments[(size,)](*arguments, **constants, num_warps=WARPS)


def instance(kind: Kind, looping: bool = False) -> dict[str, object]:
    """Compile-time arguments of the kernels; without a cast elements move as integers."""
    width = kind.target.itemsize
    source, target = _BITS[width], _BITS[width]
    if kind.source is not None and kind.source != kind.target:
        source, target = _FLOATS[kind.source], _FLOATS[kind.target]
    return {
        "SOURCE": source,
        "TARGET": target,
        "BITS": _BITS[width],
        "COPY": kind.source is not None,
        "ALIGNED": kind.aligned,
        "VECTOR": 16 // width if kind.aligned else 1,
        "BLOCK": ROWS,
        "LOOPING": looping,
    }


@triton.jit
def _hash(bits, key, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """`memsaver.ops.digest` of uint32 bits; key: uint64, its k."""
    if WIDTH == 32:
        bits = bits ^ (bits >> 16)
    high = (key >> 32).to(tl.uint32)
    x = (bits ^ high) * _MUL32
    x = x ^ (x >> 13)
    return x.to(tl.uint64) * (key.to(tl.uint32) ^ (high & 0xFFFFFFFE)).to(tl.uint64)


@triton.jit
def move(  # type: ignore[no-untyped-def]
    source, target, inside, key,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, BITS: tl.constexpr, COPY: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    """uint64 [rows], sums of hashes of what pointers [rows, VECTOR] point to."""
    if COPY:
        values = tl.load(source, mask=inside)
        if SOURCE != TARGET:
            values = values.to(tl.float32).to(TARGET)
        tl.store(target, values, mask=inside)
    else:
        values = tl.load(target, mask=inside)
    column = tl.arange(0, VECTOR)[None, :]
    keys = key[:, None] + column.to(tl.uint64) * STEP
    hashes = _hash(values.to(BITS, bitcast=True).to(tl.uint32), keys, BITS.primitive_bitwidth)
    if inside is not None:
        hashes = tl.where(inside, hashes, 0)
    return tl.sum(hashes, 1)


@triton.jit
def _run(  # type: ignore[no-untyped-def]
    rows, partials, base, program,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, BITS: tl.constexpr, COPY: tl.constexpr,
    ALIGNED: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row of the table: whole blocks first, then what is left of one."""
    source = tl.load(rows + program * 4)
    target = tl.load(rows + program * 4 + 1) + base
    count = tl.load(rows + program * 4 + 2).to(tl.int32)
    index = tl.load(rows + program * 4 + 3)
    if ALIGNED:
        source = tl.multiple_of(source, 16)
        target = tl.multiple_of(target, 16)
        count = tl.multiple_of(count, 16)
    source = source.to(tl.pointer_type(SOURCE))
    target = target.to(tl.pointer_type(TARGET))
    if ALIGNED:  # the hint does not survive the cast
        source, target = tl.multiple_of(source, 16), tl.multiple_of(target, 16)
    row = tl.arange(0, BLOCK)
    at = row[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    # carried from block to block: constants of each element would fill the registers
    key = (index * 2 + 1).to(tl.uint64) * GOLDEN_KEY + row.to(tl.uint64) * (VECTOR * STEP & _MASK64)
    sums = tl.zeros((BLOCK,), tl.uint64)
    done = 0
    while done + BLOCK * VECTOR <= count:
        sums += move(
            source + done + at, target + done + at, None, key, SOURCE, TARGET, BITS, COPY, VECTOR
        )
        key += BLOCK * VECTOR * STEP & _MASK64
        done += BLOCK * VECTOR
    if done < count:
        inside = at < count - done
        sums += move(
            source + done + at, target + done + at, inside, key, SOURCE, TARGET, BITS, COPY, VECTOR
        )
    tl.store(partials + program, tl.sum(sums, 0).to(tl.int64))


@triton.jit(do_not_specialize=["partials", "base", "first", "last"])
def run_segments(  # type: ignore[no-untyped-def]
    rows, partials, base: tl.int64, first, last,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, BITS: tl.constexpr, COPY: tl.constexpr,
    ALIGNED: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr, LOOPING: tl.constexpr,
):  # fmt: skip
    """Program p: row `first` + p of the table; LOOPING: and those one grid further, each."""
    program = (tl.program_id(0) + first).to(tl.int64)
    if LOOPING:
        while program < last:
            _run(rows, partials, base, program, SOURCE, TARGET, BITS, COPY, ALIGNED, VECTOR, BLOCK)
            program += tl.num_programs(0)
    else:
        _run(rows, partials, base, program, SOURCE, TARGET, BITS, COPY, ALIGNED, VECTOR, BLOCK)


@triton.jit
def _part(  # type: ignore[no-untyped-def]
    source, target, key, unit, inside, width, source_pitch, target_pitch, index_pitch,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, BITS: tl.constexpr, COPY: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    """`move` of vectors `unit` [rows], uint32, counted along the grid."""
    down = unit // width
    across = unit - down * width
    far, near = down.to(tl.int64), across.to(tl.int64)  # a pitch times rows goes beyond 32 bits
    lane = tl.arange(0, VECTOR)[None, :]
    source += ((far * source_pitch + near) * VECTOR)[:, None] + lane
    target += ((far * target_pitch + near) * VECTOR)[:, None] + lane
    key += (far * index_pitch + near * VECTOR).to(tl.uint64) * STEP
    return move(source, target, inside, key, SOURCE, TARGET, BITS, COPY, VECTOR)


@triton.jit
def _grid(  # type: ignore[no-untyped-def]
    shapes, rows, partials, base, program,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, BITS: tl.constexpr, COPY: tl.constexpr,
    ALIGNED: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row of the table: whole blocks first, then what is left of one."""
    source = tl.load(rows + program * 6)
    target = tl.load(rows + program * 6 + 1) + base
    units = tl.load(rows + program * 6 + 2).to(tl.int32) // VECTOR
    index = tl.load(rows + program * 6 + 3)
    skipped = tl.load(rows + program * 6 + 4).to(tl.int32) // VECTOR
    shape = shapes + tl.load(rows + program * 6 + 5) * 4
    width = tl.load(shape).to(tl.uint32) // VECTOR
    source_pitch, target_pitch = tl.load(shape + 1) // VECTOR, tl.load(shape + 2) // VECTOR
    index_pitch = tl.load(shape + 3)
    source = source.to(tl.pointer_type(SOURCE))
    target = target.to(tl.pointer_type(TARGET))
    if ALIGNED:
        source, target = tl.multiple_of(source, 16), tl.multiple_of(target, 16)
    key = (index * 2 + 1).to(tl.uint64) * GOLDEN_KEY
    lane = tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), tl.uint64)
    done = 0
    while done + BLOCK <= units:
        unit = (skipped + done + lane).to(tl.uint32)
        sums += _part(
            source, target, key, unit, None, width, source_pitch, target_pitch, index_pitch,
            SOURCE, TARGET, BITS, COPY, VECTOR,
        )  # fmt: skip
        done += BLOCK
    if done < units:
        unit = (skipped + done + lane).to(tl.uint32)
        inside = (lane[:, None] + tl.zeros((BLOCK, VECTOR), tl.int32)) < units - done
        sums += _part(
            source, target, key, unit, inside, width, source_pitch, target_pitch, index_pitch,
            SOURCE, TARGET, BITS, COPY, VECTOR,
        )  # fmt: skip
    tl.store(partials + program, tl.sum(sums, 0).to(tl.int64))


@triton.jit(do_not_specialize=["partials", "base", "first", "last"])
def run_grids(  # type: ignore[no-untyped-def]
    shapes, rows, partials, base: tl.int64, first, last,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, BITS: tl.constexpr, COPY: tl.constexpr,
    ALIGNED: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr, LOOPING: tl.constexpr,
):  # fmt: skip
    """Program p: row `first` + p of the table; LOOPING: and those one grid further, each."""
    program = (tl.program_id(0) + first).to(tl.int64)
    if LOOPING:
        while program < last:
            _grid(
                shapes, rows, partials, base, program,
                SOURCE, TARGET, BITS, COPY, ALIGNED, VECTOR, BLOCK,
            )  # fmt: skip
            program += tl.num_programs(0)
    else:
        _grid(
            shapes, rows, partials, base, program,
            SOURCE, TARGET, BITS, COPY, ALIGNED, VECTOR, BLOCK,
        )  # fmt: skip
