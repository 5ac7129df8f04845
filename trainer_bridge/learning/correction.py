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

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trainer_bridge.config import CorrectionConfig, Level
from trainer_bridge.errors import UnequalTokens
from trainer_bridge.learning.batch import SequenceBatch
from trainer_bridge.learning.tokens import Numbers, Tokens, log_ratios, unequal_places

_LIMIT = 20.0  # of log-ratios: exp(20) is 5e8


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
    rollout: ArrayLike,
    trainer: ArrayLike,
    lengths: Sequence[int] | NDArray[np.int64],
    config: CorrectionConfig,
) -> Correction:
    """Compute the importance weights of the tokens of a step.

    `trainer_bridge.learning.correction` has the formulas and their sources.

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
        "mismatch_k3": float(k3(_limited(ratios)).mean()),
    }


def effective_sample_size(weights: Numbers) -> float:
    """Return the effective share of weighted tokens: sum(w)^2 / (n sum(w^2)).

    It is 1 if all weights are equal, 1 / n if a single one is not 0, and 0 if none is.

    Source: Kong, "A Note on Importance Sampling using Standardized Weights" (1992). verl reports it
    as `rollout_is_eff_sample_size`.
    """
    squares = float(weights @ weights)
    return float(weights.sum()) ** 2 / (len(weights) * squares) if squares else 0.0


def reference_figures(logprobs: Tokens, ref_logprobs: Tokens | None) -> dict[str, float]:
    """Return the divergence of the policy from the reference; nothing without a reference.

    It is the mean of r - 1 - log(r) over all tokens, in nats, where r is the probability under the
    reference divided by that under the policy. This is the estimator k3 of Schulman,
    "Approximating KL Divergence" (2020).
    """
    if ref_logprobs is None:
        return {}
    ratios = log_ratios(logprobs, ref_logprobs)
    return {"kl_to_reference": float(np.mean(k3(ratios)))}


def figures_of_first_update(batch: SequenceBatch, own: Tokens) -> dict[str, float]:
    """Return the figures of an update that computed the log-probabilities `own` of its batch.

    The batch has `rollout_logprobs`. The weights behind `effective_sample_size` and the shares are
    those of the default options; the update did not use them.
    """
    rollout, own = batch.tokens("rollout_logprobs"), batch.learned(own)
    corrected = correct(rollout.values, own.values, own.lengths, CorrectionConfig())
    reference = None if batch.ref_logprobs is None else batch.tokens("ref_logprobs")
    return corrected.figures | reference_figures(own, reference)


def unequal_tokens(batch: SequenceBatch, own: Tokens) -> UnequalTokens | None:
    """Compare the bits of `rollout_logprobs` with `own`, and return what differs."""
    rollout = batch.whole(batch.tokens("rollout_logprobs"))
    places = unequal_places(rollout.values, own.values)
    if not places:
        return None
    number = int(own.answers_at(np.arange(len(own.values)) == places[0])[0])
    place = places[0] - int(own.lengths[:number].sum())
    pair = float(rollout.values[places[0]]), float(own.values[places[0]])
    return UnequalTokens(len(places), number, place, pair)


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

    def __init__(self, lengths: Sequence[int] | NDArray[np.int64]) -> None:
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


def k3(ratios: Numbers) -> Numbers:
    """Return exp(ratio) - 1 - ratio of each log(other / own probability)."""
    return np.expm1(ratios) - ratios


def _kept(ratios: Numbers, answers: _Answers, config: CorrectionConfig) -> NDArray[np.bool_]:
    kept = np.ones(len(answers.lengths), dtype=bool)
    if config.reject is not None:
        over, _, name = config.reject.partition("_")
        limited = _limited(ratios)
        of_tokens = k3(limited) if name == "k3" else limited
        if over == "mean":
            of_answers = np.abs(answers.mean(of_tokens))
        else:
            of_answers = answers.reduce(np.maximum, np.abs(of_tokens))
        kept &= of_answers <= config.reject_above
    if config.veto is not None:
        kept &= answers.reduce(np.minimum, ratios) >= -config.veto
    return kept
