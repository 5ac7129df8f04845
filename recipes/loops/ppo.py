"""PPO over the wake-up cycle.

Step s (version s of the weights):

    to_rollout(s)          the trainer offloads, the rollout wakes in stages, weights are synced
    generate_sequences     samples_per_prompt answers to each of prompts_per_step prompts
    to_score("reference")  with loss.kl_coef only: the rollout sleeps, the reference reloads
    compute_ref_log_prob   log-probabilities under the weights before the first update, or after the
                           last multiple of loss.reference_every steps
    to_score("critic")     the critic replaces the reference
    compute_values         the critic's estimate of the reward after every token
    to_score()             the trainer's parameters replace the critic
    compute_log_prob       log-probabilities under the weights that sampled; not if the update
                           computes them, and not with correction.mode=bypass
    compute_reward         the task's score of every answer
    to_train()             critic and both optimizers reload
    compute_advantages     rewards of tokens (`token_rewards`), then GAE and whitening
    update_critic          epochs x mini_batches updates on the clipped squared error to the returns
    update_actor           as many updates by the loss of section `loss`; none in the first
                           critic_warmup_steps steps

Both updates take the answers with a reward that the correction does not reject, and with
loss.mask_cut_off only those that ended. `recipes.loops.corrections` compares the rollout's
log-probabilities with the trainer's; its weights correct the policy's loss for the difference. The
answers' order is a function of (recipe.seed, step), like prompts and sampling seeds.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from recipes.config.recipe import Recipe
from recipes.loops.advantages import kl_penalties
from recipes.loops.corrections import correct_step
from recipes.loops.figures import answer_figures
from recipes.loops.loop import Loop, schedule_of
from recipes.loops.numbers import centered, deviation
from recipes.loops.sampling import usable
from recipes.loops.updates import mini_batches, update
from trainer_bridge import CriticConfig, SequenceBatch
from trainer_bridge.learning import Numbers, reference_figures
from trainer_bridge.tag_names import CRITIC


class PpoLoop(Loop):
    """The loop of PPO."""

    @staticmethod
    def trainer_fields(recipe: Recipe) -> dict[str, Any]:
        ppo, steps, updates = recipe.ppo, recipe.steps, recipe.updates_per_step
        critic = CriticConfig(
            learning_rate=ppo.critic_learning_rate,
            schedule=schedule_of(recipe, steps, updates),
            value_clip=ppo.value_clip,
        )
        return {
            "schedule": schedule_of(recipe, steps - ppo.critic_warmup_steps, updates),
            "critic": critic,
        }

    def train_step(self, step: int) -> dict[str, Any]:
        trainer, recipe, ppo = self.trainer, self.setup.recipe, self.setup.recipe.ppo
        samples, scoring = self.sample(step)
        ref_logprobs = self.score_by_reference(samples)
        self.to_score(CRITIC)
        with self.stage("compute_values"):
            batch = samples.batch(1.0)
            values = batch.by_answer(trainer.compute_values(batch))
        logprobs, scores = self.score(samples, scoring)
        correction = correct_step(self.setup, samples, logprobs)
        own = samples.learned(logprobs), ref_logprobs and samples.learned(ref_logprobs)
        row: dict[str, Any] = reference_figures(*own) | correction.figures
        row |= self.unreplayed_mismatch(step, samples)
        self.to_train()
        batch = samples.batch(
            self.temperature,
            **{self.setup.logprobs_field: logprobs},
            ref_logprobs=ref_logprobs,
            weights=correction.weights,
            values=values,
            routed_experts=samples.routed_experts,
        )
        taken = correction.kept(usable(samples, scores, recipe.loss.mask_cut_off))
        with self.stage("compute_advantages"):
            rewards = [reward for i in taken if (reward := scores[i].reward) is not None]
            batch, figures = with_advantages(batch.of_answers(taken), rewards, recipe)
        loop = recipe.loop
        parts = mini_batches(len(taken), loop.epochs, loop.mini_batches, recipe.seed, step)
        with self.stage("update_critic"):
            row |= figures | update(trainer.update_critic, batch, parts)
        if step > ppo.critic_warmup_steps:
            row |= self.update_actor(batch, parts)
        trained = self.setup.tasks.trained
        return row | answer_figures(samples, scores, self.sampling_seconds, trained)


def with_advantages(
    batch: SequenceBatch, rewards: Sequence[float], recipe: Recipe
) -> tuple[SequenceBatch, dict[str, float]]:
    """Return the batch with advantages and returns, and figures of both; an empty batch as it is.

    `batch` has the policy's log-probabilities, values and, with a reference, its log-probabilities.
    """
    if not rewards:
        return batch, {}
    logprobs = batch.tokens("rollout_logprobs" if batch.old_logprobs is None else "old_logprobs")
    ppo, values = recipe.ppo, batch.tokens("values").values
    lengths = batch.by_answer(logprobs).lengths.tolist()
    reference = None if batch.ref_logprobs is None else batch.tokens("ref_logprobs")
    penalties = kl_penalties(recipe, logprobs, reference).values
    earned = token_rewards(rewards, penalties, lengths)
    advantages, returns = gae(earned, values, lengths, ppo.gamma, ppo.gae_lambda)
    figures = {
        "advantage_std": deviation(advantages),
        "value_explained_variance": explained_variance(values, returns),
    }
    if ppo.normalize_advantages:
        advantages = whiten(advantages)
    parts = {"advantages": advantages, "returns": returns}
    learning: dict[str, Any] = {
        name: batch.whole(logprobs.with_values(part)) for name, part in parts.items()
    }
    learning["ref_logprobs"] = batch.ref_logprobs if recipe.kl_in == "loss" else None
    return replace(batch, **learning), figures


def token_rewards(rewards: Sequence[float], penalties: Numbers, lengths: Sequence[int]) -> Numbers:
    """Return the reward of every token: minus its penalty, and at the end the answer's reward.

    Args:
        rewards: Reward of each answer.
        penalties: Penalty of every token (`kl_penalties`).
        lengths: Tokens of each answer.

    Returns:
        A reward for each token, answer by answer.
    """
    sizes, per_token = np.array(lengths), -penalties
    ends = np.cumsum(sizes)[sizes > 0]
    per_token[ends - 1] += np.array(rewards)[sizes > 0]
    return per_token


def gae(
    rewards: Numbers, values: Numbers, lengths: Sequence[int], gamma: float, gae_lambda: float
) -> tuple[Numbers, Numbers]:
    """Return generalized advantage estimates and returns (advantage + value) of every token.

    The value after the last token of an answer is 0, also for an answer cut off by max_tokens (no
    bootstrap).

    Source: Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage
    Estimation" (2016).

    Args:
        rewards: Reward of every token, answer by answer.
        values: Value of every token.
        lengths: Tokens of each answer.
        gamma: Discount of later rewards.
        gae_lambda: Weight of longer estimates.

    Returns:
        Advantages and returns of every token.
    """
    sizes = np.array([length for length in lengths if length], dtype=np.int64)
    order = np.argsort(-sizes)
    last, longest_first = np.cumsum(sizes)[order] - 1, sizes[order]
    following = np.roll(values, -1)
    following[last] = 0.0
    advantages = rewards + gamma * following - values
    for back in range(1, max(lengths)):  # tokens before the last, for all answers together
        at = last[: np.searchsorted(-longest_first, -back)] - back
        advantages[at] += gamma * gae_lambda * advantages[at + 1]
    return advantages, advantages + values


def whiten(numbers: Numbers) -> Numbers:
    """Return (number - mean) / sqrt(variance + 1e-8) of the numbers of all tokens.

    The result has mean 0 and deviation 1, unless the deviation is as small as 1e-4. Equal numbers
    become 0.

    Source: `masked_whiten` of TRL and verl, which take the sample variance, too.
    """
    return centered(numbers) / np.sqrt(deviation(numbers) ** 2 + 1e-8)


def explained_variance(values: Numbers, returns: Numbers) -> float:
    """Return 1 - var(returns - values) / var(returns): 1 for a perfect critic, 0 for a constant.

    The result is also 0 if the returns are equal but for the rounding of the sums they come from.
    """
    spread, largest = deviation(returns), max(np.abs(values).max(), np.abs(returns).max())
    return 1 - (deviation(returns - values) / spread) ** 2 if spread > 1e-12 * largest else 0.0
