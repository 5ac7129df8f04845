"""The kernels that write and move rows beside their torch references; without a GPU in Triton's interpreter."""

import itertools
from typing import Any

import pytest
import torch

from kvcache.ops.kv_write import set_kv_buffer, set_rows
from kvcache.ops.move import move_rows
from memsaver.ops.dispatch import use_triton
from tests.helpers.effort import some
from tests.helpers.kvcache.blocks import DEVICE

IMPLS: list[Any] = ["torch", "triton"]
POISON = 171


def inputs(n: int, heads: int, dim: int, dtype: torch.dtype, layout: str) -> torch.Tensor:
    """`[n, heads, dim]` of random bits, as a slice of a wider row (fused qkv), head-first or reversed in its heads."""
    generator = torch.Generator().manual_seed(n * 1000 + heads * 10 + dim)

    def random_bits(*shape: int) -> torch.Tensor:
        width = dtype.itemsize
        raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * width), dtype=torch.uint8, generator=generator)
        return raw.to(DEVICE).view(dtype)

    if layout == "contiguous":
        return random_bits(n, heads, dim)
    if layout == "fused":
        return random_bits(n, 3 * heads * dim)[:, heads * dim : 2 * heads * dim].view(n, heads, dim)
    if layout == "head-first":
        return random_bits(heads, n, dim).transpose(0, 1)
    return random_bits(n, dim, heads).transpose(1, 2)


def poisoned(slots: int, heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((slots, heads, dim * dtype.itemsize), POISON, dtype=torch.uint8, device=DEVICE).view(dtype)


SHAPES = [  # heads, width of keys and of values, dtype
    (1, 1, 1, torch.float32),
    (3, 5, 7, torch.bfloat16),
    (5, 300, 17, torch.float16),  # rows wider than one program's block
    (3, 6, 10, torch.float8_e4m3fn),
    (2, 3, 2, torch.float64),
]


LAYOUTS = ["contiguous", "fused", "head-first", "dim-first"]
CASES = [("dim-first", shape) for shape in SHAPES] + [(layout, SHAPES[1]) for layout in LAYOUTS[:3]]


@pytest.mark.parametrize(("layout", "shape"), some(*CASES, whole=list(itertools.product(LAYOUTS[:3], SHAPES))))
def test_kv_write_equals_the_reference(layout: str, shape: tuple[int, int, int, torch.dtype]) -> None:
    heads, k_dim, v_dim, dtype = shape
    n, slots = 6, 20
    k, v = inputs(n, heads, k_dim, dtype, layout), inputs(n, heads, v_dim, dtype, layout)
    loc = torch.tensor([[19, 0], [3, 0], [4, 0], [0, 0], [7, 0], [11, 0]], device=DEVICE)[:, 0]  # strided
    assert not loc.is_contiguous()
    for impl in IMPLS:
        k_buffer, v_buffer = poisoned(slots, heads, k_dim, dtype), poisoned(slots, heads, v_dim, dtype)
        set_kv_buffer(k, v, k_buffer, v_buffer, loc, impl=impl)
        for rows, buffer in ((k, k_buffer), (v, v_buffer)):
            expected = torch.full_like(buffer.view(torch.uint8), POISON)
            expected[loc] = rows.contiguous().view(torch.uint8)
            assert torch.equal(buffer.view(torch.uint8), expected)


def test_kv_write_past_2_to_the_31_elements() -> None:
    """The last slot begins above 2^31 elements; only the touched pages of the buffer become real on the CPU."""
    slots, heads, dim = 2**21 + 2, 8, 128
    buffer = torch.empty(slots, heads, dim, dtype=torch.uint8, device=DEVICE)
    assert (slots - 1) * heads * dim > 2**31
    loc = torch.tensor([slots - 1, 1], device=DEVICE)
    k = (torch.arange(2 * heads * dim, device=DEVICE) % 251).to(torch.uint8).view(2, heads, dim)
    v = torch.tensor([5, 6], dtype=torch.uint8, device=DEVICE).view(2, 1, 1).expand(2, heads, 1)
    narrow = torch.empty(slots, heads, 1, dtype=torch.uint8, device=DEVICE)
    set_kv_buffer(k, v, buffer, narrow, loc, impl="triton")
    assert torch.equal(buffer[loc], k)
    assert torch.equal(narrow[loc], v)


@pytest.mark.parametrize("impl", IMPLS)
def test_one_row_a_token_and_no_tokens(impl: Any) -> None:
    buffer = torch.zeros(4, 2, 8, device=DEVICE)
    rows = torch.randn(2, 2, 3, device=DEVICE)
    set_rows(rows, buffer[..., 2:5], torch.tensor([3, 1], device=DEVICE), impl)
    expected = torch.zeros_like(buffer)
    expected[[3, 1], :, 2:5] = rows
    assert torch.equal(buffer, expected)
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    set_rows(rows[:0], buffer[..., 2:5], none, impl)
    set_kv_buffer(rows[:0], rows[:0], buffer[..., 2:5], buffer[..., 2:5], none, impl)
    move_rows([buffer.transpose(0, 1)], none, none, impl)
    assert torch.equal(buffer, expected)


def test_dispatch_is_by_argument_or_device() -> None:
    assert use_triton("auto", torch.device("cuda:0"))
    assert not use_triton("auto", torch.device("cpu"))
    assert use_triton("triton", torch.device("cpu"))
    assert not use_triton("torch", torch.device("cuda:0"))
    with pytest.raises(ValueError, match="unknown impl 'fast'"):
        use_triton("fast", torch.device("cpu"))  # type: ignore[arg-type]


# ---------------------------------------------------------------- moves

LAYERS, SLOTS = 2, 20


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
        ([16, 17, 18], [4, 9, 4]),  # nothing that is read is written
        ([5, 6, 7, 19], [4, 5, 6, 7]),  # a chain
        ([4, 5, 6, 9], [5, 6, 4, 9]),  # a ring, and a slot onto itself
        (list(range(SLOTS)), list(reversed(range(SLOTS)))),  # more than one program takes
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
    rows = (torch.arange(2 * 3 * width, device=DEVICE) % 251).to(torch.uint8).view(2, 3, width)
    part[:, [0, 1, slots - 1]] = rows
    tgt, src = torch.tensor([[slots - 1, 0, slots - 2], [1, slots - 1, 0]], device=DEVICE)
    move_rows([part], tgt, src, "triton")
    assert torch.equal(part[:, tgt], rows[:, [1, 2, 0]])
    as_one = part.view(1, 2 * slots, width)
    move_rows([as_one], tgt[:1] + slots, tgt[1:2], "triton")
    assert torch.equal(as_one[:, tgt[:1] + slots], rows[None, 0, 2:])
    ends = torch.tensor([0, 2 * slots - 1], device=DEVICE)
    as_one[:, ends] = rows[None, 0, :2]
    move_rows([as_one], ends, ends.flip(0), "triton")  # both are staged
    assert torch.equal(as_one[:, ends.flip(0)], rows[None, 0, :2])
