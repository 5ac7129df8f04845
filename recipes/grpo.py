"""GRPO over the wake-up cycle.

Step s (version s of the weights, after s - 1 updates):

    to_rollout(s)          the trainer offloads, the rollout wakes in stages, weights are synced
    generate_sequences     samples_per_prompt answers to each of prompts_per_step prompts; with
                           sampling_rounds > 1, new prompts replace groups without signal
    to_score("reference")  with kl_coef only: the rollout sleeps, the reference reloads
    compute_ref_log_prob   log-probabilities under the weights before the first update
    to_score()             the trainer's parameters replace the reference
    compute_log_prob       log-probabilities under the weights that sampled; their mismatch to the
                           rollout's log-probabilities is reported
    compute_reward         the task's score of every answer
    to_train()             the trainer reloads its optimizer
    compute_advantages     reward compared with the other answers to the same prompt
    update_actor           one clipped policy-gradient update on the answers with a reward, with
                           kl_coef times the KL divergence from the reference
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from recipes.config.recipe import Recipe
from recipes.figures import answer_figures, centered, deviation, model_figures
from recipes.loop import Loop, Scoring
from recipes.rounds import sample_groups, with_signal
from recipes.sampling import Samples, scored

EPSILON = 1e-6  # verl's; TRL adds 1e-4


class GrpoLoop(Loop):
    """The loop of GRPO."""

    @staticmethod
    def trainer_fields(recipe: Recipe) -> dict[str, Any]:
        grpo = recipe.grpo
        return {
            "clip_eps_low": grpo.clip_low,
            "clip_eps_high": grpo.clip_high,
            "kl_loss_coef": grpo.kl_coef,
            "reference": grpo.kl_coef > 0,
            "decay_steps": recipe.steps if recipe.trainer.lr_decay else None,
        }

    def train_step(self, step: int) -> dict[str, Any]:
        sampled = sample_groups(self, step)
        samples, scoring = sampled.to_train_on()
        learned = dict[str, Any]()
        if samples.texts:
            learned = self.learn(step, samples, scoring)
        else:  # no group with signal
            self.to_train()
        scores, seconds = sampled.scoring(), self.monitor.seconds
        row = answer_figures(sampled.samples, scores, seconds, self.setup.tasks.trained)
        signal = with_signal(scores, self.setup.recipe.grpo.samples_per_prompt)
        return learned | row | sampled.figures | {"groups_without_signal": signal.count(False)}

    def learn(self, step: int, samples: Samples, scoring: Scoring) -> dict[str, Any]:
        """Update the policy on answers of whole groups, and return figures of the models."""
        grpo = self.setup.recipe.grpo
        ref_logprobs = self.score_by_reference(samples)
        logprobs, scores = self.score(samples, scoring)
        unreplayed = self.unreplayed_mismatch(step, samples)
        self.to_train()
        with self.stage("compute_advantages"):
            rewards = [score.reward for score in scores]
            advantages = compute_advantages(rewards, grpo.samples_per_prompt, grpo.normalize_std)
        learning = {
            "old_logprobs": logprobs,
            "advantages": advantages,
            "ref_logprobs": ref_logprobs,
            "routed_experts": samples.routed_experts,
        }
        batch = samples.batch(self.temperature, **learning).select(scored(scores))
        with self.stage("update_actor"):
            learned = self.trainer.update_actor(batch)
        return learned | model_figures(samples, logprobs, ref_logprobs) | unreplayed


def compute_advantages(
    rewards: Sequence[float | None], group_size: int, normalize_std: bool
) -> list[float]:
    """Compare each reward with the rewards of its group.

    The advantage is reward - mean, or with `normalize_std` (reward - mean) / (deviation + 1e-6),
    with mean and sample deviation of the group, in fp64. So a group keeps its signal at any size
    and offset of its rewards, unless their differences are far below 1e-6. Equal rewards get
    exactly 0.

    Source: Shao et al., "DeepSeekMath" (2024), with the sample deviation and the added constant of
    verl (`compute_grpo_outcome_advantage`). TRL adds 1e-4.

    Args:
        rewards: Rewards of whole groups, whose answers are adjacent. An answer whose reward is None
            or NaN is left out of its group and gets 0; leave it out of the update, too.
        group_size: Answers of each group.
        normalize_std: Whether to divide by the deviation.

    Returns:
        An advantage for each reward.

    Raises:
        ValueError: The last group is not whole.
    """
    if len(rewards) % group_size:
        raise ValueError(f"{len(rewards)} rewards are no multiple of {group_size}; pass all groups")
    groups = np.array(rewards, dtype=np.float64).reshape(-1, group_size)  # NaN for None
    advantages = np.zeros_like(groups)
    for group, result in zip(groups, advantages, strict=True):
        known = ~np.isnan(group)
        if known.any():
            scale = deviation(group[known]) + EPSILON if normalize_std else 1.0
            result[known] = centered(group[known]) / scale
    return advantages.ravel().tolist()
