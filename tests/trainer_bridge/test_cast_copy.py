"""Many placements at once: the kernel against the torch loop, batches, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from memsaver.ops.digest import digest
from memsaver.ops.dispatch import Impl
from trainer_bridge.ops import cast_copy as cast_copy_module
from trainer_bridge.ops.cast_copy import CastCopy, Placement, all_finite, cast_copy

SIZES = [2048, 16, 5000, 1, 3333]
NBYTES = 1 << 16
UNTOUCHED = 0xA5


def target_on(device: str) -> Tensor:
    return torch.full((NBYTES,), UNTOUCHED, dtype=torch.uint8, device=device)


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
        assert copy.run(target) == total % 2**64
        assert torch.equal(target, expected)
    given[2].source[17] += 1
    assert copy.run(target) != total % 2**64, "it must read the sources again"


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_what_is_said_to_be_written_is_written_and_no_more(
    impl: Impl, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cast_copy_module, "_PART_BYTES", 7000)
    given, target, seen = placements(SIZES, torch.bfloat16, torch.bfloat16, device), target_on(device), []

    def look(done: int, total: int) -> None:
        written = [bool((target[p.offset : p.offset + p.nbytes] != UNTOUCHED).any()) for p in given]
        assert written == [n < done for n in range(total)]
        seen.append(done)

    copy = CastCopy(given, impl)
    assert copy.run(target, look) == copy.run(target_on(device))
    assert seen == ([0, 1, 2, 3, 4] if impl == "torch" else [0, 2, 3])


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_a_hook_that_raises_leaves_the_rest_unwritten_and_the_next_run_whole(impl: Impl, device: str) -> None:
    def die(done: int, total: int) -> None:
        if done >= total // 2:
            raise RuntimeError("cosmic ray")

    given, target = placements(SIZES, torch.float32, torch.bfloat16, device), target_on(device)
    copy = CastCopy(given, impl)
    with pytest.raises(RuntimeError, match="cosmic ray"):
        copy.run(target, die)
    begins = [given[0].offset, given[2].offset, given[4].offset]
    assert [int(target[at : at + 8].to(torch.int32).sum()) == 8 * UNTOUCHED for at in begins] == [False, True, True]
    assert copy.run(target) == copy.run(target_on(device), lambda done, total: None)


def test_batches_are_bounded_and_one_begins_at_half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cast_copy_module, "_PART_BYTES", 100)
    parts = cast_copy_module._parts
    assert parts([]) == []
    assert parts([500]) == [(0, 1)]
    assert parts([1, 1]) == [(0, 1), (1, 2)]
    assert parts([1] * 7) == [(0, 3), (3, 7)]
    assert parts([60, 40, 1, 300, 50, 50, 1]) == [(0, 2), (2, 3), (3, 4), (4, 6), (6, 7)]


def test_nothing_to_copy(device: str) -> None:
    assert CastCopy([]).run(target_on(device)) == 0
    none = placements([0, 3, 0], torch.float32, torch.float32, device)
    assert CastCopy(none).run(target_on(device)) == digest(none[1].source, none[1].index_base)


def test_misfits_are_refused_before_anything_is_written() -> None:
    def placed(source: Tensor, offset: int = 0, dtype: torch.dtype = torch.bfloat16) -> Placement:
        return Placement(source=source, offset=offset, dtype=dtype, index_base=0)

    for wrong, text in [
        (placed(torch.zeros(4, 4).t()[:, :2]), "not contiguous"),
        (placed(torch.zeros(4), 3), "byte 3 is not aligned to torch.bfloat16"),
        (placed(torch.zeros(4), dtype=torch.float64), "1, 2 or 4 bytes, got torch.float64"),
    ]:
        with pytest.raises(ValueError, match=text):
            CastCopy([placed(torch.zeros(4)), wrong])
    target = torch.zeros(63, dtype=torch.uint8)
    with pytest.raises(ValueError, match="needs 64 bytes"):
        CastCopy([placed(torch.ones(4)), placed(torch.ones(4), 56)]).run(target)
    assert not target.any()


def test_long_tensors_are_cast_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cast_copy_module, "_CHUNK", 8)
    monkeypatch.setattr(cast_copy_module, "_CHUNK_CUDA", 8)
    source, target = torch.randn(9, 3), torch.empty(9, 3, dtype=torch.bfloat16)
    assert cast_copy(target, source, 100) == digest(source.bfloat16(), 100)
    assert torch.equal(target, source.bfloat16())
    assert all_finite(source)
    source[8, 2] = math.nan
    assert not all_finite(source)
    with pytest.raises(ValueError, match="does not fit"):
        cast_copy(target, source[:8], 0)
