"""Many placements at once: the kernel against the torch loop, batches, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from memsaver.ops.digest import digest
from memsaver.ops.layout import grids, row_major
from memsaver.system.machine import Impl
from tests.helpers.digests import by_definition, element
from trainer_bridge.sync import cast_copy as cast_copy_module
from trainer_bridge.sync.cast_copy import CastCopy, OnPart, Placement, all_finite, cast_copy

SIZES = [2048, 16, 5000, 1, 3333]
NBYTES = 1 << 16
UNTOUCHED = 0xA5


def target_on(device: str) -> Tensor:
    return torch.full((NBYTES,), UNTOUCHED, dtype=torch.uint8, device=device)


def run(
    copy: CastCopy, target: Tensor, on_part: OnPart | None = None, programs: int | None = None
) -> int:
    copy.start(target, on_part, programs)
    return copy.result()


def placements(
    sizes: Sequence[int], source: torch.dtype, dtype: torch.dtype, device: str, gap: int = 32
) -> list[Placement]:
    """Side by side with gaps of bytes; small integers, which the interpreter's casts keep."""
    generator = torch.Generator().manual_seed(4)
    made, offset, index = [], 64, 7
    for size in sizes:
        values = torch.randint(-8, 9, (size,), generator=generator).to(source).to(device)
        made.append(Placement(source=values, offset=offset, dtype=dtype, index_base=index))
        offset += size * dtype.itemsize + gap
        index += size
    return made


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize(
    ("source", "dtype"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float16),
        (torch.float64, torch.float32),  # by torch, whatever is asked for
    ],
)
def test_every_placement_is_cast_written_and_digested(
    impl: Impl, source: torch.dtype, dtype: torch.dtype, device: str
) -> None:
    given, expected, total = placements(SIZES, source, dtype, device), target_on(device), 0
    for each in given:
        values = each.source.to(dtype)
        expected[each.offset : each.offset + each.nbytes] = values.view(torch.uint8)
        total += digest(values, each.index_base, impl="torch")
    copy = CastCopy(given, impl)
    for _ in range(2):
        target = target_on(device)
        assert run(copy, target) == total % 2**64
        assert torch.equal(target, expected)
    given[2].source[17] += 1
    assert run(copy, target) != total % 2**64, "it must read the sources again"


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_a_hook_hears_of_what_is_written_and_no_more_and_stops_the_rest(
    impl: Impl, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cast_copy_module, "PART_BYTES", 7000)
    given = placements(SIZES, torch.float32, torch.bfloat16, device)
    target = target_on(device)
    seen = list[int]()

    def look(done: int, total: int) -> None:
        written = [bool((target[p.offset : p.offset + p.nbytes] != UNTOUCHED).any()) for p in given]
        assert written == [n < done for n in range(total)]
        seen.append(done)
        if len(seen) == 2:
            raise RuntimeError("cosmic ray")

    copy = CastCopy(given, impl)
    with pytest.raises(RuntimeError, match="cosmic ray"):
        run(copy, target, look)
    target = target_on(device)
    assert run(copy, target, look) == run(copy, target_on(device))  # the next run is whole
    assert seen == ([0, 1, 0, 1, 2, 3, 4] if impl == "torch" else [0, 2, 0, 2, 3])


def test_batches_are_bounded_and_one_begins_at_half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cast_copy_module, "PART_BYTES", 100)
    parts = cast_copy_module.parts
    assert parts([]) == []
    assert parts([500]) == [(0, 1)]
    assert parts([1, 1]) == [(0, 1), (1, 2)]
    assert parts([1] * 7) == [(0, 3), (3, 7)]
    assert parts([60, 40, 1, 300, 50, 50, 1]) == [(0, 2), (2, 3), (3, 4), (4, 6), (6, 7)]


def test_nothing_to_copy(device: str) -> None:
    assert run(CastCopy([]), target_on(device)) == 0
    none = placements([0, 3, 0], torch.float32, torch.float32, device)
    assert run(CastCopy(none), target_on(device)) == digest(none[1].source, none[1].index_base)


def box_placements(
    source: Tensor,
    box: tuple[slice, ...],
    shape: tuple[int, ...],
    at: tuple[int, ...],
    dtype: torch.dtype,
    offset: int,
) -> list[Placement]:
    """A box of a whole parameter `source`, to be written at `at` of a tensor of `shape` from byte
    `offset` on.
    """
    sizes = source[box].shape
    own, out = row_major(source.shape), row_major(shape)
    first = sum((part.start or 0) * stride for part, stride in zip(box, own, strict=True))
    to = offset + sum(i * stride for i, stride in zip(at, out, strict=True)) * dtype.itemsize
    return [
        Placement(
            source=source.flatten()[first + grid.starts[0] :],
            offset=to + grid.starts[1] * dtype.itemsize,
            dtype=dtype,
            index_base=1000 + first + grid.starts[0],
            count=grid.width,
            rows=grid.rows,
            source_pitch=grid.pitches[0],
            target_pitch=grid.pitches[1],
            index_pitch=grid.pitches[2],
        )
        for grid in grids(sizes, own, out, own)
    ]


@settings(max_examples=40)
@drawn(
    dims=st.lists(
        st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=3
    ),
    offset=st.integers(0, 9).map(lambda n: 4 * n),
    chunk=st.integers(1, 20),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_boxes_of_any_shape_are_written_like_slices(
    dims: list[tuple[int, int, int]], offset: int, chunk: int, dtype: torch.dtype
) -> None:
    """By torch, in pieces of any size.

    dims: size, what the source has before it, what the target has before it.
    """
    shape = tuple(n + before for n, before, _ in dims)
    source = torch.randn(shape, generator=torch.Generator().manual_seed(6))
    box = tuple(slice(before, before + n) for n, before, _ in dims)
    out, at = tuple(n + 2 * before for n, _, before in dims), tuple(before for _, _, before in dims)
    expected = target_on("cpu")
    end = offset + math.prod(out) * dtype.itemsize
    to = tuple(slice(before, before + n) for n, _, before in dims)
    expected[offset:end].view(dtype).view(out)[to] = source[box].to(dtype)
    integers = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    bits = source[box].to(dtype).flatten().view(integers).tolist()
    numbers = torch.arange(source.numel()).view(shape)[box].flatten().tolist()
    total = sum(
        element(1000 + i, b & (1 << 8 * dtype.itemsize) - 1)
        for i, b in zip(numbers, bits, strict=True)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cast_copy_module, "CHUNK", chunk)
        target = target_on("cpu")
        copy = CastCopy(box_placements(source, box, out, at, dtype, offset), "torch")
        assert run(copy, target) == total % 2**64
        assert torch.equal(target, expected)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("programs", [None, 2])
def test_a_column_slice_and_experts_in_two_steps(
    impl: Impl, programs: int | None, device: str
) -> None:
    weights = torch.arange(-128, 128).repeat(30).view(60, 128).float().to(device)
    experts = torch.arange(-90, 90).repeat(8).view(4, 12, 30).float().to(device)
    halves = box_placements(
        weights, (slice(10, 50), slice(64, 128)), (40, 64), (0, 0), torch.bfloat16, 0
    )
    third = box_placements(
        experts,
        (slice(0, 4), slice(3, 6), slice(0, 30)),
        (4, 3, 30),
        (0, 0, 0),
        torch.bfloat16,
        8192,
    )
    assert len(halves) == len(third) == 1
    target = target_on(device)
    copy = CastCopy([*halves, *third], impl)
    with pytest.raises(ValueError, match="not started"):
        copy.result()
    copy.start(target, programs=programs)
    left, right = weights[10:50, 64:].bfloat16(), experts[:, 3:6].bfloat16()
    total = by_definition(left, 1000 + 10 * 128 + 64, 128) + by_definition(
        right.reshape(4, 90), 1000 + 3 * 30, 360
    )
    assert copy.result() == total % 2**64
    assert torch.equal(target[: left.nbytes], left.flatten().view(torch.uint8))
    assert torch.equal(target[8192 : 8192 + right.nbytes], right.flatten().view(torch.uint8))
    assert (target[8192 + right.nbytes :] == UNTOUCHED).all()
    assert run(copy, target, lambda done, of: None, programs) == total % 2**64


def test_misfits_are_refused_before_anything_is_written() -> None:
    def placed(source: Tensor, offset: int = 0, dtype: torch.dtype = torch.bfloat16) -> Placement:
        return Placement(source=source, offset=offset, dtype=dtype, index_base=0)

    def rows(**changes: int) -> Placement:
        pitches = {"source_pitch": 2, "target_pitch": 2, "index_pitch": 2, **changes}
        return Placement(
            source=torch.zeros(7),
            offset=0,
            dtype=torch.bfloat16,
            index_base=0,
            count=2,
            rows=3,
            **pitches,
        )

    for wrong, text in [
        (placed(torch.zeros(4, 4).t()[:, :2]), "not contiguous"),
        (placed(torch.zeros(4), 3), "byte 3 is not aligned to torch.bfloat16"),
        (placed(torch.zeros(4), dtype=torch.float64), "1, 2 or 4 bytes, got torch.float64"),
        (
            rows(source_pitch=3),
            "3 rows of 2 elements, 3 apart, reach beyond the end of source \\(7,\\)",
        ),
        (rows(target_pitch=1), "rows of 2 elements overlap at a target_pitch of 1"),
        (rows(index_pitch=-1), "must not be negative, got \\(3, 2, 2, 2, -1\\)"),
    ]:
        with pytest.raises(ValueError, match=text):
            CastCopy([placed(torch.zeros(4)), wrong])
    target = torch.zeros(63, dtype=torch.uint8)
    with pytest.raises(ValueError, match="needs 64 bytes"):
        CastCopy([placed(torch.ones(4)), placed(torch.ones(4), 56)]).start(target)
    assert not target.any()


def test_long_tensors_are_cast_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cast_copy_module, "CHUNK", 8)
    monkeypatch.setattr(cast_copy_module, "CHUNK_CUDA", 8)
    source, target = torch.randn(9, 3), torch.empty(9, 3, dtype=torch.bfloat16)
    assert cast_copy(target, source, 100) == digest(source.bfloat16(), 100)
    assert torch.equal(target, source.bfloat16())
    assert all_finite(source)
    source[8, 2] = math.nan
    assert not all_finite(source)
    large = torch.tensor([1e300, 2.0], dtype=torch.float64)
    assert all_finite(large) and not all_finite(large, torch.float32)
    assert all_finite(large[1:], torch.float8_e5m2)
    with pytest.raises(ValueError, match="does not fit"):
        cast_copy(target, source[:8], 0)
