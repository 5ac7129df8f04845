"""PPO over the wake-up cycle.

Step s (version s of the weights):

    to_rollout(s)          the trainer offloads, the rollout wakes in stages, weights are synced
    generate_sequences     samples_per_prompt answers to each of prompts_per_step prompts
    to_score("reference")  with kl_coef only: the rollout sleeps, the reference reloads
    compute_ref_log_prob   log-probabilities under the weights before the first update
    to_score("critic")     the critic replaces the reference
    compute_values         the critic's estimate of the reward after every token
    to_score()             the trainer's parameters replace the critic
    compute_log_prob       log-probabilities under the weights that sampled; their mismatch to the
                           rollout's log-probabilities is reported
    compute_reward         the task's score of every answer
    to_train()             critic and both optimizers reload
    compute_advantages     rewards of tokens (`token_rewards`), then GAE and whitening
    update_critic          epochs x mini_batches updates on the clipped squared error to the returns
    update_actor           as many clipped policy-gradient updates; none in the first
                           critic_warmup_steps steps

The order of the answers in the updates is a function of (recipe.seed, step), like prompts and
sampling seeds.
"""

import math
import random
import statistics
from collections.abc import Callable, Sequence
from itertools import chain, starmap
from operator import add, itemgetter
from typing import Any

import numpy as np

from recipes.config.recipe import Recipe
from recipes.loop import Loop, PerToken, pairs, spread_of, step_row
from trainer_bridge import CriticConfig, SequenceBatch
from trainer_bridge.tags import CRITIC


class PpoLoop(Loop):
    """The loop of PPO."""

    @staticmethod
    def trainer_fields(recipe: Recipe) -> dict[str, Any]:
        ppo, decays = recipe.ppo, recipe.trainer.lr_decay
        a_step = ppo.epochs * ppo.mini_batches
        learning_steps = max(1, recipe.steps - ppo.critic_warmup_steps)
        critic = CriticConfig(
            learning_rate=ppo.critic_learning_rate,
            decay_steps=recipe.steps * a_step if decays else None,
            value_clip=ppo.value_clip,
        )
        return {
            "clip_eps_low": ppo.clip_low,
            "clip_eps_high": ppo.clip_high,
            "reference": ppo.kl_coef > 0,
            "decay_steps": learning_steps * a_step if decays else None,
            "critic": critic,
        }

    def train_step(self, step: int) -> dict[str, Any]:
        trainer, recipe, ppo = self.trainer, self.setup.recipe, self.setup.recipe.ppo
        samples = self.sample(step)
        ref_logprobs = self.score_by_reference(samples)
        self.to_score(CRITIC)
        with self.stage("compute_values"):
            values = trainer.compute_values(samples.batch(1.0))
        logprobs, scores = self.score(samples)
        unreplayed = self.unreplayed_mismatch(step, samples)
        self.to_train()
        with self.stage("compute_advantages"):
            rewards = token_rewards(
                [score.reward for score in scores], logprobs, ref_logprobs, ppo.kl_coef
            )
            advantages, returns = compute_advantages(rewards, values, ppo.gamma, ppo.gae_lambda)
            advantage_std = spread_of(list(chain.from_iterable(advantages)))
            if ppo.normalize_advantages:
                advantages = whiten(advantages)
        learning = {
            "old_logprobs": logprobs,
            "advantages": advantages,
            "values": values,
            "returns": returns,
            "routed_experts": samples.routed_experts,
        }
        batch = samples.batch(self.temperature, **learning)
        parts = mini_batches(len(batch), ppo.epochs, ppo.mini_batches, recipe.seed, step)
        with self.stage("update_critic"):
            learned = update(trainer.update_critic, batch, parts)
        if step > ppo.critic_warmup_steps:
            with self.stage("update_actor"):
                learned |= update(trainer.update_actor, batch, parts)
        learned["advantage_std"] = advantage_std
        learned["value_explained_variance"] = explained_variance(values, returns)
        row = step_row(samples, scores, logprobs, ref_logprobs, self.monitor.seconds)
        return learned | row | unreplayed


def token_rewards(
    rewards: Sequence[float], logprobs: PerToken, ref_logprobs: PerToken | None, kl_coef: float
) -> PerToken:
    """Return the reward of every token.

    It is -kl_coef * (policy - reference log-probability), or 0 without `ref_logprobs`. The last
    token of an answer gets the answer's reward in addition.
    """
    if ref_logprobs is None:
        per_token = [[0.0] * len(row) for row in logprobs]
    else:
        per_token = _map_tokens(
            lambda policy, reference: -kl_coef * (policy - reference), logprobs, ref_logprobs
        )
    for row, reward in zip(per_token, rewards, strict=True):
        if row:
            row[-1] += reward
    return per_token


def compute_advantages(
    rewards: PerToken, values: PerToken, gamma: float, gae_lambda: float
) -> tuple[PerToken, PerToken]:
    """Return generalized advantage estimates and returns (advantage + value) of every token.

    `rewards` and `values` have a number for each token. The value after the last token of an answer
    is 0, also for an answer cut off by max_tokens (no bootstrap).

    Source: Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage
    Estimation" (2016).
    """
    advantages = [
        _estimates(reward_row, value_row, gamma, gae_lambda)
        for reward_row, value_row in zip(rewards, values, strict=True)
    ]
    return advantages, _map_tokens(add, advantages, values)


def _estimates(
    rewards: Sequence[float], values: Sequence[float], gamma: float, gae_lambda: float
) -> list[float]:
    estimates: list[float] = []
    advantage = next_value = 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        advantage = reward + gamma * next_value - value + gamma * gae_lambda * advantage
        next_value = value
        estimates.append(advantage)
    return estimates[::-1]


def whiten(numbers: PerToken) -> PerToken:
    """Normalize to mean 0 and deviation 1 over all tokens; equal numbers become zeros."""
    flat = list(chain.from_iterable(numbers))
    mean, scale = statistics.fmean(flat), spread_of(flat) or math.inf
    return _map_tokens(lambda number: (number - mean) / scale, numbers)


def _map_tokens(function: Callable[..., float], *numbers: PerToken) -> PerToken:
    """Apply `function` to the numbers of every token."""
    rows = zip(*numbers, strict=True)
    return [list(starmap(function, zip(*row, strict=True))) for row in rows]


def mini_batches(count: int, epochs: int, number: int, seed: int, step: int) -> list[list[int]]:
    """Return the answers of each update: a pass shuffles `count` answers into `number` parts."""
    parts: list[list[int]] = []
    for epoch in range(epochs):
        order = list(range(count))
        random.Random(f"{seed}/mini_batches/{step}/{epoch}").shuffle(order)
        parts += [
            order[count * part // number : count * (part + 1) // number] for part in range(number)
        ]
    return parts


def update(
    learn: Callable[[SequenceBatch], dict[str, float]],
    batch: SequenceBatch,
    parts: Sequence[Sequence[int]],
) -> dict[str, float]:
    """Run one optimizer step on each part and return the means of their figures."""
    figures = [learn(batch.select(part)) for part in parts]
    return {name: statistics.fmean(map(itemgetter(name), figures)) for name in figures[0]}


def explained_variance(values: PerToken, returns: PerToken) -> float:
    """Return 1 - var(returns - values) / var(returns): 1 for a perfect critic, 0 for a constant.

    The result is also 0 if the returns differ by rounding only.
    """
    target_pairs = pairs(returns, values)
    spread = spread_of([target for target, _ in target_pairs])
    rest = float(np.std([target - estimate for target, estimate in target_pairs]))
    return 1 - (rest / spread) ** 2 if spread else 0.0
