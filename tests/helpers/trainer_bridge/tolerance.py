"""How far apart two computations of the same numbers may lie that add in another order: other
ranks, micro batches, kernels, vector units, threads. All in fp32, of the models of `models.py`.

Each rounding is off by at most U = eps / 2 of the largest number on the way, in any direction:
`count` of them walk at random, and end beyond 4 sqrt(count) U in one of 10^11 cases (roundings are
even in [-U, U]: that is 6.9 sigma).

Forward, the longest way passes 2 layers of 15 operations, embedding, head, softmax and loss: 35
sums of at most 96 terms, the vocabulary. A gradient passes them twice.

AdamW divides by the gradient's size: it moves a weight by lr * m / (sqrt(v) + eps), with averages m
and sqrt(v) of gradients. If these are off by `delta`, so is each average, and |m| / sqrt(v) is
about 1 or less: the quotient is off by at most 2 delta / eps. So eps must not be small beside the
gradients, of norm 1: with lr = 1e-2 and eps = 0.2 a step puts a weight off by delta / 10, with eps
= 1e-4 by 200 delta. Weights that are all off by h change the gradients of these models by 10 h at
most (measured), here by another delta: what a step adds at most doubles from one to the next.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

U = torch.finfo(torch.float32).eps / 2
FORWARD = 35 * 96
BACKWARD = 2 * FORWARD
LEARNING_RATE = 1e-2  # of `models.config`
STABLE: dict[str, Any] = {"adam_eps": 0.2}
"""For a trainer whose weights are compared after it has learned."""


def rounding(count: int, size: float = 1.0) -> float:
    return 4 * math.sqrt(count) * U * size


def after_steps(steps: int, norm: float = 1.0) -> float:
    """Of a weight below 4. norm: the gradients', clipped; it bounds the terms of each."""
    step = 2 * LEARNING_RATE / STABLE["adam_eps"] * rounding(BACKWARD, norm) + 4 * U
    return step * (2**steps - 1)


def assert_within(found: Tensor, expected: Tensor, allowed: float, what: str = "") -> None:
    apart = (
        float((found.detach().cpu().double() - expected.detach().cpu().double()).abs().max())
        if len(found)
        else 0.0
    )
    assert apart <= allowed, f"{what}: {apart:.2e} apart, {allowed:.2e} allowed"


def assert_scores(found: Sequence[Sequence[float]], expected: Sequence[Any]) -> None:
    """Log-probabilities or values, one list or tensor a sequence."""
    assert [len(row) for row in found] == [len(row) for row in expected]
    own, other = (
        torch.tensor([float(value) for row in rows for value in row]) for rows in (found, expected)
    )
    assert_within(own, other, rounding(FORWARD, max(1.0, float(other.abs().max()))), "scores")


def assert_metrics(found: Mapping[str, float], expected: Mapping[str, float]) -> None:
    """Of an update: means over tokens of what scores are off by, times ratios and advantages below
    4.
    """
    for name, value in expected.items():
        size = max(4.0, abs(value))
        assert_within(
            torch.tensor([found[name]]), torch.tensor([value]), rounding(BACKWARD, size), name
        )


def assert_learned(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], steps: int, norm: float = 1.0
) -> None:
    """Weights of trainers that are STABLE and, under ".exp_avg" and ".exp_avg_sq", averages of
    gradients and their squares.
    """
    assert found.keys() == expected.keys()
    off = rounding(BACKWARD, norm) * 2**steps
    for name, value in expected.items():
        kind = name.rpartition(".")[2]
        allowed = {"exp_avg": off, "exp_avg_sq": 2 * off * norm}.get(kind, after_steps(steps, norm))
        assert_within(found[name], value, allowed, name)


def assert_merged(found: Tensor, base: Tensor, a: Tensor, b: Tensor, scale: float) -> None:
    """`base + scale * b @ a` in fp32, each sum rounded to the dtype that was found: within a unit
    of that, and of one rounding a term.
    """
    base, a, b = base.double(), a.double(), b.double()
    exact, size = base + scale * b @ a, base.abs() + scale * b.abs() @ a.abs()
    one = torch.finfo(found.dtype)
    allowed = exact.abs() * one.eps + one.smallest_normal * one.eps + (a.shape[0] + 2) * U * size
    assert bool(((found.double() - exact).abs() <= allowed).all()), float(
        (found.double() - exact).abs().max()
    )
