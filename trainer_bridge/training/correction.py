"""Importance corrections for answers whose rollout computes other probabilities than the trainer.

A rollout with a quantized cache, merged adapters or other kernels samples from a policy that is not
quite the trainer's. With d = log(trainer / rollout probability) of a token, at the weights that
sampled it:

    weight     w = exp(d) of the token, or of its whole answer: exp(sum of d) ("sequence"),
               exp(mean of d) ("geometric")
    truncate   min(w, high)
    mask       w if low <= w <= high, else 0
    reject     leave out an answer if |mean of k1|, the largest |k1|, the mean of k3 or the largest
               k3 of its tokens is too large; k1 = -d and k3 = exp(d) - 1 - d are estimates of
               KL(rollout || trainer)
    veto       leave out an answer with any d below -veto

A weight multiplies the token's clipped loss and has no gradient. A masked token stays in the
denominator of the mean, so that the other tokens do not gain influence. All log-ratios (of sums,
too) are limited to +-20 before exp.

Sources. Decoupled PPO: Hilton et al., "Batch size-invariance for policy optimization" (2021, arXiv
2110.00641). Truncation by token: Yao et al., "Your Efficient RL Framework Secretly Brings You
Off-Policy RL Training" (2025). Masks by sequence, geometric weights: Liu, Li et al., "When Speed
Kills Stability" (2025). Masks by token on both sides: IcePop, in Ling Team, "Every Step Evolves"
(2025). Rejection by divergences: Li et al., "Trust Region Masking" (2025, arXiv 2512.23075). Veto:
slime, `examples/train_infer_mismatch_helper/mis.py`. verl documents the same formulas in
`docs/algo/rollout_corr_math.md`; its thresholds of k1 are ratios (exp of ours), and it has no
geometric weights. slime clips at both bounds, too, which is not offered here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

Level = Literal["token", "sequence", "geometric"]
How = Literal["truncate", "mask"]
Reject = Literal["mean_k1", "max_k1", "mean_k3", "max_k3"]
Numbers = NDArray[np.float64]

_LIMIT = 20.0  # of log-ratios: exp(20) is 5e8


@dataclass(frozen=True, kw_only=True)
class CorrectionConfig:
    """Options of `correct`; a contradiction raises a ValueError on construction.

    Attributes:
        level: What one weight applies to: a token, or all tokens of an answer, whose weight is the
            product (sequence) or the geometric mean of the tokens' weights.
        how: What happens to a weight outside the bounds: above `high` it is set to `high`
            (truncate), or below `low` or above `high` to 0 (mask).
        low: Lower bound of a mask; not negative, below `high`. Unused otherwise.
        high: Upper bound; positive and finite.
        reject: Figure of an answer's tokens that rejects the answer above `reject_above`: |mean of
            k1|, the largest |k1|, the mean of k3 or the largest k3. None rejects no answer.
        reject_above: Limit of `reject` in nats, positive.
        veto: Nats by which the trainer's log-probability of a token may lie below the rollout's; an
            answer with any lower token is rejected. None has no veto.
    """

    level: Level = "token"
    how: How = "truncate"
    low: float = 0.5
    high: float = 2.0
    reject: Reject | None = None
    reject_above: float | None = None
    veto: float | None = None

    def __post_init__(self) -> None:
        for name, kinds in (("level", Level), ("how", How), ("reject", Reject)):
            value, allowed = getattr(self, name), get_args(kinds)
            if value not in allowed and (name, value) != ("reject", None):
                raise ValueError(f"{self._shown(name)}: use {', '.join(allowed)}")
        if not 0 < self.high < np.inf:
            raise ValueError(f"{self._shown('high')}: must be positive and finite")
        if self.how == "mask" and not 0 <= self.low < self.high:
            raise ValueError(f"{self._shown('low')}: must be in [0, high), with high={self.high}")
        if (self.reject is None) != (self.reject_above is None):
            raise ValueError(f"{self._shown('reject_above')}: set it together with reject")
        for name in ("reject_above", "veto"):
            value = getattr(self, name)
            if value is not None and not 0 < value < np.inf:
                raise ValueError(f"{self._shown(name)}: must be positive and finite, or None")

    def _shown(self, name: str) -> str:
        return f"CorrectionConfig.{name}={getattr(self, name)!r}"


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Weights of the tokens of some answers, and the mismatch that they correct.

    Attributes:
        weights: Weight of each token, answer by answer, in fp64; 0 in a rejected answer.
        kept: Whether each answer is to be learned from.
        figures: Figures of `mismatch`, and effective_sample_size (`effective_sample_size` of the
            weights), weights_truncated and weights_masked (shares of the tokens), and
            answers_rejected (share of the answers).
    """

    weights: Numbers
    kept: list[bool]
    figures: dict[str, float]


def correct(
    rollout: ArrayLike, trainer: ArrayLike, lengths: Sequence[int], config: CorrectionConfig
) -> Correction:
    """Compute the importance weights of the tokens of a step.

    `trainer_bridge.training.correction` has the formulas and their sources.

    Args:
        rollout: The rollout's log-probability of each token, answer by answer.
        trainer: The trainer's log-probability of each token, at the weights that sampled it.
        lengths: Tokens of each answer.
        config: Kind and bounds of the weights.

    Returns:
        Weights, answers to keep and figures.

    Raises:
        ValueError: The log-probabilities are not finite, or their number is not the sum of the
            lengths, or 0.
    """
    ratios = _log_ratios(rollout, trainer)
    if sum(lengths) != len(ratios) or not len(ratios):
        raise ValueError(f"{len(ratios)} log-probabilities for answers of {sum(lengths)} tokens")
    answers = _Answers(lengths)
    raw = np.exp(_limited(answers.spread(ratios, config.level)))
    above, masks = raw > config.high, config.how == "mask"
    outside = above | (raw < config.low) if masks else above
    weights = np.where(outside, 0.0 if masks else config.high, raw)
    kept = _kept(ratios, answers, config)
    weights *= np.repeat(kept, lengths)
    share = float(outside.mean())
    figures = mismatch(ratios) | {
        "effective_sample_size": effective_sample_size(weights),
        "weights_truncated": 0.0 if masks else share,
        "weights_masked": share if masks else 0.0,
        "answers_rejected": 1 - float(kept.mean()),
    }
    return Correction(weights=weights, kept=kept.tolist(), figures=figures)


def mismatch(ratios: Numbers) -> dict[str, float]:
    """Return figures of log(trainer / rollout probability) of tokens sampled by the rollout.

    k1 = -ratio and k3 = exp(ratio) - 1 - ratio are estimates of KL(rollout || trainer).

    Source: Schulman, "Approximating KL Divergence" (2020).

    Returns:
        mismatch_mean and mismatch_max, of absolute ratios, and mismatch_k1 and mismatch_k3, the
        means of both estimates, all in nats.
    """
    sizes = np.abs(ratios)
    return {
        "mismatch_mean": float(sizes.mean()),
        "mismatch_max": float(sizes.max()),
        "mismatch_k1": -float(ratios.mean()),
        "mismatch_k3": float(_k3(ratios).mean()),
    }


def effective_sample_size(weights: Numbers) -> float:
    """Return the effective share of weighted tokens: sum(w)^2 / (n sum(w^2)).

    It is 1 if all weights are equal, 1 / n if a single one is not 0, and 0 if none is.

    Source: Kong, "A Note on Importance Sampling using Standardized Weights" (1992). verl reports it
    as `rollout_is_eff_sample_size`.
    """
    squares = float(weights @ weights)
    return float(weights.sum()) ** 2 / (len(weights) * squares) if squares else 0.0


def _log_ratios(rollout: ArrayLike, trainer: ArrayLike) -> Numbers:
    before, after = np.asarray(rollout, np.float64), np.asarray(trainer, np.float64)
    if before.shape != after.shape:
        raise ValueError(f"log-probabilities of {before.size} and of {after.size} tokens")
    with np.errstate(invalid="ignore"):  # of infinities; reported below
        ratios = after - before
    if wrong := int(np.sum(~np.isfinite(ratios))):
        raise ValueError(
            f"log-probabilities of {wrong} of {ratios.size} tokens are not finite in the rollout "
            "or the trainer; look for overflows in the model's dtype"
        )
    return ratios


class _Answers:
    """Reductions of the tokens of each answer; 0 for an answer without tokens."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = np.asarray(lengths, np.int64)
        self._filled = self.lengths > 0
        self._starts = (np.cumsum(self.lengths) - self.lengths)[self._filled]

    def reduce(self, how: np.ufunc, numbers: Numbers) -> Numbers:
        """Return one number for each answer."""
        out = np.zeros(len(self.lengths))
        out[self._filled] = how.reduceat(numbers, self._starts)
        return out

    def mean(self, numbers: Numbers) -> Numbers:
        return self.reduce(np.add, numbers) / np.maximum(self.lengths, 1)

    def spread(self, ratios: Numbers, level: Level) -> Numbers:
        """Return the log-weight of each token."""
        if level == "token":
            return ratios
        of_answers = self.reduce(np.add, ratios) if level == "sequence" else self.mean(ratios)
        return np.repeat(of_answers, self.lengths)


def _limited(ratios: Numbers) -> Numbers:
    return np.clip(ratios, -_LIMIT, _LIMIT)


def _k3(ratios: Numbers) -> Numbers:
    limited = _limited(ratios)
    return np.expm1(limited) - limited


def _kept(ratios: Numbers, answers: _Answers, config: CorrectionConfig) -> NDArray[np.bool_]:
    kept = np.ones(len(answers.lengths), dtype=bool)
    if config.reject is not None:
        over, _, name = config.reject.partition("_")
        of_tokens = _k3(ratios) if name == "k3" else _limited(ratios)
        if over == "mean":
            of_answers = np.abs(answers.mean(of_tokens))
        else:
            of_answers = answers.reduce(np.maximum, np.abs(of_tokens))
        kept &= of_answers <= config.reject_above
    if config.veto is not None:
        kept &= answers.reduce(np.minimum, ratios) >= -config.veto
    return kept
