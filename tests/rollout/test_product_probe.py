"""The product that defines the bits of exact runs, and the probe of the library."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from rollout.ops import product_probe, row_wise
from rollout.ops.chain_product import chain_product
from rollout.ops.product_probe import define_products
from rollout.ops.row_wise import linear, row_invariant_products
from tests.helpers.case_selection import some
from tests.helpers.rollout.other_library import other_library

SHAPES = some(
    (17, 33, 130),
    (129, 70, 48),
    whole=[(1, 1, 1), (16, 32, 128), (65, 130, 200), (300, 256, 64), (2, 100, 1000)],
)


def drawn(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns", "depth"), SHAPES)
def test_chain_is_the_product_rounded_once(
    rows: int, columns: int, depth: int, dtype: torch.dtype, device: str
) -> None:
    """Compare with fp64.

    A tensor core truncates each of depth / 16 sums, of up to 6 sqrt(depth), to 2^-23; the result is
    rounded to half an ulp. The interpreter truncates to bf16.
    """
    x = drawn(rows, 2 * depth, dtype=dtype, device=device)[:, :depth]
    weight = drawn(columns, depth + 3, dtype=dtype, device=device, seed=1)[:, :depth]
    bias = drawn(columns, dtype=dtype, device=device, seed=2)
    exact = x.double() @ weight.double().t()
    rest = 6 * depth**0.5 * (depth / 16 + 2) * 2**-23
    torch.testing.assert_close(
        chain_product(x, weight, wide=True).double(), exact, atol=rest, rtol=0
    )
    ulp = torch.finfo(dtype).eps * (1.0 if device == "cpu" else 0.5)
    out = x.new_full((rows, columns), torch.nan)
    for got, want in (
        (chain_product(x, weight), exact),
        (chain_product(x, weight, bias), exact + bias.double()),
        (chain_product(x, weight, out=out), exact),
    ):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, atol=rest, rtol=ulp * 1.001)
    assert torch.equal(out, chain_product(x, weight))


def test_rows_of_the_chain_have_the_same_bits_in_every_tile(device: str) -> None:
    x = drawn(140, 96, dtype=torch.float16, device=device)
    weight = drawn(40, 96, dtype=torch.float16, device=device, seed=1)
    whole = chain_product(x, weight, wide=True)
    for rows in (slice(1), slice(3, 19), slice(5, 69), slice(139, 140)):
        assert torch.equal(chain_product(x[rows], weight, wide=True), whole[rows])
        assert torch.equal(chain_product(x, weight[rows], wide=True), whole[:, rows])


def test_probe_refuses_or_warns_where_the_definition_depends_on_rows(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        product_probe,
        "chain_product",
        lambda x, weight, bias, **how: chain_product(x, weight, bias, **how) + len(x),
    )
    products = [(torch.empty((24, 48), dtype=torch.float16), None)]
    rule = "products with weights of 24 x 48 depend on the number of rows on this"
    with other_library(lambda rows, columns: False):
        with pytest.raises(ValueError, match=rule):
            define_products(products)
        assert not caplog.records
        define_products(products, strict=False)
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING and rule in warning.message


def test_probe_pads_or_replaces_products_that_differ_and_says_so(
    device: str, caplog: pytest.LogCaptureFixture
) -> None:
    differing = {24: 200, 32: 300}  # most rows with other values, by columns
    dtype = torch.float16
    weights = [torch.empty(columns, 48, dtype=dtype, device=device) for columns in differing]
    products = [(weight, weight.new_empty(len(weight))) for weight in weights]
    with (
        caplog.at_level(logging.INFO, "rollout"),
        other_library(lambda rows, columns: rows <= differing[columns], most_rows=400),
    ):
        told = [define_products(products[:1]), define_products(products[1:])]
        for weight, bias in products:
            assert not weight.any() and not bias.any()
            weight.copy_(drawn(*weight.shape, dtype=dtype, device=device, seed=3))
            bias.copy_(drawn(len(weight), dtype=dtype, device=device, seed=4))
            for rows in (3, 400):
                x = drawn(rows, 48, dtype=dtype, device=device, seed=5)
                with row_invariant_products(x.device):
                    got = linear(x, weight, bias)
                assert torch.equal(got, chain_product(x, weight, bias)), rows
        assert [tuple(key[2]) for key in row_wise.chained] == [(32, 48)]
    equal, replaced = caplog.records
    assert (equal.levelno, replaced.levelno) == (logging.INFO, logging.WARNING)
    assert told == [equal.message, replaced.message]
    assert "computes 1 of 1 products with the defined bits" in equal.message
    assert "computes 0 of 1 products with the defined bits" in replaced.message
    assert "weights of 32 x 48, in 1.00 to 1.00 times the library's time" in replaced.message
