"""Advantages of answers from their rewards alone, without a critic. All arithmetic is in fp64.

Sources:
    group, scaled by group: Shao et al., "DeepSeekMath" (2024), GRPO. The sample deviation and the
        added constant are verl's (`compute_grpo_outcome_advantage`); TRL adds 1e-4.
    group, not scaled: Liu et al., "Understanding R1-Zero-Like Training" (2025), Dr. GRPO.
    group, scaled by batch: Liu et al., "Part I: Tricks or Traps?" (2025).
    leave_one_out: Kool et al., "Buy 4 REINFORCE Samples, Get a Baseline for Free!" (2019);
        Ahmadian et al., "Back to Basics" (2024), RLOO.
    batch: Hu et al., "REINFORCE++" (2025).
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from recipes.config.recipe import Recipe
from recipes.config.sections import Baseline, Scale
from recipes.importing import NamedFunction
from recipes.loops.numbers import centered, deviation
from trainer_bridge.learning import Numbers, Tokens, k3, log_ratios

EPSILON = 1e-6
"""Added to a deviation."""

OwnBaseline = Callable[[Numbers], "Numbers | float"]
"""Returns the baseline of a group's known rewards [n], a number or [n]."""

OwnScale = Callable[[Numbers, Numbers], float]
"""Returns the divisor of a group from its rewards [n] and those of all answers of the step."""


def compute_advantages(
    recipe: Recipe, rewards: Sequence[float | None], logprobs: Tokens, ref_logprobs: Tokens | None
) -> list[float] | Tokens:
    """Return an advantage for each answer, or for each token with grpo.baseline=batch.

    The penalties of `kl_penalties` are subtracted from the rewards: from an answer's the sum over
    its tokens.
    """
    per_token = kl_penalties(recipe, logprobs, ref_logprobs)
    baseline, scale = _function(recipe.grpo.baseline), _function(recipe.grpo.scale)
    if baseline == "batch":
        return compare_tokens(rewards, per_token, scale)
    earned = [
        None if reward is None else reward - sum(row)
        for reward, row in zip(rewards, per_token, strict=True)
    ]
    return compare_answers(earned, recipe.samples_per_prompt, baseline, scale)


def _function(choice: str) -> Any:
    """Return the function that a key names, or the packaged choice itself."""
    return NamedFunction(choice) if ":" in choice else choice


def kl_penalties(recipe: Recipe, logprobs: Tokens, ref_logprobs: Tokens | None) -> Tokens:
    """Return the penalty of each token's reward for the KL divergence from the reference.

    It is loss.kl_coef times the estimate loss.kl_estimator, with d = policy - reference
    log-probability: k1 is d, k2 is d^2 / 2, k3 is exp(-d) - 1 + d. It is 0 without a reference or
    with loss.kl_in=loss.

    Source: Schulman, "Approximating KL Divergence" (2020).
    """
    if ref_logprobs is None or recipe.kl_in == "loss":
        return logprobs.with_values(np.zeros(len(logprobs.values)))
    difference = log_ratios(ref_logprobs, logprobs)
    estimates = {
        "k1": lambda: difference,
        "k2": lambda: difference**2 / 2,
        "k3": lambda: k3(-difference),
    }
    return logprobs.with_values(recipe.loss.kl_coef * estimates[recipe.kl_estimator]())


def compare_answers(
    rewards: Sequence[float | None],
    group_size: int,
    baseline: Baseline | OwnBaseline = "group",
    scale: Scale | OwnScale = "group",
) -> list[float]:
    """Compare each reward with the rewards of its group.

    The advantage is reward - baseline, divided by deviation + 1e-6 unless `scale` is none. The
    baseline is the mean of the group, or with leave_one_out the mean of its other answers. The
    deviation is the sample deviation of the group's rewards, or of all rewards (batch). So a group
    keeps its signal at any size and offset of its rewards, unless their differences are far below
    1e-6. Equal rewards get exactly 0.

    Args:
        rewards: Rewards of whole groups, whose answers are adjacent. An answer whose reward is None
            or NaN is left out of its group and gets 0; leave it out of the update, too.
        group_size: Answers of each group.
        baseline: Baseline of a group, group or leave_one_out, or a function of the group's rewards.
        scale: Deviation that divides: group, batch or none, or a function that returns the divisor.

    Returns:
        An advantage for each reward.

    Raises:
        ValueError: The last group is not whole.
    """
    groups = _grouped(rewards, group_size)
    batch = groups[~np.isnan(groups)]
    advantages = np.zeros_like(groups)
    for group, result in zip(groups, advantages, strict=True):
        known = ~np.isnan(group)
        if known.any():
            own = group[known]
            result[known] = _compared(own, baseline) / _divisor(scale, own, batch)
    return advantages.ravel().tolist()


def _compared(group: Numbers, baseline: Baseline | OwnBaseline) -> Numbers:
    if callable(baseline):
        compared = group - np.asarray(baseline(group), np.float64)
        if compared.shape != group.shape or not np.isfinite(compared).all():
            rule = f"returned no finite number for {len(group)} rewards, nor one for each"
            raise ValueError(f"baseline {baseline} {rule}; correct it")
        return compared
    if baseline == "leave_one_out" and len(group) > 1:
        # The mean of the others is further away by this factor.
        return centered(group) * (len(group) / (len(group) - 1))
    return centered(group)


def _divisor(scale: Scale | OwnScale, group: Numbers, batch: Numbers) -> float:
    if callable(scale):
        divisor = float(scale(group, batch))
        if not 0 < divisor < np.inf:
            raise ValueError(f"scale {scale} returned {divisor}; return a positive, finite number")
        return divisor
    if scale == "none":
        return 1.0
    return deviation(group if scale == "group" else batch) + EPSILON


def compare_tokens(
    rewards: Sequence[float | None], penalties: Tokens, scale: Scale | OwnScale = "batch"
) -> Tokens:
    """Compare the return of each token with the mean over all tokens.

    The return of a token is the answer's reward minus the penalties of this token and of all later
    ones. The advantage is return - mean, divided by deviation + 1e-6 unless `scale` is none, with
    mean and sample deviation of all tokens whose answer has a reward.

    Args:
        rewards: Reward of each answer. Tokens of an answer whose reward is None get 0.
        penalties: Penalty of each token, per answer.
        scale: Deviation that divides: batch or none, or a function that returns the divisor.

    Returns:
        An advantage for each token, per answer.
    """
    earned = [
        reward - np.cumsum(penalties.array(answer)[::-1])[::-1]
        for answer, reward in enumerate(rewards)
        if reward is not None
    ]
    advantages = np.zeros(len(penalties.values))
    if earned:
        compared = centered(np.concatenate(earned))
        known = np.array([reward is not None for reward in rewards])
        advantages[np.repeat(known, penalties.lengths)] = compared / _divisor(
            scale, compared, compared
        )
    return penalties.with_values(advantages)


def with_signal(rewards: Sequence[float | None], group_size: int) -> list[bool]:
    """Return for each group whether two of its rewards differ; otherwise it teaches nothing."""
    groups = _grouped(rewards, group_size)
    return [len({*group[~np.isnan(group)].tolist()}) > 1 for group in groups]


def _grouped(rewards: Sequence[float | None], group_size: int) -> Numbers:
    """Return the rewards by group, [groups, group_size], with NaN for None."""
    if len(rewards) % group_size:
        raise ValueError(f"{len(rewards)} rewards are no multiple of {group_size}; pass all groups")
    return np.array(rewards, dtype=np.float64).reshape(-1, group_size)
