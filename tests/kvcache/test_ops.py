"""Kernels that write, move and read rows, against their torch references.

Without a GPU, Triton interprets the kernels. The fp8 and FP4 references are checked against exact
arithmetic.
"""

import bisect
import itertools
from fractions import Fraction
from typing import Any

import pytest
import torch

from kvcache.ops import kv_write, quant
from kvcache.ops.kv_write import move_rows, set_kv_buffer, set_rows
from memsaver.system.devices import use_triton
from tests.helpers.case_selection import some
from tests.helpers.kvcache.blocks import DEVICE

IMPLS: list[Any] = ["torch", "triton"]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
PAIRS = list(itertools.product(FLOATS, FP8))
POISON = 171


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def random_bits(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return random bit patterns, which include NaN, infinities and subnormals."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(
        0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8, generator=generator
    )
    return raw.to(DEVICE).view(dtype)


def inputs(n: int, heads: int, dim: int, dtype: torch.dtype, layout: str) -> torch.Tensor:
    """Return random bits `[n, heads, dim]` in a memory layout, such as a slice of a fused qkv."""
    if layout == "fused":
        return random_bits(n, 3 * heads * dim, dtype=dtype)[:, heads * dim : 2 * heads * dim].view(
            n, heads, dim
        )
    if layout == "head-first":
        return random_bits(heads, n, dim, dtype=dtype).transpose(0, 1)
    if layout == "dim-first":
        return random_bits(n, dim, heads, dtype=dtype).transpose(1, 2)
    return random_bits(n, heads, dim, dtype=dtype)


def poisoned(*shape: int) -> torch.Tensor:
    return torch.full(shape, POISON, dtype=torch.uint8, device=DEVICE)


SHAPES = [  # heads, width of keys and of values, dtype
    (1, 1, 1, torch.float32),
    (3, 5, 7, torch.bfloat16),
    (5, 300, 17, torch.float16),  # rows wider than a program's block
    (3, 6, 10, torch.float8_e4m3fn),
    (2, 3, 2, torch.float64),
]


LAYOUTS = ["contiguous", "fused", "head-first", "dim-first"]
CASES = [("dim-first", shape) for shape in SHAPES] + [(layout, SHAPES[1]) for layout in LAYOUTS[:3]]


@pytest.mark.parametrize(
    ("layout", "shape"), some(*CASES, whole=list(itertools.product(LAYOUTS[:3], SHAPES)))
)
def test_kv_write_equals_the_reference(
    layout: str, shape: tuple[int, int, int, torch.dtype]
) -> None:
    heads, k_dim, v_dim, dtype = shape
    n, slots = 6, 20
    k, v = inputs(n, heads, k_dim, dtype, layout), inputs(n, heads, v_dim, dtype, layout)
    # strided
    loc = torch.tensor([[19, 0], [3, 0], [4, 0], [0, 0], [7, 0], [11, 0]], device=DEVICE)[:, 0]
    assert not loc.is_contiguous()
    for impl in IMPLS:
        buffers = [poisoned(slots, heads, dim * dtype.itemsize) for dim in (k_dim, v_dim)]
        set_kv_buffer(k, v, *(buffer.view(dtype) for buffer in buffers), loc, impl=impl)
        for rows, buffer in zip((k, v), buffers, strict=True):
            expected = poisoned(*buffer.shape)
            expected[loc] = bits(rows)
            assert torch.equal(buffer, expected)


@pytest.mark.parametrize("impl", IMPLS)
def test_writes_accept_one_kind_of_row_and_no_tokens(impl: Any) -> None:
    buffer = torch.zeros(4, 2, 8, device=DEVICE)
    rows = torch.randn(2, 2, 3, device=DEVICE)
    set_rows(rows, buffer[..., 2:5], torch.tensor([3, 1], device=DEVICE), impl)
    expected = torch.zeros_like(buffer)
    expected[[3, 1], :, 2:5] = rows
    assert torch.equal(buffer, expected)
    none = torch.empty(0, 1, 16, device=DEVICE)
    loc = torch.empty(0, dtype=torch.int64, device=DEVICE)
    set_rows(rows[:0], buffer[..., 2:5], loc, impl)
    set_kv_buffer(rows[:0], rows[:0], buffer[..., 2:5], buffer[..., 2:5], loc, impl)
    move_rows([buffer.transpose(0, 1)], loc, loc, impl)
    assert torch.equal(buffer, expected)
    codes, ones = poisoned(2, 1, 16), torch.ones(2, device=DEVICE)
    kv_write.set_kv_buffer_fp8(none, none, codes, codes, loc, ones, FP8[0], impl)
    kv_write.set_kv_buffer_fp4(none, none, [codes] * 2, [codes] * 2, loc, impl)
    assert (codes == POISON).all()
    assert quant.read_fp8(codes, loc, ones[0], FP8[1], FLOATS[0], impl).shape == (0, 1, 16)
    assert quant.read_fp4(codes, codes[..., :2], loc, torch.bfloat16, impl).shape == (0, 1, 32)


def test_impl_argument_overrides_the_device() -> None:
    assert use_triton("auto", torch.device("cuda:0"))
    assert not use_triton("auto", torch.device("cpu"))
    assert use_triton("triton", torch.device("cpu"))
    assert not use_triton("torch", torch.device("cuda:0"))
    with pytest.raises(ValueError, match="unknown impl 'fast'"):
        use_triton("fast", torch.device("cpu"))  # type: ignore[arg-type]


# ---------------------------------------------------------------- moves

LAYERS, SLOTS = 2, 20


def parts(slot_major: bool) -> list[torch.Tensor]:
    """Return parts [L, N, W] of three widths, one of them wider than a program's block.

    With `slot_major`, they are slices of one buffer with gaps.
    """
    widths, generator = (1, 5, 1030), torch.Generator().manual_seed(0)
    if not slot_major:
        return [
            torch.randint(-(2**60), 2**60, (LAYERS, SLOTS, w), generator=generator).to(DEVICE)
            for w in widths
        ]
    shape = (SLOTS, LAYERS * sum(widths) + 7)
    rows = torch.randint(-(2**60), 2**60, shape, generator=generator).to(DEVICE)
    ends = [LAYERS * end for end in itertools.accumulate(widths)]
    return [
        rows[:, end - LAYERS * w : end].unflatten(1, (LAYERS, w)).transpose(0, 1)
        for w, end in zip(widths, ends, strict=True)
    ]


@pytest.mark.parametrize("slot_major", [False, True])
@pytest.mark.parametrize(
    ("tgt", "src"),
    [
        ([16, 17, 18], [4, 9, 4]),  # no source is a target
        ([5, 6, 7, 19], [4, 5, 6, 7]),  # a chain
        ([4, 5, 6, 9], [5, 6, 4, 9]),  # a ring, and a slot onto itself
        (list(range(SLOTS)), list(reversed(range(SLOTS)))),  # rows of more than one program
    ],
)
@pytest.mark.parametrize("impl", IMPLS)
def test_move_rows_reads_all_rows_before_writing(
    impl: Any, tgt: list[int], src: list[int], slot_major: bool
) -> None:
    moved, expected = parts(slot_major), [part.clone() for part in parts(slot_major)]
    for part in expected:
        part[:, tgt] = part[:, src].clone()
    strided = torch.tensor([tgt, src], dtype=torch.int64, device=DEVICE).T.contiguous()
    move_rows(moved, strided[:, 0], strided[:, 1], impl)
    assert all(torch.equal(a, b) for a, b in zip(moved, expected, strict=True))


def nearest(x: float, values: list[float]) -> int:
    """Return the index of the ascending value nearest to x; ties go to the even index."""
    i = min(max(bisect.bisect_left(values, x), 1), len(values) - 1)
    below, above = Fraction(x) - Fraction(values[i - 1]), Fraction(values[i]) - Fraction(x)
    return i - 1 if below < above or (below == above and (i - 1) % 2 == 0) else i


# ---------------------------------------------------------------- fp8


@pytest.mark.parametrize("dtype", FP8)
def test_fp8_rounds_to_the_nearest_value_and_saturates(dtype: torch.dtype) -> None:
    all_values = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    positive = sorted({v for v in all_values.tolist() if 0 <= v < float("inf")})
    midpoints = [(a + b) / 2 for a, b in itertools.pairwise(positive)]
    around = [m * factor for m in midpoints for factor in (1 - 2**-20, 1 + 2**-20)]
    xs = torch.tensor([*positive, *midpoints, *around, 1e30, 2.0**-140])
    got = quant.quantise_fp8(torch.cat((xs, -xs)), torch.ones(()), dtype).float()
    expected = torch.tensor(
        [positive[-1] if x > positive[-1] else positive[nearest(x, positive)] for x in xs.tolist()]
    )
    assert torch.equal(got, torch.cat((expected, -expected)))
    broken = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf])
    assert quant.quantise_fp8(broken, torch.ones(()), dtype).float().isnan().all()


@pytest.mark.filterwarnings("ignore:.*encountered in multiply")  # numpy, in the interpreter
@pytest.mark.parametrize(
    ("rows_dtype", "dtype"), some(*zip(FLOATS, FP8 + FP8, strict=False), whole=PAIRS)
)
def test_fp8_write_kernel_equals_the_reference(rows_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """Cover every bit pattern of 16-bit rows."""
    if rows_dtype == torch.float32:
        k = random_bits(16, 2, 512, dtype=rows_dtype)
        k[:8] = torch.ldexp(
            torch.randn_like(k[:8]), torch.randint(-20, 18, k[:8].shape, device=DEVICE)
        )
    else:
        k = (
            torch.arange(-(2**15), 2**15, dtype=torch.int16, device=DEVICE)
            .view(rows_dtype)
            .view(32, 2, 1024)
        )
    v = k.flip(0)[..., ::4]  # narrower, strided
    loc = torch.randperm(40, device=DEVICE)[: len(k)]
    scales = torch.tensor([1 / 0.37, 1.0], device=DEVICE)
    before, results = bits(k).clone(), []
    for impl in IMPLS:
        buffers = [poisoned(40, 2, r.shape[2]) for r in (k, v)]
        kv_write.set_kv_buffer_fp8(k, v, *buffers, loc, scales, dtype, impl)
        results.append(buffers)
        rest = torch.ones(40, dtype=torch.bool, device=DEVICE)
        rest[loc] = False
        for buffer in buffers:
            assert (buffer[rest] == POISON).all()
        for rows, buffer in zip((k, v), buffers, strict=True):
            got = buffer[loc].view(dtype).float()
            assert torch.equal(got.isnan(), ~rows.isfinite()) and not got.isinf().any()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert torch.equal(bits(k), before)


def test_fp8_reads_are_scaled_and_saturate_in_fp16() -> None:
    values = torch.tensor([[[448.0, -448.0, 0.5, 0.0]]], device=DEVICE)
    stored = values.to(FP8[0]).view(torch.uint8)
    loc = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    for dtype, large in ((torch.float16, 65504.0), (torch.float32, 448 * 400.0)):
        got = quant.read_fp8(stored, loc, torch.tensor(400.0, device=DEVICE), FP8[0], dtype)
        assert got.dtype == dtype
        assert got.tolist() == [[[large, -large, 200.0, 0.0]]] * 2


@pytest.mark.filterwarnings("ignore:.*encountered in multiply")
@pytest.mark.parametrize(("dtype", "stored"), PAIRS)
def test_fp8_read_kernel_equals_the_reference(stored: torch.dtype, dtype: torch.dtype) -> None:
    """Read all codes, NaN and infinity too, in rows with gaps between slots and heads."""
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    wide = poisoned(9, 4, 200)
    buffer = wide[:, 1:3, 8:136]
    buffer[7] = codes.view(2, 128)
    buffer[2] = codes.flip(0).view(2, 128)
    loc = torch.tensor([7, 2, 7], device=DEVICE)
    for scale in (1.0, 0.37, 3e4, 1e-30):
        factor = torch.tensor(scale, device=DEVICE)
        reference, kernel = (
            quant.read_fp8(buffer, loc, factor, stored, dtype, impl) for impl in IMPLS
        )
        assert kernel.dtype == dtype and kernel.shape == (3, 2, 128)
        # Triton's interpreter truncates when it converts to bf16, an error of up to 2^-7.
        rounding = 2**-7 if dtype == torch.bfloat16 and DEVICE == "cpu" and scale != 1.0 else 0.0
        torch.testing.assert_close(kernel, reference, rtol=rounding, atol=0.0, equal_nan=True)
        zero = reference == 0
        assert torch.equal(kernel[zero].signbit(), reference[zero].signbit())


# ---------------------------------------------------------------- FP4


def blocks_of(values: list[float], e: int) -> torch.Tensor:
    """Return a block of 16 fp32 elements per value, with value * 2**e and a largest 6 * 2**e."""
    blocks = torch.zeros(len(values), 16)
    blocks[:, 3] = 6.0
    blocks[:, 8] = torch.tensor(values)
    return torch.ldexp(blocks, torch.tensor(e)).to(DEVICE)


@pytest.mark.parametrize("e", [-125, -7, 0, 9, 125])
def test_fp4_rounds_values_and_ties_to_the_nearest_code(e: int) -> None:
    around = [(b, b * (1 - 2**-22), b * (1 + 2**-22)) for b in quant.FP4_BOUNDS]
    values = [*quant.FP4_VALUES, *itertools.chain(*around)]
    values += [-value for value in values]
    codes, scales = quant.quantise_fp4(blocks_of(values, e))
    got = codes[:, 4] & 15  # element 8 is even: the low nibble
    expected = [
        nearest(abs(v), list(quant.FP4_VALUES)) + (8 if v < 0 or str(v) == "-0.0" else 0)
        for v in values
    ]
    assert got.tolist() == expected
    assert (codes[:, 1] >> 4 == 7).all()  # element 3 is odd: the high nibble
    assert (scales == e + 127).all()
    ties = {bound: quant.FP4_VALUES[expected[values.index(bound)]] for bound in quant.FP4_BOUNDS}
    assert ties == {0.25: 0, 0.75: 1, 1.25: 1, 1.75: 2, 2.5: 2, 3.5: 4, 5: 4}
    read = quant.dequantise_fp4(codes, scales, torch.float32)[:, 8]
    assert read.tolist() == [
        (-1 if c > 7 else 1) * quant.FP4_VALUES[c & 7] * 2.0**e for c in expected
    ]


def test_fp4_reads_each_byte_as_two_values() -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(32, 8)
    scales = torch.full((32, 1), 127 + 3, dtype=torch.uint8, device=DEVICE)
    got = quant.dequantise_fp4(codes, scales, torch.bfloat16).float().flatten().tolist()
    value = [*quant.FP4_VALUES, *(-v for v in quant.FP4_VALUES)]
    expected = [8 * value[nibble] for byte in range(256) for nibble in (byte & 15, byte >> 4)]
    assert got == expected
    zero = torch.zeros_like(scales)
    assert not quant.dequantise_fp4(codes, zero, torch.float32).any()  # scale byte 0: zeros


def test_fp4_exponent_is_the_smallest_that_fits() -> None:
    edges = [1.0, 1.5, 1.5 + 2**-23, 2.0, 6.0, 6.1, 0.75, 3e38]
    amax = torch.tensor([*edges, 2.0**-126, 2.0**-130, 2.0**-149])
    blocks = torch.zeros(len(amax), 16)
    blocks[:, 5] = -amax
    _, scales = quant.quantise_fp4(blocks.to(DEVICE))
    for value, scale in zip(amax.tolist(), scales[:, 0].tolist(), strict=True):
        e = scale - 127
        assert -125 <= e <= 125
        value = min(value, quant.FP4_LIMIT)
        assert Fraction(value) <= 6 * Fraction(2) ** e
        assert e == -125 or Fraction(value) > 6 * Fraction(2) ** (e - 1)


def test_fp4_stores_zeros_saturates_and_keeps_nan_of_a_block() -> None:
    blocks = torch.zeros(5, 16, device=DEVICE)
    blocks[1, 0], blocks[4, 7] = torch.nan, -torch.inf
    blocks[2, :3] = torch.tensor([3e38, -3e38, 1.0])
    blocks[3] = -0.0
    codes, scales = quant.quantise_fp4(blocks)
    assert scales[:, 0].tolist() == [0, 255, 252, 0, 255]
    for dtype, limit in ((torch.float32, quant.FP4_LIMIT), (torch.float16, 65504)):
        read = quant.dequantise_fp4(codes, scales, dtype)
        assert read[2, :3].tolist() == [limit, -limit, 0]
        assert not read[[0, 3]].any() and read[[1, 4]].isnan().all()
        assert read[3].signbit().all()


@pytest.mark.parametrize("dtype", some(torch.float32, torch.bfloat16, whole=[torch.float16]))
def test_fp4_kernels_equal_the_reference(dtype: torch.dtype) -> None:
    heads, k_dim, v_dim, slots = 2, 528, 32, 30  # a row wider than a program's blocks
    k = random_bits(12, heads, k_dim, dtype=dtype, seed=3)
    k[:6] = (
        torch.randn(6, heads, k_dim, generator=torch.Generator().manual_seed(4))
        .to(dtype)
        .to(DEVICE)
    )
    k[6, 0, :16] = 0
    k[7, :, ::2] = -0.0
    ties = torch.tensor([*quant.FP4_BOUNDS, *quant.FP4_VALUES, 6.0], dtype=dtype, device=DEVICE)
    k[8] = ties.repeat(k_dim // 16)
    k[9] = -ties.repeat(k_dim // 16) / 64
    v = random_bits(12, v_dim, heads, dtype=dtype, seed=5).transpose(1, 2)  # dim-first
    loc = torch.randperm(slots, device=DEVICE, generator=None)[:24].view(12, 2)[:, 1]
    assert not loc.is_contiguous()
    before, results = (bits(k).clone(), bits(v).clone()), []
    for impl in IMPLS:
        widths = (k_dim // 2, k_dim // 16, v_dim // 2, v_dim // 16)
        wide = [poisoned(slots, heads, w + 8) for w in widths]
        # The rows are slices of wider rows.
        parts = [t[..., 4 : 4 + w] for t, w in zip(wide, widths, strict=True)]
        kv_write.set_kv_buffer_fp4(k, v, parts[:2], parts[2:], loc, impl)
        for t, w in zip(wide, widths, strict=True):
            assert (t[..., :4] == POISON).all() and (t[..., 4 + w :] == POISON).all()
        results.append(wide)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert torch.equal(bits(k), before[0]) and torch.equal(bits(v), before[1])


@pytest.mark.filterwarnings("ignore:.*encountered in multiply")
def test_fp4_reads_of_arbitrary_bytes_equal_the_reference_and_only_byte_255_is_nan() -> None:
    """Read slices of wider rows with any bytes, as in slots that were never written."""
    codes, scales = (random_bits(9, 2, w, dtype=torch.uint8, seed=w)[..., 4:-4] for w in (272, 41))
    scales[8, :, 0], scales[3, :, 0] = 255, 254
    loc = torch.tensor([[8, 0, 3, 3]] * 2, device=DEVICE).T.contiguous()[:, 0]
    for dtype in FLOATS:
        a, b = (quant.read_fp4(codes, scales, loc, dtype, impl) for impl in IMPLS)
        assert torch.equal(bits(a.nan_to_num(1.0)), bits(b.nan_to_num(1.0)))
        broken = (scales[loc] == 255).repeat_interleave(16, -1)
        assert (
            torch.equal(a.isnan(), broken)
            and torch.equal(b.isnan(), broken)
            and not a.isinf().any()
        )
        assert a.dtype == dtype and a.shape == (4, 2, 528)
