"""Segment tables: how runs and grids are cut into programs, copied, cast and digested like their
elements one by one, and that the compiler widens its accesses.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from memsaver.ops import segments as segments_module
from memsaver.ops import segments_triton
from memsaver.ops.digest import digest
from memsaver.ops.segments import Segment, SegmentTable
from tests.helpers.compiler import compile_alone
from tests.helpers.digests import by_definition
from tests.helpers.effort import some

CPU = torch.device("cpu")
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


@dataclass(frozen=True)
class Box:
    """A segment to be made.

    gaps: elements after each row in source, target, numbers; skips: before the first.
    """

    rows: int
    width: int
    gaps: tuple[int, int, int]
    skips: tuple[int, int]
    dtypes: tuple[torch.dtype, torch.dtype]


@dataclass
class Case:
    """Segments of some boxes beside each other in two buffers, and what should come of them."""

    source: Tensor
    target: Tensor
    expected: Tensor
    segments: list[Segment]
    digest: int


def lay_out(boxes: list[Box], device: str) -> Case:
    """Small integers: the interpreter's casts truncate.

    The expected digest is of rows by the definition.
    """
    generator = torch.Generator().manual_seed(len(boxes))
    size = 256 + sum(
        16 * 2 + 4 * (box.rows + 1) * (box.width + max(box.gaps) + 16) for box in boxes
    )
    source = torch.zeros(size, dtype=torch.uint8)
    expected = torch.full((size,), 0xA5, dtype=torch.uint8)
    at, to, number, total, segments = 0, 0, 5, 0, []
    for box in boxes:
        kind, dtype = box.dtypes
        pitches = tuple(box.width + gap for gap in box.gaps)
        at, to = at + box.skips[0] * kind.itemsize, to + box.skips[1] * dtype.itemsize
        spans = [max(box.rows * pitch, 1) for pitch in pitches]
        values = torch.randint(-8, 9, (spans[0],), generator=generator).to(kind)
        source[at : at + values.nbytes] = values.view(torch.uint8)
        grid = values.as_strided((box.rows, box.width), (pitches[0], 1)).to(dtype)
        place = expected[to : to + spans[1] * dtype.itemsize].view(dtype)
        place.as_strided((box.rows, box.width), (pitches[1], 1)).copy_(grid)
        total += by_definition(grid, number, pitches[2])
        segments.append(
            Segment(
                dtype=dtype, target=to, count=box.width, index_base=number, source=at,
                source_dtype=kind, rows=box.rows,
                source_pitch=pitches[0], target_pitch=pitches[1], index_pitch=pitches[2],
            )
        )  # fmt: skip
        at = -(-(at + values.nbytes) // 16) * 16
        to = -(-(to + spans[1] * dtype.itemsize) // 16) * 16
        number += box.rows * pitches[2]
    on = source.to(device)
    moved = [_from(segment, on.data_ptr()) for segment in segments]
    blank = torch.full((size,), 0xA5, dtype=torch.uint8, device=device)
    return Case(on, blank, expected.to(device), moved, total % 2**64)


def _from(segment: Segment, source: int, target: int = 0) -> Segment:
    """With these addresses added."""
    return Segment(
        **{**vars(segment), "source": segment.source + source, "target": segment.target + target}
    )


def reader_of(segment: Segment) -> Segment:
    return Segment(**{**vars(segment), "source": 0, "source_dtype": None, "source_pitch": 0})


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
def test_grids_of_all_kinds_are_their_elements(given: list[Box], chunk: int, programs: int) -> None:
    """One table of many kinds, with a program a row of it (0 here) or a few; rows of one element to
    rows of chunks.
    """
    case = lay_out(given, "cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments_module, "MIN_CHUNK", chunk)
        patch.setattr(segments_triton, "ROWS", 16)  # a block: chunks have whole ones and tails
        table = SegmentTable(case.segments, CPU)
        table.launch(case.target.data_ptr(), programs=programs or None)
        assert table.digest() == case.digest
        assert torch.equal(case.target, case.expected), "all elements, and nothing between them"
        reader = SegmentTable([reader_of(segment) for segment in case.segments], CPU)
        reader.launch(case.target.data_ptr(), programs=programs or None)
        assert reader.digest() == case.digest


@pytest.mark.parametrize(
    ("pair", "programs"),
    some(
        *[(PAIRS[0], None), (PAIRS[1], 3), (PAIRS[3], None)],
        whole=[(pair, n) for pair in PAIRS[:2] for n in (None, 1, 3, 1000)]
        + [(pair, None) for pair in OTHERS],
    ),
)
def test_blocks_of_the_real_size(
    pair: tuple[torch.dtype, torch.dtype], programs: int | None, device: str
) -> None:
    """On a GPU this is the kernels as they are used, against the definition."""
    case = lay_out(
        [
            Box(90, 208, (48, 0, 300), (0, 0), pair),  # 16-byte accesses: whole blocks and a tail
            Box(1, 40_000, (0, 0, 0), (0, 0), pair),  # three rows of the table and an end
            # whole blocks, a masked end, an odd one
            Box(1, 4096 + 160 + 5, (0, 0, 0), (0, 0), pair),
            Box(1, 3000, (0, 0, 0), (2, 1), pair),  # misaligned
            Box(1, 1, (0, 0, 0), (0, 1), pair),
            Box(70, 33, (1, 0, 7), (1, 1), pair),  # element by element
            Box(400, 1, (3, 2, 0), (0, 0), pair),  # columns
        ],
        device,
    )
    table = SegmentTable(case.segments, torch.device(device))
    assert {(launch.kind.aligned, launch.kind.grid) for launch in table.launches} >= {
        (True, True),
        (False, True),
    }
    table.launch(case.target.data_ptr(), programs=programs)
    assert table.digest() == case.digest
    assert torch.equal(case.target, case.expected)
    readers = [_from(reader_of(segment), 0, case.target.data_ptr()) for segment in case.segments]
    reader = SegmentTable(readers, torch.device(device))
    reader.launch(0, programs=programs)
    assert reader.digest() == case.digest


def test_some_segments_alone(device: str) -> None:
    case = lay_out(
        [Box(20, 16, (8, 8, 1), (0, 0), PAIRS[1]), Box(20, 16, (0, 8, 0), (0, 0), PAIRS[1])], device
    )
    table, first = SegmentTable(case.segments, torch.device(device)), case.segments[0].end
    table.launch(case.target.data_ptr(), 0, 1, programs=1)
    assert torch.equal(case.target[:first], case.expected[:first])
    assert (case.target[first:] == 0xA5).all()
    table.launch(case.target.data_ptr(), 1, programs=7)
    assert torch.equal(case.target, case.expected) and table.digest() == case.digest
    with pytest.raises(ValueError, match="programs=0 must be at least 1"):
        table.launch(case.target.data_ptr(), programs=0)


def segment(**changes: object) -> Segment:
    fields = {
        "dtype": torch.bfloat16,
        "target": 0,
        "count": 64,
        "index_base": 0,
        "source": 1 << 20,
        "rows": 10,
    }
    return Segment(**{**fields, "source_dtype": torch.float32, "index_pitch": 100, **changes})  # type: ignore[arg-type]


def kinds(given: Segment) -> set[tuple[bool, bool]]:
    return {
        (launch.kind.aligned, launch.kind.grid) for launch in SegmentTable([given], CPU).launches
    }


def test_how_a_grid_is_handled() -> None:
    pitches = {"source_pitch": 64, "target_pitch": 72}
    assert kinds(segment(**pitches)) == {(True, True)}
    for wrong in (
        {"count": 60},
        {"target": 2},
        {"source": 1 << 20 | 4},
        {"source_pitch": 65},
        {"target_pitch": 68},
    ):
        assert kinds(segment(**{**pitches, **wrong})) == {(False, True)}, wrong
    assert kinds(
        segment(source_dtype=torch.bfloat16, dtype=torch.float32, source_pitch=68, target_pitch=68)
    ) == {(False, True)}, "a source row would begin at half a vector"
    joined = {"source_pitch": 64, "target_pitch": 64, "index_pitch": 64}
    assert kinds(segment(**joined)) == {(True, False)}, "rows that follow each other are one run"
    assert kinds(reader_of(segment(**joined))) == {(True, False)}
    far = {"source_pitch": 1 << 18, "target_pitch": 1 << 18}
    assert kinds(segment(count=1 << 17, **far)) == {(True, False)}, "long rows are runs"
    assert kinds(segment(count=(1 << 17) + 5, **far)) == {(True, False), (False, False)}


def test_far_rows_have_64_bit_addresses() -> None:
    """A pitch of 3 Gi elements, read with the numbers 5 Gi apart: rows of one buffer and of another
    one far away.
    """
    pitch, rows, chunk = 3 << 30, 4, segments_module.MIN_CHUNK
    given = segment(
        count=16, rows=rows, source_pitch=pitch, target_pitch=pitch, index_pitch=5 << 30, target=64
    )
    (launch,) = SegmentTable([given] * 2, CPU).launches
    assert launch.shapes is not None and launch.shapes.tolist() == [[16, pitch, pitch, 5 << 30]], (
        "one shape for both"
    )
    assert launch.rows.tolist() == [[1 << 20, 64, 64, 0, 0, 0]] * 2
    long = segment(
        count=chunk, rows=rows, source_pitch=pitch, target_pitch=pitch, index_pitch=5 << 30
    )
    (launch,) = SegmentTable([long], CPU).launches
    assert launch.rows[3].tolist() == [
        (1 << 20) + 3 * pitch * 4,
        3 * pitch * 2,
        chunk,
        15 << 30,
        0,
        0,
    ]


def test_the_kernel_reads_rows_that_are_far_apart() -> None:
    """Offsets within one program beyond 2^31, in memory of which almost nothing is touched."""
    pitch = (1 << 31) + 16
    far = torch.empty(pitch + 16, dtype=torch.uint8)  # 2 GiB of addresses, two pages of memory
    rows = far.as_strided((2, 16), (pitch, 1))
    rows.copy_(torch.arange(32).view(2, 16))
    there = {"target": far.data_ptr(), "target_pitch": pitch, "index_pitch": 1 << 33}
    given = Segment(dtype=torch.uint8, count=16, index_base=0, rows=2, **there)  # type: ignore[arg-type]
    table = SegmentTable([given], CPU)
    table.launch(0)
    assert (
        table.digest()
        == digest(rows, 0, impl="torch", index_pitch=1 << 33)
        == by_definition(rows, 0, 1 << 33)
    )


@pytest.mark.parametrize(
    ("hidden", "inner", "aligned"), [(3584, 18944, True), (3583, 18942, False)]
)
def test_tables_of_grids_are_small(hidden: int, inner: int, aligned: bool) -> None:
    """All of 7.6 B parameters split in columns."""
    count, rows = inner // 2, 7_600_000_000 // 56 // (inner // 2)
    shape = {
        "count": count,
        "rows": rows,
        "source_pitch": inner,
        "target_pitch": count,
        "index_pitch": inner,
    }
    given = [segment(**shape, target=i * count * rows * 2) for i in range(56)]
    table = SegmentTable(given, CPU)
    assert {launch.kind.aligned for launch in table.launches} == {aligned}
    assert table.nbytes < 16 << 20 and sum(len(launch.rows) for launch in table.launches) > 20_000


@pytest.mark.parametrize("elements", [494_000_000, 7_600_000_000, 70_000_000_000])
def test_tables_are_small_and_small_models_have_many_programs(elements: int) -> None:
    count = elements // 160 // 16 * 16
    segments = [
        Segment(dtype=torch.bfloat16, target=i * count * 2, count=count, index_base=0)
        for i in range(160)
    ]
    table = SegmentTable(segments, torch.device("cpu"))
    assert table.nbytes < 16 << 20
    at_once = 132 * 64 // segments_triton.WARPS  # multiprocessors of an H100, warps of each
    # so the last round, in which some do nothing, is at most one of twenty
    assert sum(len(launch.rows) for launch in table.launches) > 20 * at_once


@pytest.mark.gpu
def test_casts_round_to_nearest_even_like_torch() -> None:
    """Ties, denormals, infinities and numbers that overflow bf16, on a GPU (the interpreter
    truncates).
    """
    words = torch.randint(
        -(1 << 31), 1 << 31, (1 << 16,), generator=torch.Generator().manual_seed(3)
    )
    ties = (torch.arange(1 << 15) << 16 | 0x8000).to(torch.int32)
    source = torch.cat([words.to(torch.int32), ties]).view(torch.float32)
    source = source[~source.isnan()].cuda()
    target = torch.empty(len(source), dtype=torch.bfloat16, device="cuda")
    sizes = {"dtype": torch.bfloat16, "source_dtype": torch.float32, "count": len(source)}
    table = SegmentTable(
        [Segment(source=source.data_ptr(), target=0, index_base=0, **sizes)], source.device
    )
    table.launch(target.data_ptr())
    assert table.digest() == digest(source.bfloat16(), 0, impl="torch")
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
from memsaver.ops.segments_triton import run_grids
from memsaver.ops.cuts import Kind
from memsaver.ops.segments_triton import WARPS, instance, run_segments

INSTRUCTION = r"^\\s*(?:@!?%p\\d+ )?([a-z][\\w.]*)"
TABLES = {name: "*i64" for name in ("shapes", "rows", "partials")}
SCALARS = {"base": "i64", "first": "i32", "last": "i32"}
found = {}
for source, aligned, grid, looping in %r:
    kernel = run_grids if grid else run_segments
    kind = Kind(source and getattr(torch, source), torch.bfloat16, aligned, grid)
    constants = instance(kind, looping)
    types = {**TABLES, **SCALARS, **dict.fromkeys(constants, "constexpr")}
    source_code = ASTSource(kernel, {n: types[n] for n in kernel.arg_names}, constants)
    target = GPUTarget("cuda", 90, 32)
    compiled = triton.compile(source_code, target=target, options={"num_warps": WARPS})
    ptx = compiled.asm["ptx"]
    labels = re.findall(r"^(\\$L__BB\\w+):", ptx, re.M)
    after = {label: ptx.split(label + ":")[1] for label in labels}
    loops = [text.split(label + ";")[0] for label, text in after.items() if label + ";" in text]
    bodies = [re.findall(INSTRUCTION, loop, re.M) for loop in loops]
    elements = constants["BLOCK"] * constants["VECTOR"] // (32 * WARPS)
    names = re.findall(INSTRUCTION, ptx, re.M)
    found[f"{source} {aligned} {grid} {looping}"] = {
        "memory": collections.Counter(name for name in names if ".global." in name),
        "loop": min(map(len, bodies)) / elements,
        "loops": len(bodies),
        "shared": compiled.metadata.shared,
    }
print(json.dumps(found))
"""


def test_the_compiler_makes_wide_accesses_and_little_arithmetic() -> None:
    found = json.loads(compile_alone(COMPILE.replace("%r", repr(CASES))))
    for kind, kernel in found.items():
        source, aligned, grid, looping = kind.split()
        memory = kernel["memory"]
        assert kernel["loops"] == (2 if looping == "True" else 1), kind
        sums = 8 * segments_triton.WARPS  # bytes: one of each warp
        assert kernel["shared"] <= sums, f"{kind}: elements change threads"
        if aligned == "False":
            assert "ld.global.b32" in memory, kind
            continue
        assert memory["ld.global.v4.b32"] == (16 if source == "float32" else 8), kind
        assert memory.get("st.global.v4.b32", 0) == (0 if source == "None" else 8), kind
        assert all("v4.b32" in name or name.endswith(".b64") for name in memory), (
            f"{kind}: {memory}"
        )
        # PTX instructions an element; ptxas makes fewer of them
        limit = 24 if grid == "True" else 20
        assert kernel["loop"] < limit, kind
