"""Defines what both algorithms share: the run around their steps, scores, figures of a step."""

import abc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from recipes.config.recipe import Recipe
from recipes.generation import Samples, compute_reward, evaluate, generate_sequences
from recipes.logs.monitor import Monitor
from recipes.setup.preparation import Setup
from recipes.stopping import Stopping
from recipes.tasks import Score
from rollout import Rollout
from trainer_bridge import Cycle
from trainer_bridge.cycle import TrainerProtocol
from trainer_bridge.tags import PARAMS, REFERENCE

PerToken = list[list[float]]
"""One number a response token, by answer."""


@dataclass(frozen=True, kw_only=True)
class Loop(abc.ABC):
    """The loop's partners. An algorithm says what a step is."""

    setup: Setup
    trainer: TrainerProtocol
    rollout: Rollout
    cycle: Cycle
    monitor: Monitor

    @staticmethod
    @abc.abstractmethod
    def trainer_fields(recipe: Recipe) -> dict[str, Any]:
        """Return the fields of `TrainerConfig` that the algorithm decides."""

    @abc.abstractmethod
    def train_step(self, step: int) -> dict[str, Any]:
        """Take one step, from state "train" to state "train"; return the step's figures."""

    def run(self, first_step: int, save: Callable[[int], None]) -> None:
        """Step `first_step` to the last, then the last evaluation. `save(step)` checkpoints, also
        where the run is asked to stop, unless it makes no checkpoints.
        """
        recipe, every = self.setup.recipe, self.setup.recipe.checkpoint.every
        with Stopping(self.monitor.view.note if every else None) as stopping:
            for step in range(first_step, recipe.steps + 1):
                with self.monitor.step(step):
                    self._one(step)
                    due = every and (step % every == 0 or step == recipe.steps)
                    if due or stopping.asked:
                        with self.stage("save_checkpoint"):
                            save(step)
                        stopping.leave()
        if recipe.eval.every:
            self.monitor.folder.place = "in the last evaluation"
            self._wake_rollout(recipe.steps + 1)
            self._evaluate(recipe.steps)
            self.to_train()

    def _one(self, step: int) -> None:
        started, monitor = time.time(), self.monitor
        row = {"kind": "train", "step": step, **self.train_step(step)}
        row |= {"step_seconds": time.time() - started, "stages": dict(monitor.seconds)}
        row |= {"hidden_seconds": monitor.hidden_seconds}
        row |= {"sync": monitor.sync, "memory": dict(monitor.memory), "peaks": monitor.peaks.take()}
        monitor.row(row)

    def stage(self, name: str) -> AbstractContextManager[None]:
        return self.monitor.stage(name)

    @property
    def temperature(self) -> float:
        return self.setup.recipe.sampling.temperature

    def to_rollout(self, step: int) -> None:
        """Wake the rollout, and runs the evaluation that is due before the step."""
        self._wake_rollout(step)
        if self.setup.recipe.eval.every and (step - 1) % self.setup.recipe.eval.every == 0:
            self._evaluate(step - 1)

    def sample(self, step: int) -> Samples:
        """Return answers to this step's prompts, by a rollout that has the step's weights."""
        self.to_rollout(step)
        with self.monitor.phase("prefetch"):
            self.cycle.prefetch()
        with self.stage("generate_sequences"):
            return generate_sequences(self.rollout, self.setup, step)

    def to_score(self, model: str = PARAMS) -> None:
        with self.monitor.phase("to_score"):
            self.cycle.to_score(model)

    def score_by_reference(self, samples: Samples) -> PerToken | None:
        """Return the samples' log-probabilities under the reference; None without `kl_coef`."""
        if not self.setup.recipe.loop.kl_coef:
            return None
        # With adapters the reference is their base, which is the policy's own.
        self.to_score(PARAMS if self.setup.recipe.lora.rank else REFERENCE)
        with self.stage("compute_ref_log_prob"):
            return self.trainer.compute_ref_log_prob(samples.batch(self.temperature))

    def score(self, samples: Samples) -> tuple[PerToken, list[Score]]:
        """Return log-probabilities under the trainer's weights, and the task's scores."""
        self.to_score()
        with self.stage("compute_log_prob"):
            logprobs = self._compute_log_prob(samples, samples.routed_experts)
        with self.stage("compute_reward"):
            return logprobs, compute_reward(self.setup.task, samples)

    def _compute_log_prob(self, samples: Samples, routed: Any) -> PerToken:
        batch = samples.batch(self.temperature, routed_experts=routed)
        return self.trainer.compute_log_prob(batch)

    def unreplayed_mismatch(self, step: int, samples: Samples) -> dict[str, float]:
        """Return the mismatch where the trainer routes for itself, in the first step and those
        before which an evaluation was due; nothing without `router_replay`.
        """
        every = self.setup.recipe.eval.every
        if samples.routed_experts is None or (step - 1) % (every or self.setup.recipe.steps):
            return {}
        with self.stage("compute_log_prob_unreplayed"):
            logprobs = self._compute_log_prob(samples, None)
        mean, largest = logprob_mismatch(samples.logprobs, logprobs)
        return {"mismatch_mean_unreplayed": mean, "mismatch_max_unreplayed": largest}

    def to_train(self) -> None:
        with self.monitor.phase("to_train"):
            self.cycle.to_train()
        self.monitor.read_memory("train")

    def _wake_rollout(self, version: int) -> None:
        with self.monitor.phase("to_rollout"):
            self.monitor.synced(self.cycle.to_rollout(version))
        self.monitor.read_memory("rollout")

    def _evaluate(self, updates: int) -> None:
        with self.stage("evaluate"):
            result = evaluate(self.rollout, self.setup)
        self.monitor.row({"kind": "eval", "step": updates, **result})


def spread_of(numbers: Sequence[float]) -> float:
    """Return the population standard deviation, or 0 where the numbers differ by rounding only.

    Divided by such a deviation, noise would become a full advantage. Rounding is a deviation of at
    most 1e-12 of the largest number (sums in fp64), or of at most 1e-7 both in itself and of the
    largest number (scores of about 1 that were computed in fp32). All other differences count,
    however small or large the numbers are.
    """
    spread, largest = float(np.std(numbers)), max(map(abs, numbers))
    return spread if spread > max(1e-12 * largest, 1e-7 * min(1.0, largest)) else 0.0


def step_row(
    samples: Samples,
    scores: Sequence[Score],
    logprobs: PerToken,
    ref_logprobs: PerToken | None,
    seconds: dict[str, float],
) -> dict[str, Any]:
    """Return the figures of one step, for metrics.jsonl."""
    mean, largest = logprob_mismatch(samples.logprobs, logprobs)
    lengths = [len(ids) for ids in samples.response_ids]
    rewards = [score.reward for score in scores]
    row = {
        "reward": statistics.fmean(rewards),
        "reward_std": statistics.pstdev(rewards),
        "exact_match": statistics.fmean(score.exact for score in scores),
        "mismatch_mean": mean,
        "mismatch_max": largest,
        "response_length": statistics.fmean(lengths),
        "ended": statistics.fmean(samples.ended),
        "tokens": sum(lengths),
        "tokens_per_second": sum(lengths) / max(seconds["generate_sequences"], 1e-9),
    }
    if ref_logprobs is not None:
        row["kl_to_reference"] = kl_to_reference(logprobs, ref_logprobs)
    return row


def logprob_mismatch(rollout: PerToken, trainer: PerToken) -> tuple[float, float]:
    """Return mean and largest absolute difference over all tokens."""
    mismatches = [abs(one - other) for one, other in pairs(rollout, trainer)]
    return math.fsum(mismatches) / len(mismatches), max(mismatches)


def kl_to_reference(logprobs: PerToken, ref_logprobs: PerToken) -> float:
    """Return nats a token: the mean of r - 1 - log(r), r = exp(reference - policy)."""
    ratios = [reference - policy for policy, reference in pairs(logprobs, ref_logprobs)]
    return math.fsum(math.expm1(ratio) - ratio for ratio in ratios) / len(ratios)


def pairs(one: PerToken, other: PerToken) -> list[tuple[float, float]]:
    """Return both numbers of every token, answer by answer."""
    rows = zip(one, other, strict=True)
    return list(chain.from_iterable(zip(*row, strict=True) for row in rows))
