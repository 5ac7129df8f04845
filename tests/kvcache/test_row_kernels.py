"""The kernels that move rows and read fp8 beside their torch references."""

import itertools
from typing import Any

import pytest
import torch

from kvcache.ops.move import move_rows
from kvcache.ops.quant import read_fp8
from tests.helpers.kvcache.blocks import DEVICE

IMPLS: list[Any] = ["torch", "triton"]
LAYERS, SLOTS = 3, 40


def parts(slot_major: bool) -> list[torch.Tensor]:
    """[L, N, W] of three widths, one wider than a program's block; slot-major: slices of one buffer with gaps."""
    widths, generator = (1, 5, 1030), torch.Generator().manual_seed(0)
    if not slot_major:
        return [torch.randint(-(2**60), 2**60, (LAYERS, SLOTS, w), generator=generator).to(DEVICE) for w in widths]
    rows = torch.randint(-(2**60), 2**60, (SLOTS, LAYERS * sum(widths) + 7), generator=generator).to(DEVICE)
    ends = [LAYERS * end for end in itertools.accumulate(widths)]
    return [
        rows[:, end - LAYERS * w : end].unflatten(1, (LAYERS, w)).transpose(0, 1)
        for w, end in zip(widths, ends, strict=True)
    ]


@pytest.mark.parametrize("slot_major", [False, True])
@pytest.mark.parametrize(
    ("tgt", "src"),
    [
        ([30, 31, 32], [4, 9, 4]),  # nothing that is read is written
        ([5, 6, 7, 19], [4, 5, 6, 7]),  # a chain
        ([4, 5, 6, 9], [5, 6, 4, 9]),  # a ring, and a slot onto itself
        (list(range(SLOTS)), list(reversed(range(SLOTS)))),
        ([], []),
    ],
)
@pytest.mark.parametrize("impl", IMPLS)
def test_rows_move_as_if_all_were_read_first(impl: Any, tgt: list[int], src: list[int], slot_major: bool) -> None:
    moved, expected = parts(slot_major), [part.clone() for part in parts(slot_major)]
    for part in expected:
        part[:, tgt] = part[:, src].clone()
    strided = torch.tensor([tgt, src], dtype=torch.int64, device=DEVICE).T.contiguous()
    move_rows(moved, strided[:, 0], strided[:, 1], impl)
    assert all(torch.equal(a, b) for a, b in zip(moved, expected, strict=True))


def test_rows_move_past_2_to_the_31_elements() -> None:
    """Of a part in bytes, which a pool moves as wider words; only the touched pages become real on the CPU."""
    slots, width = 2**20 + 2, 1024
    part = torch.empty((2, slots, width), dtype=torch.uint8, device=DEVICE)
    assert (2 * slots - 2) * width > 2**31
    rows = torch.arange(2 * 3 * width, device=DEVICE).to(torch.uint8).view(2, 3, width)
    part[:, [0, 1, slots - 1]] = rows
    tgt, src = torch.tensor([[slots - 1, 0, slots - 2], [1, slots - 1, 0]], device=DEVICE)
    move_rows([part], tgt, src, "triton")
    assert torch.equal(part[:, tgt], rows[:, [1, 2, 0]])
    as_one = part.view(1, 2 * slots, width)
    move_rows([as_one], tgt[:1] + slots, tgt[1:2], "triton")
    assert torch.equal(as_one[:, tgt[:1] + slots], rows[None, 0, 2:])


@pytest.mark.filterwarnings("ignore:.*encountered in multiply")  # numpy, in the interpreter
@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 0.37, 3e4, 1e-30])
def test_fp8_is_read_as_the_reference_reads_it(stored: torch.dtype, dtype: torch.dtype, scale: float) -> None:
    """Every code there is, NaN and infinity too, in rows with gaps between slots and heads."""
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    wide = torch.full((9, 4, 200), 171, dtype=torch.uint8, device=DEVICE)
    buffer = wide[:, 1:3, 8:136]
    buffer[7] = codes.view(2, 128)
    buffer[2] = codes.flip(0).view(2, 128)
    loc = torch.tensor([7, 2, 7], device=DEVICE)
    factor = torch.tensor(scale, device=DEVICE)
    reference, kernel = (read_fp8(buffer, loc, factor, stored, dtype, impl) for impl in IMPLS)
    assert kernel.dtype == dtype and kernel.shape == (3, 2, 128)
    # as the interpreter converts to bf16 by cutting off, exact values are wanted only where nothing is rounded
    rounding = 2**-7 if dtype == torch.bfloat16 and DEVICE == "cpu" and scale != 1.0 else 0.0
    torch.testing.assert_close(kernel, reference, rtol=rounding, atol=0.0, equal_nan=True)
    zero = reference == 0
    assert torch.equal(kernel[zero].signbit(), reference[zero].signbit())


@pytest.mark.parametrize("impl", IMPLS)
def test_fp8_read_of_no_rows(impl: Any) -> None:
    buffer = torch.zeros((4, 1, 8), dtype=torch.uint8, device=DEVICE)
    none, scale = torch.empty(0, dtype=torch.int64, device=DEVICE), torch.ones((), device=DEVICE)
    assert read_fp8(buffer, none, scale, torch.float8_e5m2, torch.float32, impl).shape == (0, 1, 8)
