"""Rows of the table: boxes become rows, and rows become programs.

The kernel and torch copy, cast and digest rows like their elements one by one, and the compiler
widens the kernel's memory accesses.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from memsaver.ops import rows as rows_module
from memsaver.ops import rows_triton
from memsaver.ops.digest import blocks
from memsaver.ops.layout import row_major
from memsaver.ops.rows import Row, RowCopies, Rows, box_rows, digest
from memsaver.ops.rows_triton import DeviceTable, Launch
from memsaver.system.devices import Impl
from tests.helpers.case_selection import some
from tests.helpers.reference_digest import by_definition, element
from tests.helpers.triton_compiler import compile_alone

CPU = torch.device("cpu")
UNTOUCHED = 0xA5
PAIRS = [
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float8_e4m3fn, torch.float8_e4m3fn),
]
OTHERS = [
    (torch.bfloat16, torch.float16),
    (torch.float32, torch.float32),
    (torch.float16, torch.float32),
]


# ---------------------------------------------------------------- boxes


@settings(max_examples=60)
@given(
    dims=st.lists(
        st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=3
    ),
    turned=st.booleans(),
    offset=st.integers(0, 9).map(lambda n: 4 * n),
    chunk=st.integers(1, 20),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_box_of_any_shape_is_written_like_a_slice(
    dims: list[tuple[int, int, int]], turned: bool, offset: int, chunk: int, dtype: torch.dtype
) -> None:
    """Copy a box by torch, in pieces of any size.

    Each of `dims` is a size, and the elements before the box in source and target. If `turned`, the
    dimensions of the source are in reverse order in memory.
    """
    shape = tuple(n + before for n, before, _ in dims)
    source = torch.randn(shape, generator=torch.Generator().manual_seed(6))
    if turned:
        source = source.permute(*reversed(range(len(shape)))).contiguous()
        source = source.permute(*reversed(range(len(shape))))
    box = tuple(slice(before, before + n) for n, before, _ in dims)
    out, at = tuple(n + 2 * before for n, _, before in dims), tuple(before for _, _, before in dims)
    expected = torch.full((1 << 13,), UNTOUCHED, dtype=torch.uint8)
    end = offset + math.prod(out) * dtype.itemsize
    to = tuple(slice(before, before + n) for n, _, before in dims)
    expected[offset:end].view(dtype).view(out)[to] = source[box].to(dtype)
    integers = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    bits = source[box].to(dtype).flatten().view(integers).tolist()
    numbers = torch.arange(source.numel()).view(shape)[box].flatten().tolist()
    mask = (1 << 8 * dtype.itemsize) - 1
    total = sum(element(1000 + i, b & mask) for i, b in zip(numbers, bits, strict=True))
    strides = row_major(out)
    place = {"strides": strides, "index_strides": row_major(shape)}
    box_as_rows = box_rows(
        tuple(n for n, _, _ in dims),
        dtype,
        offset=offset + rows_module.dot(at, strides) * dtype.itemsize,
        index=1000 + rows_module.dot([part.start for part in box], row_major(shape)),
        source=source,
        start=[part.start for part in box],
        **place,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_module, "CHUNK", chunk)
        target = torch.full_like(expected, UNTOUCHED)
        assert RowCopies([box_as_rows], CPU, "torch").run(target) == total % 2**64
        assert torch.equal(target, expected)
    read = Rows([Row(0, *row[1:]) for row in box_as_rows.table], dtype)
    assert RowCopies([read], CPU).run(target) == total % 2**64


def rows_of(shape: tuple[int, ...], strides: Sequence[int], numbers: Sequence[int]) -> list[Row]:
    place = {"offset": 0, "index": 0, "index_strides": numbers}
    return list(box_rows(shape, torch.float32, strides=strides, **place).table)


@pytest.mark.parametrize(
    ("shape", "strides", "numbers", "expected"),
    [
        # o_proj [hidden, heads * dim] and down_proj at TP 2: the right half of a shard of rows
        ((896, 1792), (1792, 1), (3584, 1), (1792, 896, 1792, 3584)),
        ((4, 3, 5), (15, 5, 1), (15, 5, 1), (60, 1, 0, 0)),  # one run is one row
        ((5, 4, 3), (1, 15, 5), (1, 15, 5), (60, 1, 0, 0)),  # in any order of dimensions
        ((1, 7), (7, 1), (1000, 1), (7, 1, 0, 0)),
        ((7, 1), (1, 9), (1, 1), (7, 1, 0, 0)),
        ((), (), (), (1, 1, 0, 0)),
        ((7, 1), (1, 1), (3, 1), (1, 7, 1, 3)),  # columns of one element
    ],
)
def test_box_is_one_row_of_the_table(
    shape: tuple[int, ...], strides: Sequence[int], numbers: Sequence[int], expected: Sequence[int]
) -> None:
    ((_, _, width, _, rows, _, pitch, index_pitch),) = rows_of(shape, strides, numbers)
    assert (width, rows, pitch, index_pitch) == expected


@pytest.mark.parametrize(
    ("shape", "target", "count"),
    [
        ((8, 12, 5), (2 * 12 * 5, 5, 1), 1),  # experts [E, 2 I, H] split in dimension 1
        ((8, 12, 5), (12 * 10, 10, 1), 1),  # experts [E, H, I] split in dimension 2
        # ... and by the source in dimension 1: rows along the longer one
        ((8, 12, 5), (24 * 10, 10, 1), 8),
        ((20, 12, 5), (24 * 10, 10, 1), 12),
        ((3, 0, 2), (2, 2, 1), 0),
    ],
)
def test_experts_become_as_few_rows_as_possible(
    shape: tuple[int, ...], target: tuple[int, ...], count: int
) -> None:
    assert len(rows_of(shape, target, row_major(shape))) == count


def test_digest_sees_nan_and_infinity_of_any_row_and_dtype(device: str) -> None:
    """Place one of them at each element of an aligned run with a tail, and of a grid."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        most = torch.finfo(dtype).max
        grid = torch.full((3, 24), -most, dtype=dtype, device=device)
        parts = [rows_module.tensor_rows(t, 0) for t in (grid.flatten()[:23], grid[:, :20])]
        for rows in parts:
            table = RowCopies([rows], grid.device, "triton")
            for at, value in itertools.product((0, 7, 22, 51), (math.inf, -math.inf, math.nan)):
                table.run()
                assert table.seen_finite, "the largest number is finite"
                grid.view(-1)[at] = value
                table.run()
                inside = at < 23 if rows is parts[0] else at % 24 < 20
                assert table.seen_finite != inside, (dtype, at, value)
                grid.view(-1)[at] = -most


def test_elements_wider_than_4_bytes_are_refused() -> None:
    for dtype in (torch.float64, torch.int64, torch.complex64):
        with pytest.raises(ValueError, match=f"1, 2 or 4 bytes, got {dtype}"):
            box_rows((1,), dtype, offset=0, strides=(1,), index=0, index_strides=(1,))


@settings(max_examples=100)
@given(rows=st.integers(0, 9), width=st.integers(0, 9), limit=st.integers(1, 30))
def test_blocks_cover_a_grid_once(rows: int, width: int, limit: int) -> None:
    cells = []
    for down, across in blocks(rows, width, limit):
        part = list(itertools.product(range(rows)[down], range(width)[across]))
        assert 0 < len(part) <= limit
        cells += part
    assert sorted(cells) == list(itertools.product(range(rows), range(width)))


# ---------------------------------------------------------------- rows


@dataclass(frozen=True)
class Box:
    """A row to lay out.

    There are `gaps` elements after each row in source, target and numbers, and `skips` elements
    before the first row in source and target.
    """

    rows: int
    width: int
    gaps: tuple[int, int, int]
    skips: tuple[int, int]
    dtypes: tuple[torch.dtype, torch.dtype]


@dataclass
class Case:
    """Rows of boxes, one after another in two buffers, and the expected results."""

    target: Tensor
    expected: Tensor
    rows: list[Rows]
    digest: int

    def readers(self) -> list[Rows]:
        return [Rows(rows.table, rows.dtype) for rows in self.rows]


def lay_out(boxes: list[Box], device: str) -> Case:
    """Lay boxes out in buffers, and compute their digest by definition.

    Values are small integers, because the interpreter's casts truncate.
    """
    generator = torch.Generator().manual_seed(len(boxes))
    size = 256 + sum(
        16 * 2 + 4 * (box.rows + 1) * (box.width + max(box.gaps) + 16) for box in boxes
    )
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    expected = torch.full((size,), UNTOUCHED, dtype=torch.uint8)
    at, to, number, total, made = 0, 0, 5, 0, []
    for box in boxes:
        kind, dtype = box.dtypes
        pitches = tuple(box.width + gap for gap in box.gaps)
        at, to = at + box.skips[0] * kind.itemsize, to + box.skips[1] * dtype.itemsize
        spans = [max(box.rows * pitch, 1) for pitch in pitches]
        values = torch.randint(-8, 9, (spans[0],), generator=generator).to(kind)
        mine = source[at : at + values.nbytes].view(kind)
        mine.copy_(values)
        grid = values.as_strided((box.rows, box.width), (pitches[0], 1)).to(dtype)
        place = expected[to : to + spans[1] * dtype.itemsize].view(dtype)
        place.as_strided((box.rows, box.width), (pitches[1], 1)).copy_(grid)
        total += by_definition(grid, number, pitches[2])
        row = Row(mine.data_ptr(), to, box.width, number, box.rows, *pitches)
        made.append(Rows([row] if box.rows and box.width else [], dtype, mine))
        at = -(-(at + values.nbytes) // 16) * 16
        to = -(-(to + spans[1] * dtype.itemsize) // 16) * 16
        number += box.rows * pitches[2]
    blank = torch.full((size,), UNTOUCHED, dtype=torch.uint8, device=device)
    return Case(blank, expected.to(device), made, total % 2**64)


def gaps_for(unit: int) -> st.SearchStrategy[tuple[int, int, int]]:
    return st.tuples(
        *(st.integers(0, 2).map(lambda n: n * unit) for _ in range(2)), st.integers(0, 50)
    )


boxes = st.sampled_from([1, 8]).flatmap(
    lambda unit: st.builds(
        Box,
        rows=st.integers(0, 8),
        width=st.integers(0, 64 // unit).map(lambda n: n * unit),
        gaps=gaps_for(unit),
        skips=st.tuples(st.sampled_from([0, 0, 0, 1]), st.sampled_from([0, 0, 0, 3])),
        dtypes=st.sampled_from(PAIRS),
    )
)


@settings(max_examples=12)
@given(
    given=st.lists(boxes, min_size=1, max_size=2),
    chunk=st.sampled_from([16, 128]),
    programs=st.integers(0, 5),
)
def test_rows_of_any_kind_match_their_elements(given: list[Box], chunk: int, programs: int) -> None:
    """Run a table of many kinds of rows, from one element to several chunks.

    There is a program for each chunk (`programs` is 0) or a few programs.
    """
    case = lay_out(given, "cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_triton, "MIN_CHUNK", chunk)
        patch.setattr(rows_triton, "BLOCK", 16)  # chunks have whole blocks and tails
        for impl in ("triton", "torch"):
            case.target.fill_(UNTOUCHED)
            table = RowCopies(case.rows, CPU, impl)  # type: ignore[arg-type]
            table.start(case.target, programs or None)
            assert table.result() == case.digest
            assert torch.equal(case.target, case.expected), "must write elements only"
        reader = RowCopies(case.readers(), CPU, "triton")
        reader.start(case.target, programs or None)
        assert reader.result() == case.digest


@pytest.mark.parametrize(
    ("pair", "programs"),
    some(
        *[(PAIRS[0], None), (PAIRS[1], 3), (PAIRS[3], None)],
        whole=[(pair, n) for pair in PAIRS[:2] for n in (None, 1, 3, 1000)]
        + [(pair, None) for pair in OTHERS],
    ),
)
def test_rows_in_blocks_of_the_real_size_match_their_elements(
    pair: tuple[torch.dtype, torch.dtype], programs: int | None, device: str
) -> None:
    """Compare the kernel of production, on a GPU, with the definition."""
    case = lay_out(
        [
            Box(90, 208, (48, 0, 300), (0, 0), pair),  # 16-byte accesses: whole blocks and a tail
            Box(1, 40_000, (0, 0, 0), (0, 0), pair),  # three programs and an end
            # whole blocks, a masked end, an odd one
            Box(1, 4096 + 160 + 5, (0, 0, 0), (0, 0), pair),
            Box(1, 3000, (0, 0, 0), (2, 1), pair),  # misaligned
            Box(1, 1, (0, 0, 0), (0, 1), pair),
            Box(70, 33, (1, 0, 7), (1, 1), pair),  # element by element
            Box(400, 1, (3, 2, 0), (0, 0), pair),  # columns
        ],
        device,
    )
    target_device = case.target.device
    assert kinds(case.rows) >= {(True, True), (False, True)}
    table = RowCopies(case.rows, target_device, "triton")
    for _ in range(2):  # the table is reused
        table.start(case.target, programs)
        assert table.result() == case.digest
    assert torch.equal(case.target, case.expected)
    assert RowCopies(case.readers(), target_device, "triton").run(case.target) == case.digest
    with pytest.raises(ValueError, match="programs=0 must be at least 1"):
        table.start(case.target, 0)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_target_that_does_not_fit_is_refused_untouched(impl: Impl) -> None:
    source = torch.ones(20)
    row = Row(source.data_ptr(), 24, 20, 0, 1, 0, 0, 0)
    table = RowCopies([Rows([row], torch.bfloat16, source)], CPU, impl)
    target = torch.zeros(63, dtype=torch.uint8)
    for wrong in (target, target.view(torch.int8), torch.zeros(64, 2, dtype=torch.uint8).t()[0]):
        with pytest.raises(ValueError, match="rows reach to byte 64"):
            table.start(wrong)
    assert not target.any()
    nothing = RowCopies([], CPU, impl)
    assert nothing.run(target) == 0


def test_source_of_a_dtype_that_the_kernel_cannot_cast_is_copied_by_torch(device: str) -> None:
    source = torch.randn(33, dtype=torch.float64, device=device)
    target = torch.zeros(132, dtype=torch.uint8, device=device)
    row = Row(source.data_ptr(), 0, 33, 7, 1, 0, 0, 0)
    table = RowCopies([Rows([row], torch.float32, source)], target.device)
    assert not table.on_gpu and table.run(target) == digest(source.float(), 7)
    assert torch.equal(target.view(torch.float32), source.float())


# ---------------------------------------------------------------- programs


def row(**changes: object) -> Rows:
    """Return one row, from fp32 to bf16 unless changed."""
    fields = {"source": 1 << 20, "target": 0, "width": 64, "index_base": 0, "rows": 10}
    fields |= {"source_pitch": 0, "target_pitch": 0, "index_pitch": 100}
    dtype, source = changes.pop("dtype", torch.bfloat16), changes.pop("cast", torch.float32)
    made = Row(**{**fields, **changes})  # type: ignore[arg-type]
    return Rows([made], dtype, None if source is None else torch.empty(0, dtype=source))  # type: ignore[arg-type, call-overload]


def launches_of(given: Sequence[Rows]) -> list[Launch]:
    return table_of(given).launches


def table_of(given: Sequence[Rows]) -> DeviceTable:
    source, device = given[0].source, CPU
    if source is not None:
        device = source.device
    rows = [row for group in given for row in group.table]
    return DeviceTable({(None if source is None else source.dtype, given[0].dtype): rows}, device)


def kinds(given: Sequence[Rows]) -> set[tuple[bool, bool]]:
    launches = launches_of(given)
    return {(launch.constants["ALIGNED"], launch.constants["GRID"]) for launch in launches}


def test_rows_are_classified_as_aligned_or_not_and_as_runs_or_grids() -> None:
    pitches = {"source_pitch": 64, "target_pitch": 72}
    assert kinds([row(**pitches)]) == {(True, True)}
    for wrong in (
        {"width": 60},
        {"target": 2},
        {"source": 1 << 20 | 4},
        {"source_pitch": 65},
        {"target_pitch": 68},
    ):
        assert kinds([row(**{**pitches, **wrong})]) == {(False, True)}, wrong
    assert kinds(
        [row(cast=torch.bfloat16, dtype=torch.float32, source_pitch=68, target_pitch=68)]
    ) == {(False, True)}, "a source row would begin at half a vector"
    joined = {"source_pitch": 64, "target_pitch": 64, "index_pitch": 64}
    assert kinds([row(**joined)]) == {(True, False)}, "rows that follow each other are one run"
    assert kinds([row(**joined, cast=None)]) == {(True, False)}
    far = {"source_pitch": 1 << 18, "target_pitch": 1 << 18}
    assert kinds([row(width=1 << 17, **far)]) == {(True, False)}, "long rows are runs"
    assert kinds([row(width=(1 << 17) + 5, **far)]) == {(True, False), (False, False)}


def test_rows_far_apart_have_64_bit_addresses() -> None:
    """Place rows 3 Gi elements apart, and their numbers 5 Gi."""
    pitch, count, chunk = 3 << 30, 4, rows_triton.MIN_CHUNK
    far = {"source_pitch": pitch, "target_pitch": pitch, "index_pitch": 5 << 30, "rows": count}
    (launch,) = launches_of([row(width=16, target=64, **far)] * 2)
    assert launch.shapes.tolist() == [[16, pitch, pitch, 5 << 30]], "one shape for both"
    assert launch.programs.tolist() == [[1 << 20, 64, 64, 0, 0, 0]] * 2
    (launch,) = launches_of([row(width=chunk, **far)])
    third = [(1 << 20) + 3 * pitch * 4, 3 * pitch * 2, chunk, 15 << 30, 0, 0]
    assert launch.programs[3].tolist() == third


def test_kernel_reads_rows_far_apart() -> None:
    """Read at offsets beyond 2^31 in one program, in memory that stays almost untouched."""
    pitch = (1 << 31) + 16
    far = torch.empty(pitch + 16, dtype=torch.uint8)  # 2 GiB of addresses, two pages of memory
    grid = far.as_strided((2, 16), (pitch, 1))
    grid.copy_(torch.arange(32).view(2, 16))
    expected = by_definition(grid, 0, 1 << 33)
    for impl in ("triton", "torch"):
        assert digest(grid, 0, impl, index_pitch=1 << 33) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("hidden", "inner", "aligned"), [(3584, 18944, True), (3583, 18942, False)]
)
def test_tables_of_grids_are_small(hidden: int, inner: int, aligned: bool) -> None:
    """Cut grids of 7.6 B parameters, split in columns."""
    width, count = inner // 2, 7_600_000_000 // 56 // (inner // 2)
    shape = {"width": width, "rows": count, "index_pitch": inner}
    pitches = {"source_pitch": inner, "target_pitch": width}
    given = [row(**shape, **pitches, target=i * width * count * 2) for i in range(56)]
    table = table_of(given)
    assert {launch.constants["ALIGNED"] for launch in table.launches} == {aligned}
    assert table.nbytes < 16 << 20
    assert sum(len(launch.programs) for launch in table.launches) > 20_000


@pytest.mark.parametrize("elements", [494_000_000, 7_600_000_000, 70_000_000_000])
def test_tables_are_small_and_small_models_have_many_programs(elements: int) -> None:
    width = elements // 160 // 16 * 16
    given = [row(target=i * width * 2, width=width, rows=1, cast=None) for i in range(160)]
    table = table_of(given)
    assert table.nbytes < 20 << 20
    concurrent = 132 * 64 // rows_triton.WARPS  # multiprocessors of an H100, warps of each
    # the last round, in which some programs are idle, is at most one of twenty
    assert sum(len(launch.programs) for launch in table.launches) > 20 * concurrent


@pytest.mark.gpu
def test_casts_round_to_nearest_even_like_torch() -> None:
    """Round ties, denormals, infinities and numbers that overflow bf16.

    This needs a GPU, because the interpreter truncates.
    """
    words = torch.randint(
        -(1 << 31), 1 << 31, (1 << 16,), generator=torch.Generator().manual_seed(3)
    )
    ties = (torch.arange(1 << 15) << 16 | 0x8000).to(torch.int32)
    source = torch.cat([words.to(torch.int32), ties]).view(torch.float32)
    source = source[~source.isnan()].cuda()
    target = torch.empty(len(source), dtype=torch.bfloat16, device="cuda")
    given = Row(source.data_ptr(), 0, len(source), 0, 1, 0, 0, 0)
    table = RowCopies([Rows([given], torch.bfloat16, source)], source.device)
    assert table.run(target.view(torch.uint8)) == digest(source.bfloat16(), 0, impl="torch")
    assert torch.equal(target.view(torch.int16), source.bfloat16().view(torch.int16))


CASES = some(  # source, aligned, grid, looping
    ("bfloat16", True, False, False),
    (None, True, False, False),
    ("float32", False, False, False),
    ("float32", True, True, False),
    ("float32", False, True, False),
    ("bfloat16", True, False, True),
    ("bfloat16", True, True, True),
    whole=[
        ("float32", True, False, False),
        ("bfloat16", True, True, False),
        (None, True, True, False),
    ],
)
COMPILE = """
import collections, json, re
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from memsaver.ops.rows_triton import WARPS, instance, run_rows

INSTRUCTION = r"^\\s*(?:@!?%p\\d+ )?([a-z][\\w.]*)"
TABLES = {name: "*i64" for name in ("shapes", "rows", "partials")}
SCALARS = {"base": "i64", "count": "i32"}
kernels = {}
for source, aligned, grid, looping in %r:
    dtype = source and getattr(torch, source)
    constants = instance(dtype, torch.bfloat16, aligned=aligned, grid=grid)
    constants["LOOPING"] = looping
    types = {**TABLES, **SCALARS, **dict.fromkeys(constants, "constexpr")}
    source_code = ASTSource(run_rows, {n: types[n] for n in run_rows.arg_names}, constants)
    target = GPUTarget("cuda", 90, 32)
    compiled = triton.compile(source_code, target=target, options={"num_warps": WARPS})
    ptx = compiled.asm["ptx"]
    labels = re.findall(r"^(\\$L__BB\\w+):", ptx, re.M)
    after = {label: ptx.split(label + ":")[1] for label in labels}
    loops = [text.split(label + ";")[0] for label, text in after.items() if label + ";" in text]
    bodies = [re.findall(INSTRUCTION, loop, re.M) for loop in loops]
    elements = constants["BLOCK"] * constants["VECTOR"] // (32 * WARPS)
    names = re.findall(INSTRUCTION, ptx, re.M)
    kernels[f"{source} {aligned} {grid} {looping}"] = {
        "memory": collections.Counter(name for name in names if ".global." in name),
        "loop": min(map(len, bodies)) / elements,
        "loops": len(bodies),
        "shared": compiled.metadata.shared,
    }
print(json.dumps(kernels))
"""


def test_compiled_kernel_has_wide_accesses_and_little_arithmetic() -> None:
    kernels = json.loads(compile_alone(COMPILE.replace("%r", repr(CASES))))
    for kind, kernel in kernels.items():
        source, aligned, grid, looping = kind.split()
        memory = kernel["memory"]
        assert kernel["loops"] == (2 if looping == "True" else 1), kind
        sums = 8 * rows_triton.WARPS  # bytes: one sum of each warp
        assert kernel["shared"] <= sums, f"{kind}: elements change threads"
        if aligned == "False":
            assert "ld.global.b32" in memory, kind
            continue
        assert memory["ld.global.v4.b32"] == (16 if source == "float32" else 8), kind
        assert memory.get("st.global.v4.b32", 0) == (0 if source == "None" else 8), kind
        assert all("v4.b32" in name or name.endswith(".b64") for name in memory), (
            f"{kind}: {memory}"
        )
        # PTX instructions an element, of which ptxas makes fewer
        limit = 24 if grid == "True" else 20
        assert kernel["loop"] < limit, kind
