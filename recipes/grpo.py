"""GRPO over the wake-up cycle, to be read in one sitting.

Step s (version s of the weights, s - 1 updates done):

    to_rollout(s)        trainer parks, rollout wakes in stages, weights are synced
    generate_sequences   samples_per_prompt answers to each of prompts_per_step prompts
    to_score()           rollout sleeps, trainer restores its parameters
    compute_reward       the task's score of every answer
    compute_log_prob     by the trainer, at the weights that sampled: the gap to the rollout's own is reported
    to_train()           trainer restores its optimizer
    compute_advantages   reward against the other answers to the same prompt
    update_actor         one clipped policy-gradient update

Prompts and sampling seeds are functions of (recipe.seed, step), so that a resumed run repeats what would have been.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from memsaver.ops.hash import hash_text
from recipes.models import decode
from recipes.monitor import Monitor
from recipes.preparation import Setup
from recipes.tasks import Problem, Score, Task
from rollout import Rollout, SamplingParams
from trainer_bridge import Cycle, SequenceBatch


class TrainerSide(Protocol):
    """What the loop asks of the trainer or its actor."""

    def compute_log_prob(self, batch: SequenceBatch) -> list[list[float]]: ...

    def update_actor(self, batch: SequenceBatch) -> dict[str, float]: ...


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Answers of one step, those to one prompt adjacent; `logprobs` are the rollout's, one a token."""

    problems: list[Problem]
    prompt_ids: list[list[int]]
    response_ids: list[list[int]]
    logprobs: list[list[float]]
    texts: list[str]
    ended: list[bool]  # by the model's end token, not by max_tokens

    def batch(self, temperature: float, **learning: Any) -> SequenceBatch:
        """For the trainer; `learning`: old_logprobs and advantages."""
        ids: dict[str, Any] = {"prompt_ids": self.prompt_ids, "response_ids": self.response_ids}
        return SequenceBatch(**ids, temperature=temperature, **learning)


def generate_sequences(rollout: Rollout, setup: Setup, step: int) -> Samples:
    """Samples answers to the prompts of this step."""
    recipe = setup.recipe
    problems = pick_problems(setup.task.train, recipe.grpo.prompts_per_step, recipe.seed, step)
    params = [
        SamplingParams(
            max_tokens=recipe.sampling.max_tokens,
            temperature=recipe.sampling.temperature,
            top_k=recipe.sampling.top_k,
            top_p=recipe.sampling.top_p,
            n=recipe.grpo.samples_per_prompt,
            seed=sampling_seed(recipe.seed, step, index),
        )
        for index in range(len(problems))
    ]
    return _answers(rollout, setup, problems, params)


def evaluate(rollout: Rollout, setup: Setup) -> dict[str, Any]:
    """Greedy answers to held-out problems, and to those beside the trained task; the fractions that match exactly."""
    limit, task = setup.recipe.eval.problems, setup.task
    row = {"exact_match": _exact_match(rollout, setup, task.held_out[:limit])}
    for name, problems in task.beside.items():
        row[f"exact_match_{name}"] = _exact_match(rollout, setup, problems[:limit])
    return {**row, "problems": len(task.held_out[:limit])}


def _exact_match(rollout: Rollout, setup: Setup, problems: Sequence[Problem]) -> float:
    greedy = SamplingParams(max_tokens=setup.recipe.sampling.max_tokens, temperature=0.0)
    scores = compute_reward(setup.task, _answers(rollout, setup, list(problems), [greedy] * len(problems)))
    return sum(score.exact for score in scores) / len(scores)


def compute_reward(task: Task, samples: Samples) -> list[Score]:
    """The task's score of every answer."""
    triples = zip(samples.problems, samples.texts, samples.ended, strict=True)
    return [task.score(problem, text, ended) for problem, text, ended in triples]


def compute_log_prob(trainer: TrainerSide, samples: Samples, temperature: float) -> list[list[float]]:
    """Log-probabilities of the sampled tokens under the trainer's weights, one a token."""
    return trainer.compute_log_prob(samples.batch(temperature))


def compute_advantages(rewards: Sequence[float], group_size: int, normalize_std: bool) -> list[float]:
    """Each reward against the mean of its group of `group_size` neighbours, over the group's standard deviation.

    A group of equal rewards has nothing to compare and gets zeros.
    """
    advantages: list[float] = []
    for start in range(0, len(rewards), group_size):
        group = rewards[start : start + group_size]
        mean, spread = statistics.fmean(group), statistics.pstdev(group)
        scale = spread if normalize_std and spread > 0 else 1.0
        advantages += [(reward - mean) / scale for reward in group]
    return advantages


def update_actor(
    trainer: TrainerSide, samples: Samples, old_logprobs: list[list[float]], advantages: list[float], temperature: float
) -> dict[str, float]:
    """One optimizer step over the whole batch; the trainer's own figures (loss, gradient norm, ...)."""
    return trainer.update_actor(samples.batch(temperature, old_logprobs=old_logprobs, advantages=advantages))


@dataclass(frozen=True, kw_only=True)
class Loop:
    """The loop's partners."""

    setup: Setup
    trainer: TrainerSide
    rollout: Rollout
    cycle: Cycle
    monitor: Monitor

    def run(self, first_step: int, save: Any) -> None:
        """Steps `first_step` to the last, then the last evaluation. `save(step)` writes a checkpoint."""
        recipe = self.setup.recipe
        for step in range(first_step, recipe.steps + 1):
            with self.monitor.step(step):
                self.train_step(step)
                every = recipe.checkpoint.every
                if every and (step % every == 0 or step == recipe.steps):
                    with self.monitor.stage("save_checkpoint"):
                        save(step)
        if recipe.eval.every:
            self._to_rollout(recipe.steps + 1)
            self._evaluate(recipe.steps)
            with self.monitor.phase("to_train"):
                self.cycle.to_train()
            self.monitor.read_memory("train")

    def train_step(self, step: int) -> None:
        setup, monitor, started = self.setup, self.monitor, time.time()
        temperature = setup.recipe.sampling.temperature
        self._to_rollout(step)
        if setup.recipe.eval.every and (step - 1) % setup.recipe.eval.every == 0:
            self._evaluate(step - 1)
        with monitor.stage("generate_sequences"):
            samples = generate_sequences(self.rollout, setup, step)
        with monitor.phase("to_score"):
            self.cycle.to_score()
        with monitor.stage("compute_reward"):
            scores = compute_reward(setup.task, samples)
        with monitor.stage("compute_log_prob"):
            old_logprobs = compute_log_prob(self.trainer, samples, temperature)
        with monitor.phase("to_train"):
            self.cycle.to_train()
        monitor.read_memory("train")
        with monitor.stage("compute_advantages"):
            grpo = setup.recipe.grpo
            rewards = [score.reward for score in scores]
            advantages = compute_advantages(rewards, grpo.samples_per_prompt, grpo.normalize_std)
        with monitor.stage("update_actor"):
            learned = update_actor(self.trainer, samples, old_logprobs, advantages, temperature)
        row = step_row(samples, scores, old_logprobs, monitor.seconds)
        seconds = {"step_seconds": time.time() - started, "stages": dict(monitor.seconds), "sync": monitor.sync}
        monitor.row({"kind": "train", "step": step, **learned, **row, **seconds, "memory": dict(monitor.memory)})

    def _to_rollout(self, version: int) -> None:
        with self.monitor.phase("to_rollout"):
            self.monitor.synced(self.cycle.to_rollout(version))
        self.monitor.read_memory("rollout")

    def _evaluate(self, updates: int) -> None:
        with self.monitor.stage("evaluate"):
            result = evaluate(self.rollout, self.setup)
        self.monitor.row({"kind": "eval", "step": updates, **result})


def step_row(
    samples: Samples, scores: Sequence[Score], old_logprobs: list[list[float]], seconds: dict[str, float]
) -> dict[str, Any]:
    """The figures of one step, for metrics.jsonl."""
    mean, largest = logprob_gap(samples.logprobs, old_logprobs)
    lengths = [len(ids) for ids in samples.response_ids]
    return {
        "reward": statistics.fmean(score.reward for score in scores),
        "exact_match": statistics.fmean(score.exact for score in scores),
        "gap_mean": mean,
        "gap_max": largest,
        "response_length": statistics.fmean(lengths),
        "ended": statistics.fmean(samples.ended),
        "tokens": sum(lengths),
        "tokens_per_second": sum(lengths) / max(seconds["generate_sequences"], 1e-9),
    }


def logprob_gap(rollout: list[list[float]], trainer: list[list[float]]) -> tuple[float, float]:
    """Mean and largest absolute difference over all tokens."""
    pairs = [pair for one, other in zip(rollout, trainer, strict=True) for pair in zip(one, other, strict=True)]
    gaps = [abs(one - other) for one, other in pairs]
    return math.fsum(gaps) / len(gaps), max(gaps)


def pick_problems(problems: Sequence[Problem], count: int, seed: int, step: int) -> list[Problem]:
    """`count` different problems for this step."""
    return random.Random(f"{seed}/prompts/{step}").sample(list(problems), count)


def sampling_seed(seed: int, step: int, index: int) -> int:
    """A seed below 2**63 for the samples of one prompt of one step."""
    return hash_text(f"{seed}/sampling/{step}/{index}") >> 1


def _answers(rollout: Rollout, setup: Setup, problems: list[Problem], params: list[SamplingParams]) -> Samples:
    prompts = [setup.prompt_ids(problem) for problem in problems]
    groups = rollout.generate(prompts, params)
    flat = [(index, completion) for index, group in enumerate(groups) for completion in group]
    ids = [list(completion.token_ids) for _, completion in flat]
    ended = [completion.finish_reason == "stop" for _, completion in flat]
    shown = [tokens[:-1] if stop else tokens for tokens, stop in zip(ids, ended, strict=True)]
    return Samples(
        problems=[problems[index] for index, _ in flat],
        prompt_ids=[prompts[index] for index, _ in flat],
        response_ids=ids,
        logprobs=[list(completion.logprobs) for _, completion in flat],
        texts=decode(setup.tokenizer, shown),
        ended=ended,
    )
