"""Tolerances for computations of the same fp32 numbers whose sums are added in different orders.

Orders differ between ranks, micro batches, kernels, vector units and threads. The tolerances hold
for the models of `models.py`.

The error of a rounding is at most U = eps / 2 of the largest intermediate number, with any sign.
`count` roundings are a random walk, which exceeds 4 sqrt(count) U in one of 10^11 cases (errors are
uniform in [-U, U], so the limit is 6.9 sigma).

The longest path of a forward has 2 layers of 15 operations, embedding, head, softmax and loss: 35
sums of at most 96 terms, the vocabulary. A gradient passes them twice.

AdamW moves a weight by lr * m / (sqrt(v) + eps), with averages m and sqrt(v) of gradients. If
gradients have an error `delta`, so has each average, and |m| / sqrt(v) is at most about 1. So the
error of the quotient is at most 2 delta / eps, and eps must not be small compared with gradients of
norm 1. With lr = 1e-2 and eps = 0.2 a step adds delta / 10 to the error of a weight, with eps =
1e-4 it adds 200 delta. An error h of all weights changes the gradients of these models by at most
10 h (measured), which is another delta. So the error that a step adds at most doubles per step.
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
"""Options of trainers whose weights are compared after updates."""


def rounding(count: int, size: float = 1.0) -> float:
    return 4 * math.sqrt(count) * U * size


def after_steps(steps: int, norm: float = 1.0) -> float:
    """Return the tolerance of a weight below 4 after updates with gradients clipped to `norm`."""
    step = 2 * LEARNING_RATE / STABLE["adam_eps"] * rounding(BACKWARD, norm) + 4 * U
    return step * (2**steps - 1)


def assert_within(actual: Tensor, expected: Tensor, allowed: float, what: str = "") -> None:
    apart = (
        float((actual.detach().cpu().double() - expected.detach().cpu().double()).abs().max())
        if len(actual)
        else 0.0
    )
    assert apart <= allowed, f"{what}: {apart:.2e} apart, {allowed:.2e} allowed"


def assert_scores(actual: Sequence[Sequence[float]], expected: Sequence[Any]) -> None:
    """Compare log-probabilities or values, one list or tensor per sequence."""
    assert [len(row) for row in actual] == [len(row) for row in expected]
    computed, exact = (
        torch.tensor([float(value) for row in rows for value in row]) for rows in (actual, expected)
    )
    assert_within(computed, exact, rounding(FORWARD, max(1.0, float(exact.abs().max()))), "scores")


def assert_metrics(actual: Mapping[str, float], expected: Mapping[str, float]) -> None:
    """Compare the metrics of an update.

    They are means over tokens of scores times ratios and advantages below 4.
    """
    for name, value in expected.items():
        size = max(4.0, abs(value))
        assert_within(
            torch.tensor([actual[name]]), torch.tensor([value]), rounding(BACKWARD, size), name
        )


def assert_learned(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], steps: int, norm: float = 1.0
) -> None:
    """Compare weights of STABLE trainers, and moments, named ".exp_avg" and ".exp_avg_sq"."""
    assert actual.keys() == expected.keys()
    off = rounding(BACKWARD, norm) * 2**steps
    for name, value in expected.items():
        kind = name.rpartition(".")[2]
        allowed = {"exp_avg": off, "exp_avg_sq": 2 * off * norm}.get(kind, after_steps(steps, norm))
        assert_within(actual[name], value, allowed, name)


def assert_merged(actual: Tensor, base: Tensor, a: Tensor, b: Tensor, scale: float) -> None:
    """Compare with `base + scale * b @ a`, computed in fp32 and rounded to the actual dtype.

    The tolerance is one unit of that dtype, and one fp32 rounding per term.
    """
    base, a, b = base.double(), a.double(), b.double()
    exact, size = base + scale * b @ a, base.abs() + scale * b.abs() @ a.abs()
    unit = torch.finfo(actual.dtype)
    allowed = exact.abs() * unit.eps + unit.smallest_normal * unit.eps + (a.shape[0] + 2) * U * size
    assert bool(((actual.double() - exact).abs() <= allowed).all()), float(
        (actual.double() - exact).abs().max()
    )
