"""PPO over the wake-up cycle, to be read in one sitting.

Step s (version s of the weights):

    to_rollout(s)          trainer offloads, rollout wakes in stages, weights are synced
    generate_sequences     samples_per_prompt answers to each of prompts_per_step prompts
    to_score("reference")  with kl_coef only: rollout sleeps, the reference comes
    compute_ref_log_prob   by the weights before the first update
    to_score("critic")     the critic comes, in the reference's place
    compute_values         by the critic: what is still to come at every token
    to_score()             the trainer's parameters come, in the critic's place
    compute_log_prob       by the trainer, at the weights that sampled: the mismatch to the
    rollout's own
                           is reported
    compute_reward         the task's score of every answer
    to_train()             critic and both optimizers come back
    compute_advantages     rewards a token (`token_rewards`), then GAE and whitening
    update_critic          epochs x mini_batches updates on the clipped squared error to the returns
    update_actor           as many clipped policy-gradient updates; none in the first
                           critic_warmup_steps steps

The order of the answers in the updates is a function of (recipe.seed, step), as prompts and
sampling seeds are.
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
    """Return -kl_coef * (policy - reference log-probability) a token, plus rewards at last tokens.

    Raises:
        ValueError: The lists are not of as many answers and tokens.
    """
    if ref_logprobs is None:
        found = [[0.0] * len(row) for row in logprobs]
    else:
        found = _each(lambda mine, theirs: -kl_coef * (mine - theirs), logprobs, ref_logprobs)
    for row, reward in zip(found, rewards, strict=True):
        if row:
            row[-1] += reward
    return found


def compute_advantages(
    rewards: PerToken, values: PerToken, gamma: float, gae_lambda: float
) -> tuple[PerToken, PerToken]:
    """Return generalized advantage estimates and returns (advantage + value), one a token.

    After an answer's last token nothing is to come: one that max_tokens cut off is not
    bootstrapped, it ended there.
    """
    advantages = [
        _estimates(row, worth, gamma, gae_lambda)
        for row, worth in zip(rewards, values, strict=True)
    ]
    return advantages, _each(add, advantages, values)


def _estimates(
    rewards: Sequence[float], values: Sequence[float], gamma: float, gae_lambda: float
) -> list[float]:
    found: list[float] = []
    later = after = 0.0  # from the last token back: its advantage, the next token's value
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        later = reward + gamma * after - value + gamma * gae_lambda * later
        after = value
        found.append(later)
    return found[::-1]


def whiten(numbers: PerToken) -> PerToken:
    """Return the numbers with mean 0 and deviation 1 over all tokens; zeros where all are equal."""
    flat = list(chain.from_iterable(numbers))
    mean, scale = statistics.fmean(flat), spread_of(flat) or math.inf
    return _each(lambda number: (number - mean) / scale, numbers)


def _each(function: Callable[..., float], *numbers: PerToken) -> PerToken:
    """Apply `function` to every token's numbers."""
    rows = zip(*numbers, strict=True)
    return [list(starmap(function, zip(*row, strict=True))) for row in rows]


def mini_batches(count: int, epochs: int, number: int, seed: int, step: int) -> list[list[int]]:
    """Return the answers of each update: a pass shuffles all `count` and cuts `number` parts."""
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
    """Make one optimizer step for each part, and return the means of its figures."""
    found = [learn(batch.select(part)) for part in parts]
    return {name: statistics.fmean(map(itemgetter(name), found)) for name in found[0]}


def explained_variance(values: PerToken, returns: PerToken) -> float:
    """Return 1 - var(returns - values) / var(returns): 1 is a perfect critic, 0 says a constant.

    Returns that differ by rounding only leave nothing to explain: 0.
    """
    both = pairs(returns, values)
    spread = spread_of([wanted for wanted, _ in both])
    rest = float(np.std([wanted - said for wanted, said in both]))
    return 1 - (rest / spread) ** 2 if spread else 0.0
