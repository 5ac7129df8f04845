"""Triton kernels against their torch references; without a GPU in Triton's interpreter (see conftest.py)."""

import pytest
import torch

from kvcache.ops.expand import expand_pages
from kvcache.ops.kv_write import set_kv_buffer
from memsaver.ops.dispatch import use_triton
from tests.helpers.kvcache.blocks import DEVICE

POISON = 171


def batch(lengths: list[tuple[int, int]], page_size: int) -> tuple[torch.Tensor, torch.Tensor, int, int, list[int]]:
    """Arguments of expand_pages for requests (prefix, seq), and by plain arithmetic the ids it must give."""
    rows, pages, expected = [], [], []
    next_page = 40
    for r, (prefix, seq) in enumerate(lengths):
        old_page = 10 + r  # the partial page of request r
        last = old_page * page_size + (prefix - 1) % page_size if prefix else -1
        rows.append([prefix, seq, last, len(expected), len(pages)])
        page = old_page
        for position in range(prefix, seq):
            if position % page_size == 0:
                next_page -= 1
                page = next_page
                pages.append(page)
            expected.append(page * page_size + position % page_size)
    meta = torch.tensor(rows, dtype=torch.int64, device=DEVICE).view(-1, 5).T.contiguous()
    largest = max((seq - prefix for prefix, seq in lengths), default=0)
    return meta, torch.tensor(pages, dtype=torch.int64, device=DEVICE), len(expected), largest, expected


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("page_size", [1, 3, 4, 16, 24])
@pytest.mark.parametrize(
    "lengths",
    [
        [(0, 5)],
        [(4, 5), (7, 8), (3, 4), (16, 17)],  # a decode step
        [(5, 5), (0, 0), (2, 3)],  # some gain nothing
        [(7, 49), (0, 1), (24, 24), (1, 30), (48, 60)],  # chunks beside decodes, more than one program of 32
    ],
)
def test_expand(impl: str, page_size: int, lengths: list[tuple[int, int]]) -> None:
    meta, pages, total, largest, expected = batch(lengths, page_size)
    got = expand_pages(meta, pages, page_size, total, largest, impl=impl)  # type: ignore[arg-type]
    assert got.dtype == torch.int64
    assert got.tolist() == expected


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_expand_passes_2_to_the_31(impl: str) -> None:
    meta = torch.tensor([[1], [6], [2**33], [0], [0]], device=DEVICE)
    pages = torch.tensor([2**32 + 1], device=DEVICE)
    got = expand_pages(meta, pages, 3, 5, 5, impl=impl)  # type: ignore[arg-type]
    first = 3 * (2**32 + 1)
    assert got.tolist() == [2**33 + 1, 2**33 + 2, first, first + 1, first + 2]


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_expand_of_nothing(impl: str) -> None:
    meta, pages, total, largest, _ = batch([(3, 3), (0, 0)], 4)
    assert expand_pages(meta, pages, 4, total, largest, impl=impl).tolist() == []  # type: ignore[arg-type]


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


@pytest.mark.parametrize("layout", ["contiguous", "fused", "head-first", "dim-first"])
@pytest.mark.parametrize(
    ("heads", "k_dim", "v_dim", "dtype"),
    [
        (1, 1, 1, torch.float32),
        (3, 5, 7, torch.bfloat16),
        (2, 64, 64, torch.float16),
        (5, 300, 17, torch.bfloat16),  # rows wider than one program's block
        (3, 6, 10, torch.float8_e4m3fn),
        (2, 3, 2, torch.float64),
    ],
)
def test_kv_write_equals_the_reference(layout: str, heads: int, k_dim: int, v_dim: int, dtype: torch.dtype) -> None:
    n, slots = 6, 20
    k, v = inputs(n, heads, k_dim, dtype, layout), inputs(n, heads, v_dim, dtype, layout)
    loc = torch.tensor([[19, 0], [3, 0], [4, 0], [0, 0], [7, 0], [11, 0]], device=DEVICE)[:, 0]  # strided
    assert not loc.is_contiguous()
    results = {}
    for impl in ("torch", "triton"):
        k_buffer, v_buffer = poisoned(slots, heads, k_dim, dtype), poisoned(slots, heads, v_dim, dtype)
        set_kv_buffer(k, v, k_buffer, v_buffer, loc, impl=impl)  # type: ignore[arg-type]
        results[impl] = k_buffer.view(torch.uint8), v_buffer.view(torch.uint8)
    for which, rows in enumerate((k, v)):
        assert torch.equal(results["torch"][which], results["triton"][which])
        expected = torch.full_like(results["torch"][which], POISON)
        expected[loc] = rows.contiguous().view(torch.uint8)
        assert torch.equal(results["triton"][which], expected)


def test_kv_write_past_2_to_the_31_elements() -> None:
    """The last slot begins above 2^31 elements; only the touched pages of the buffer become real on the CPU."""
    slots, heads, dim = 2**21 + 2, 8, 128
    buffer = torch.empty(slots, heads, dim, dtype=torch.uint8, device=DEVICE)
    assert (slots - 1) * heads * dim > 2**31
    loc = torch.tensor([slots - 1, 1], device=DEVICE)
    k = torch.arange(2 * heads * dim, device=DEVICE).to(torch.uint8).view(2, heads, dim)
    v = torch.tensor([5, 6], dtype=torch.uint8, device=DEVICE).view(2, 1, 1).expand(2, heads, 1)
    narrow = torch.empty(slots, heads, 1, dtype=torch.uint8, device=DEVICE)
    set_kv_buffer(k, v, buffer, narrow, loc, impl="triton")
    assert torch.equal(buffer[loc], k)
    assert torch.equal(narrow[loc], v)


def test_kv_write_of_no_tokens() -> None:
    buffer = poisoned(4, 1, 2, torch.float32)
    none = torch.empty(0, 1, 2, device=DEVICE)
    loc = torch.empty(0, dtype=torch.int64, device=DEVICE)
    for impl in ("torch", "triton"):
        set_kv_buffer(none, none, buffer, buffer, loc, impl=impl)  # type: ignore[arg-type]
    assert (buffer.view(torch.uint8) == POISON).all()


def test_dispatch_is_by_argument_or_device() -> None:
    assert use_triton("auto", torch.device("cuda:0"))
    assert not use_triton("auto", torch.device("cpu"))
    assert use_triton("triton", torch.device("cpu"))
    assert not use_triton("torch", torch.device("cuda:0"))
    with pytest.raises(ValueError, match="unknown impl 'fast'"):
        use_triton("fast", torch.device("cpu"))  # type: ignore[arg-type]
