"""The page expansion kernel beside its torch reference, in memory where every stray access shows."""

import random

import pytest
import torch

from kvcache.ops.expand import expand_pages, expand_triton
from tests.helpers.kvcache.blocks import DEVICE
from tests.kvcache.test_ops import batch

POISON = -(2**60)
MARGIN = 70


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


@pytest.mark.parametrize("seed", range(12))
def test_kernel_and_reference_agree_and_touch_nothing_else(seed: int) -> None:
    lengths, page_size = random_batch(seed)
    meta, pages, total, largest, expected = batch(lengths, page_size)
    strided_meta, strided_pages = hidden(meta), hidden(pages)
    assert expand_pages(strided_meta, strided_pages, page_size, total, largest, impl="torch").tolist() == expected
    if total:
        out = torch.full((total + 2 * MARGIN,), POISON, device=DEVICE)
        expand_triton(strided_meta, strided_pages, page_size, largest, out[MARGIN : MARGIN + total])
        assert out[MARGIN : MARGIN + total].tolist() == expected
        assert (out[:MARGIN] == POISON).all() and (out[MARGIN + total :] == POISON).all()
    assert torch.equal(strided_meta, meta) and torch.equal(strided_pages, pages)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_ids_pages_and_lengths_above_2_to_the_31(impl: str, page_size: int) -> None:
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
    got = expand_pages(meta, pages, page_size, 2 * page_size, 2 * page_size, impl=impl)  # type: ignore[arg-type]
    assert got.tolist() == expected
    assert min(got.tolist()) > 2**31
