"""The page expansion kernel and its torch reference, in memory where every stray access shows."""

import random
from typing import Any

import pytest
import torch

from kvcache.ops.expand import expand_pages, expand_triton
from tests.helpers.kvcache.blocks import DEVICE

IMPLS: list[Any] = ["torch", "triton"]
POISON = -(2**60)
MARGIN = 70


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


def hidden(values: torch.Tensor) -> torch.Tensor:
    """The same values as every third element of a poisoned buffer: not contiguous in any dimension."""
    buffer = torch.full((*values.shape[:-1], 3 * values.shape[-1] + 2 * MARGIN), POISON, device=DEVICE)
    rows = torch.full((2 * len(values), buffer.shape[-1]), POISON, device=DEVICE) if values.ndim == 2 else buffer
    view = (rows[::2] if values.ndim == 2 else rows)[..., MARGIN : MARGIN + 3 * values.shape[-1] : 3]
    view.copy_(values)
    return view


def random_batch(seed: int) -> tuple[list[tuple[int, int]], int]:
    dice = random.Random(seed)
    prefixes = [dice.choice([0, 1, 5, dice.randint(0, 40)]) for _ in range(dice.randint(1, 6))]
    return [(p, p + dice.choice([0, 1, 1, 3, dice.randint(0, 70)])) for p in prefixes], dice.choice([1, 2, 3, 8, 13])


@pytest.mark.parametrize(
    ("lengths", "page_size"),
    [
        ([(0, 5)], 1),
        ([(4, 5), (7, 8), (3, 4), (16, 17)], 4),  # a decode step
        ([(3, 3), (0, 0)], 4),
        ([(7, 49), (0, 1), (24, 24), (1, 30), (48, 60)], 24),  # chunks beside decodes, more than one program of 32
        *(random_batch(seed) for seed in range(12)),
    ],
)
def test_kernel_and_reference_are_right_and_touch_nothing_else(lengths: list[tuple[int, int]], page_size: int) -> None:
    meta, pages, total, largest, expected = batch(lengths, page_size)
    strided_meta, strided_pages = hidden(meta), hidden(pages)
    for impl in IMPLS:
        got = expand_pages(strided_meta, strided_pages, page_size, total, largest, impl=impl)
        assert got.dtype == torch.int64 and got.tolist() == expected
    if total:
        out = torch.full((total + 2 * MARGIN,), POISON, device=DEVICE)
        expand_triton(strided_meta, strided_pages, page_size, largest, out[MARGIN : MARGIN + total])
        assert out[MARGIN : MARGIN + total].tolist() == expected
        assert (out[:MARGIN] == POISON).all() and (out[MARGIN + total :] == POISON).all()
    assert torch.equal(strided_meta, meta) and torch.equal(strided_pages, pages)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_ids_pages_and_lengths_above_2_to_the_31(impl: Any, page_size: int) -> None:
    """Small tensors, large numbers: each factor and each product that an id is made of passes 2^31 somewhere."""
    prefix = 2**31 // page_size * page_size + page_size - 1  # one slot short of a page boundary
    old = 2**33 * page_size + page_size - 2 if page_size > 1 else 2**33
    new = [2**32 + 7, 2**32 + 3]
    meta = torch.tensor([[prefix], [prefix + 2 * page_size], [old], [0], [0]], device=DEVICE)
    pages = torch.tensor(new, device=DEVICE)
    if page_size == 1:
        expected = new
    else:
        tail = [page * page_size + at for page in new for at in range(page_size)]
        expected = [old + 1, *tail[: 2 * page_size - 1]]
    got = expand_pages(meta, pages, page_size, 2 * page_size, 2 * page_size, impl=impl)
    assert got.tolist() == expected
    assert min(got.tolist()) > 2**31
