"""Segment tables: how runs are cut, what the kernel writes and digests, and that the compiler widens its accesses."""

from __future__ import annotations

import json

import pytest
import torch

from memsaver.ops import segments as segments_module
from memsaver.ops.digest import digest
from memsaver.ops.segments import Segment, SegmentTable
from tests.helpers.compiler import compile_alone
from tests.helpers.effort import some


def run(
    dtype: torch.dtype, target: int, count: int, base: int, source: int = 0, source_dtype: torch.dtype | None = None
) -> Segment:
    """A segment of one row."""
    return Segment(dtype=dtype, target=target, count=count, index_base=base, source=source, source_dtype=source_dtype)


def test_chunks_cover_every_element_once_and_odd_ends_go_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments_module, "MIN_CHUNK", 64)
    sizes = {"dtype": torch.bfloat16, "source_dtype": torch.float32}
    given = [
        Segment(source=1600, target=0, count=200, index_base=10, **sizes),  # 192 in wide accesses, 8 left
        Segment(source=8000, target=402, count=70, index_base=500, **sizes),  # misaligned target
        Segment(source=9600, target=1024, count=0, index_base=600, **sizes),
        Segment(source=9600, target=1024, count=128, index_base=700, **sizes),
    ]
    table = SegmentTable(given, torch.device("cpu"))
    rows = {launch.kind.aligned: launch.rows.tolist() for launch in table.launches}
    assert rows[True] == [
        [1600, 0, 64, 10],
        [1856, 128, 64, 74],
        [2112, 256, 64, 138],
        [9600, 1024, 64, 700],
        [9856, 1152, 64, 764],
    ]
    assert rows[False] == [[2368, 384, 8, 202], [8000, 402, 64, 500], [8256, 530, 6, 564]]
    ends = {launch.kind.aligned: launch.ends for launch in table.launches}
    assert ends == {True: [0, 3, 3, 3, 5], False: [0, 1, 3, 3, 3]}


@pytest.mark.parametrize("elements", [494_000_000, 7_600_000_000, 70_000_000_000])
def test_tables_are_small_and_small_models_have_many_programs(elements: int) -> None:
    count = elements // 160 // 16 * 16
    segments = [Segment(dtype=torch.bfloat16, target=i * count * 2, count=count, index_base=0) for i in range(160)]
    table = SegmentTable(segments, torch.device("cpu"))
    assert table.nbytes < 16 << 20
    assert sum(len(launch.rows) for launch in table.launches) > 20_000


@pytest.mark.parametrize(
    ("dtype", "source_dtype"),
    some(
        (torch.bfloat16, torch.float32),
        (torch.float8_e4m3fn, torch.float8_e4m3fn),
        whole=[
            (torch.bfloat16, torch.bfloat16),
            (torch.float16, torch.bfloat16),
            (torch.float32, torch.float32),
            (torch.float32, torch.float16),
        ],
    ),
)
def test_a_launch_casts_copies_and_digests(dtype: torch.dtype, source_dtype: torch.dtype, device: str) -> None:
    """Whole blocks, a masked end, an odd one, and misaligned runs. Small integers: the interpreter's casts truncate."""
    generator = torch.Generator().manual_seed(1)
    source = torch.randint(-8, 9, (9000,), generator=generator).to(source_dtype).to(device)
    runs = [(0, 0, 4096 + 160 + 5), (4272, 4288, 16), (4290, 4305, 3000), (8000, 7321, 1)]  # source, target, elements
    blank = torch.full((9000,), 3.0).to(dtype).to(device)
    expected, target, total, segments = blank.clone(), blank.clone(), 0, []
    for number, (first, to, count) in enumerate(runs):
        values = source[first : first + count].to(dtype)
        expected[to : to + count] = values
        total += digest(values, 1000 * number, impl="torch")
        address = source.data_ptr() + first * source_dtype.itemsize
        segments.append(run(dtype, to * dtype.itemsize, count, 1000 * number, address, source_dtype))
    table = SegmentTable(segments, torch.device(device))
    for cut in (1, 4):
        target.copy_(blank)
        table.launch(target.data_ptr(), 0, cut)
        table.launch(target.data_ptr(), cut)
        assert table.digest() == total % 2**64
        assert torch.equal(target.view(torch.uint8), expected.view(torch.uint8))
    readers = [
        run(dtype, segment.target + target.data_ptr(), segment.count, base)
        for segment, base in zip(segments, range(0, 4000, 1000), strict=True)
    ]
    reader = SegmentTable(readers, torch.device(device))
    reader.launch(0)
    assert reader.digest() == total % 2**64


@pytest.mark.gpu
def test_casts_round_to_nearest_even_like_torch() -> None:
    """Ties, denormals, infinities and numbers that overflow bf16, on a GPU (the interpreter truncates)."""
    words = torch.randint(-(1 << 31), 1 << 31, (1 << 16,), generator=torch.Generator().manual_seed(3))
    ties = (torch.arange(1 << 15) << 16 | 0x8000).to(torch.int32)
    source = torch.cat([words.to(torch.int32), ties]).view(torch.float32)
    source = source[~source.isnan()].cuda()
    target = torch.empty(len(source), dtype=torch.bfloat16, device="cuda")
    segment = run(torch.bfloat16, 0, len(source), 0, source.data_ptr(), torch.float32)
    table = SegmentTable([segment], source.device)
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
    whole=[("float32", True, False, False), ("bfloat16", True, True, False), (None, True, True, False)],
)
COMPILE = """
import collections, json, re
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from memsaver.ops.grids_triton import run_grids
from memsaver.ops.segments import Kind
from memsaver.ops.segments_triton import WARPS, instance, run_segments

INSTRUCTION = r"^\\s*(?:@!?%p\\d+ )?([a-z][\\w.]*)"
TABLES = {name: "*i64" for name in ("shapes", "rows", "partials")}
SCALARS = {"base": "i64", "first": "i32", "last": "i32"}
found = {}
for source, aligned, grid, looping in %r:
    kernel = run_grids if grid else run_segments
    constants = instance(Kind(source and getattr(torch, source), torch.bfloat16, aligned, grid), looping)
    types = {**TABLES, **SCALARS, **dict.fromkeys(constants, "constexpr")}
    source_code = ASTSource(kernel, {n: types[n] for n in kernel.arg_names}, constants)
    compiled = triton.compile(source_code, target=GPUTarget("cuda", 90, 32), options={"num_warps": WARPS})
    ptx = compiled.asm["ptx"]
    after = {label: ptx.split(label + ":")[1] for label in re.findall(r"^(\\$L__BB\\w+):", ptx, re.M)}
    loops = [text.split(label + ";")[0] for label, text in after.items() if label + ";" in text]
    bodies = [re.findall(INSTRUCTION, loop, re.M) for loop in loops]
    elements = constants["BLOCK"] * constants["VECTOR"] // (32 * WARPS)
    found[f"{source} {aligned} {grid} {looping}"] = {
        "memory": collections.Counter(n for n in re.findall(INSTRUCTION, ptx, re.M) if ".global." in n),
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
        assert kernel["shared"] <= 64, f"{kind}: elements change threads"
        if aligned == "False":
            assert "ld.global.b32" in memory, kind
            continue
        assert memory["ld.global.v4.b32"] == (16 if source == "float32" else 8), kind
        assert memory.get("st.global.v4.b32", 0) == (0 if source == "None" else 8), kind
        assert all("v4.b32" in name or name.endswith(".b64") for name in memory), f"{kind}: {memory}"
        limit = 24 if grid == "True" else 20  # PTX instructions an element; ptxas makes fewer of them
        assert kernel["loop"] < limit, kind
