"""The kernel of `SegmentTable` for rows with pitches: `segments_triton` with a division for every vector."""

import triton
import triton.language as tl

from memsaver.common.segments_triton import GOLDEN_KEY, STEP, move


@triton.jit
def _part(  # type: ignore[no-untyped-def]
    source, target, key, unit, inside, width, source_pitch, target_pitch, index_pitch,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, BITS: tl.constexpr, COPY: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """`move` of vectors `unit` [rows], uint32, counted along the grid. All but index_pitch are in vectors."""
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
    SOURCE: tl.constexpr, TARGET: tl.constexpr, BITS: tl.constexpr, COPY: tl.constexpr, ALIGNED: tl.constexpr,
    VECTOR: tl.constexpr, BLOCK: tl.constexpr,
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
    shapes, rows, partials, base, first, last,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, BITS: tl.constexpr, COPY: tl.constexpr, ALIGNED: tl.constexpr,
    VECTOR: tl.constexpr, BLOCK: tl.constexpr, LOOPING: tl.constexpr,
):  # fmt: skip
    """Program p: row `first` + p of the table; LOOPING: and every further one at a distance of as many as there are."""
    program = (tl.program_id(0) + first).to(tl.int64)
    if LOOPING:
        while program < last:
            _grid(shapes, rows, partials, base, program, SOURCE, TARGET, BITS, COPY, ALIGNED, VECTOR, BLOCK)
            program += tl.num_programs(0)
    else:
        _grid(shapes, rows, partials, base, program, SOURCE, TARGET, BITS, COPY, ALIGNED, VECTOR, BLOCK)
