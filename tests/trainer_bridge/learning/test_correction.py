"""Importance corrections against their definitions, token by token in fp64, and against verl."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers.trainer_bridge.rival_losses import VERL, verl_corrections
from trainer_bridge import Correction, CorrectionConfig, correct

LEVELS, HOWS = ("token", "sequence", "geometric"), ("truncate", "mask")
REJECTS = ("mean_k1", "max_k1", "mean_k3", "max_k3")
Answers = list[list[float]]

ratio = st.floats(-4, 4) | st.floats(-50, 50)
answers = st.lists(st.lists(ratio, max_size=6), min_size=1, max_size=6).filter(any)
configs = st.builds(
    lambda limit, **fields: CorrectionConfig(
        **fields, reject_above=None if fields["reject"] is None else limit
    ),
    limit=st.floats(0.01, 3),
    level=st.sampled_from(LEVELS),
    how=st.sampled_from(HOWS),
    low=st.floats(0, 0.9),
    high=st.floats(1, 4),
    reject=st.none() | st.sampled_from(REJECTS),
    veto=st.none() | st.floats(0.1, 10),
)


def corrected(ratios: Answers, config: CorrectionConfig) -> Correction:
    """Return the correction; log-probabilities of 0 in the rollout keep the ratios exact."""
    flat = [number for row in ratios for number in row]
    return correct([0.0] * len(flat), flat, [*map(len, ratios)], config)


def limited(number: float) -> float:
    return max(-20.0, min(20.0, number))


def k3(number: float) -> float:
    return math.expm1(limited(number)) - limited(number)


def defined_weights(row: list[float], config: CorrectionConfig) -> list[float]:
    log_weights = {
        "token": row,
        "sequence": [math.fsum(row)] * len(row),
        "geometric": [math.fsum(row) / max(1, len(row))] * len(row),
    }[config.level]
    weights = [math.exp(limited(number)) for number in log_weights]
    if config.how == "truncate":
        return [min(weight, config.high) for weight in weights]
    return [weight if config.low <= weight <= config.high else 0.0 for weight in weights]


def defined_keeps(row: list[float], config: CorrectionConfig) -> bool:
    count = max(1, len(row))
    figures = {
        None: 0.0,
        "mean_k1": abs(math.fsum(map(limited, row))) / count,
        "max_k1": max((abs(limited(number)) for number in row), default=0.0),
        "mean_k3": math.fsum(map(k3, row)) / count,
        "max_k3": max(map(k3, row), default=0.0),
    }
    vetoed = config.veto is not None and any(number < -config.veto for number in row)
    return not vetoed and figures[config.reject] <= (config.reject_above or 0.0)


def near_bound(ratios: Answers, config: CorrectionConfig) -> bool:
    """Return whether rounding may decide on which side of a bound a weight or answer lies."""
    moved = [
        [number * (1 + side) + side for number in row] for side in (-1e-9, 1e-9) for row in ratios
    ]
    low, high = moved[: len(ratios)], moved[len(ratios) :]
    return any(
        defined_keeps(first, config) != defined_keeps(second, config)
        or [not w for w in defined_weights(first, config)]
        != [not w for w in defined_weights(second, config)]
        for first, second in zip(low, high, strict=True)
    )


@settings(max_examples=150, deadline=None)
@given(answers, configs)
def test_weights_and_kept_answers_are_those_of_the_definitions(
    ratios: Answers, config: CorrectionConfig
) -> None:
    """Allow the rounding of sums of at most 6 terms below 50 in size, as an exponent: 300 eps."""
    if near_bound(ratios, config):
        return
    result = corrected(ratios, config)
    kept = [defined_keeps(row, config) for row in ratios]
    weights = [
        weight * keeps
        for row, keeps in zip(ratios, kept, strict=True)
        for weight in defined_weights(row, config)
    ]
    assert result.kept == kept
    assert result.weights == pytest.approx(weights, rel=300 * 2**-52, abs=0)


@settings(max_examples=80, deadline=None)
@given(answers, configs)
def test_figures_are_those_of_the_definitions(ratios: Answers, config: CorrectionConfig) -> None:
    result = corrected(ratios, config)
    flat = [number for row in ratios for number in row]
    count = len(flat)
    raw = [
        weight
        for row in ratios
        for weight in defined_weights(row, CorrectionConfig(level=config.level, high=1e9))
    ]
    outside = sum(w > config.high or (config.how == "mask" and w < config.low) for w in raw)
    squares = math.fsum(w * w for w in result.weights)
    size = math.fsum(result.weights) ** 2 / (count * squares) if squares else 0.0
    share = pytest.approx(outside / count, abs=sum(near(w, config) for w in raw) / count)
    masks = config.how == "mask"
    assert result.figures == {
        "mismatch_mean": pytest.approx(math.fsum(map(abs, flat)) / count, rel=1e-14, abs=0),
        "mismatch_max": max(map(abs, flat)),
        "mismatch_k1": pytest.approx(-math.fsum(flat) / count, rel=1e-12, abs=1e-13),
        "mismatch_k3": pytest.approx(math.fsum(map(k3, flat)) / count, rel=1e-14, abs=1e-16),
        "effective_sample_size": pytest.approx(size, rel=1e-13, abs=0),
        "weights_truncated": 0.0 if masks else share,
        "weights_masked": share if masks else 0.0,
        "answers_rejected": pytest.approx(result.kept.count(False) / len(ratios)),
    }
    assert 0 <= size <= 1 + 1e-12


def near(weight: float, config: CorrectionConfig) -> bool:
    return any(math.isclose(weight, bound, rel_tol=1e-12) for bound in (config.low, config.high))


@settings(max_examples=50, deadline=None)
@given(answers, st.randoms(use_true_random=False), configs)
def test_order_of_the_answers_changes_nothing_but_their_order(
    ratios: Answers, random: Any, config: CorrectionConfig
) -> None:
    order = list(range(len(ratios)))
    random.shuffle(order)
    first, second = corrected(ratios, config), corrected([ratios[i] for i in order], config)
    assert second.kept == [first.kept[i] for i in order]
    ends = np.cumsum([*map(len, ratios)])
    parts = np.split(first.weights, ends[:-1])
    assert np.concatenate([parts[i] for i in order]).tolist() == second.weights.tolist()
    assert second.figures == pytest.approx(first.figures, rel=1e-12, abs=1e-13)


def verls_keeps(
    padded: Tensor, mask: Tensor, reject: str | None, limit: float | None
) -> Sequence[bool]:
    """Reject by verl, whose limits are ratios for k1, and k1^2 / 2 for the largest k1."""
    if reject is None or limit is None:
        return [True] * len(padded)
    name, threshold = {
        "mean_k1": ("seq_mean_k1", f"{math.exp(-limit)}_{math.exp(limit)}"),
        "max_k1": ("seq_max_k2", limit**2 / 2),
        "mean_k3": ("seq_mean_k3", limit),
        "max_k3": ("seq_max_k3", limit),
    }[reject]
    kept, _ = verl_corrections()["compute_rollout_rejection_mask"](padded, mask, name, threshold)
    return kept.any(1).tolist()


@pytest.mark.skipif(VERL.may_skip, reason="verl is not installed")
@settings(max_examples=100, deadline=None)
@given(
    ratios=st.lists(st.lists(ratio, min_size=1, max_size=6), min_size=1, max_size=6),
    config=configs.filter(lambda c: c.veto is None and c.level != "geometric" and c.low > 0),
)
def test_weights_rejections_and_figures_are_those_of_verl(
    ratios: Answers, config: CorrectionConfig
) -> None:
    """Run verl in fp64. It adds 1e-8 to the mean of the weights and to the number of tokens."""
    unrejected = corrected(ratios, replace(config, reject=None, reject_above=None))
    if near_bound(ratios, config) or not unrejected.weights.any():  # there verl divides by 0
        return
    width = max(map(len, ratios))
    padded = torch.tensor([row + [0.0] * (width - len(row)) for row in ratios], dtype=torch.float64)
    mask = torch.tensor([[1.0] * len(row) + [0.0] * (width - len(row)) for row in ratios]).double()
    bounds = config.high if config.how == "truncate" else f"{config.low}_{config.high}"
    weights, figures = verl_corrections()["compute_rollout_correction_weights"](
        padded, mask, config.level, bounds
    )
    assert unrejected.weights == pytest.approx(weights[mask.bool()].numpy(), rel=1e-12, abs=0)
    assert unrejected.figures["effective_sample_size"] == pytest.approx(
        figures["rollout_is_eff_sample_size"],
        rel=1e-7 + 3e-8 / float(unrejected.weights.mean()),
    )
    result = corrected(ratios, config)
    assert result.kept == verls_keeps(padded, mask, config.reject, config.reject_above)
    if float(padded.abs().max()) < 20:  # it does not limit these
        metrics = verl_corrections()["compute_offpolicy_metrics"]
        theirs = metrics(padded, torch.zeros_like(padded), mask)
        assert result.figures["mismatch_k1"] == pytest.approx(theirs["kl"], rel=1e-7, abs=1e-12)
        assert result.figures["mismatch_k3"] == pytest.approx(theirs["k3_kl"], rel=1e-7, abs=1e-12)


def test_equal_probabilities_give_weights_of_1_and_nothing_is_cut() -> None:
    same = [-1.0, -2.0, -0.1]
    for level in LEVELS:
        for how in HOWS:
            config = CorrectionConfig(
                level=level, how=how, reject="max_k3", reject_above=1e-9, veto=1e-9
            )
            result = correct(same, same, [1, 0, 2], config)
            assert result.weights.tolist() == [1.0] * 3 and result.kept == [True] * 3
            figures = {name: value for name, value in result.figures.items() if value}
            assert figures == {"effective_sample_size": 1.0}


@pytest.mark.parametrize(
    ("rollout", "trainer", "lengths", "text"),
    [
        ([-1.0], [-1.0, -2.0], [2], "log-probabilities of 1 and of 2 tokens"),
        ([-1.0, -2.0], [-1.0, -2.0], [1], "2 log-probabilities for answers of 1 tokens"),
        ([], [], [0], "0 log-probabilities for answers of 0 tokens"),
        ([-1.0, -2.0], [-1.0, math.nan], [2], "of 1 of 2 tokens are not finite"),
        ([-math.inf, -2.0], [-math.inf, -math.inf], [2], "of 2 of 2 tokens are not finite"),
    ],
)
def test_log_probabilities_that_cannot_be_corrected_are_refused(
    rollout: list[float], trainer: list[float], lengths: list[int], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        correct(rollout, trainer, lengths, CorrectionConfig())


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"level": "word"}, "level='word': use one of token, sequence, geometric"),
        ({"how": "clip"}, "how='clip': use one of truncate, mask"),
        ({"reject": "sum_k1"}, "reject='sum_k1': use one of mean_k1"),
        ({"high": 0.0}, "high=0.0: must be positive and finite"),
        ({"high": math.nan}, "high=nan: must be positive"),
        ({"how": "mask", "low": 2.0}, r"low=2.0: must be in \[0, high\), with high=2.0"),
        ({"how": "mask", "low": -0.1}, r"low=-0.1: must be in \[0, high\)"),
        ({"reject": "max_k1"}, "reject_above=None: set it together with reject"),
        ({"reject_above": 1.0}, "reject_above=1.0: set it together with reject"),
        ({"reject": "max_k1", "reject_above": 0.0}, "reject_above=0.0: must be positive"),
        ({"veto": -1.0}, "veto=-1.0: must be positive and finite, or None"),
    ],
)
def test_contradictory_options_are_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=rf"CorrectionConfig\.{text}"):
        CorrectionConfig(**fields)
