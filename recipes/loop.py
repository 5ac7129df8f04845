"""Loop that GRPO and PPO share: steps, evaluations, checkpoints and the figures of a step.

Prompts and sampling seeds are functions of (recipe.seed, step), so a resumed run takes the same
prompts and seeds as an uninterrupted one.
"""

from __future__ import annotations

import abc
import math
import random
import signal
import statistics
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from types import FrameType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from memsaver.ops.hash import hash_text
from recipes.config.recipe import Recipe
from recipes.logs.monitor import Monitor
from recipes.setup.models import decode
from recipes.setup.preparation import Setup
from recipes.tasks import Problem, Score, Task, score_answer
from rollout import Completion, Rollout, SamplingParams
from trainer_bridge import Cycle, SequenceBatch
from trainer_bridge.cycle import TrainerProtocol
from trainer_bridge.tags import PARAMS, REFERENCE

PerToken = list[list[float]]
"""A list for each answer with a number for each of its tokens."""


@dataclass(frozen=True, kw_only=True)
class Loop(abc.ABC):
    """The loop of a run. A subclass defines the step of its algorithm.

    Attributes:
        setup: The prepared recipe.
        trainer: The trainer, or a handle of its actors.
        rollout: The engine, or a handle of its actors.
        cycle: The hand-over between the two.
        monitor: Times the stages and records rows.
    """

    setup: Setup
    trainer: TrainerProtocol
    rollout: Rollout
    cycle: Cycle
    monitor: Monitor

    @staticmethod
    @abc.abstractmethod
    def trainer_fields(recipe: Recipe) -> dict[str, Any]:
        """Return the fields of `TrainerConfig` that depend on the algorithm."""

    @abc.abstractmethod
    def train_step(self, step: int) -> dict[str, Any]:
        """Run one step, which begins and ends in the cycle's state "train"; return its figures."""

    def run(
        self, first_step: int, save: Callable[[int], None], export: Callable[[int], None]
    ) -> None:
        """Run all steps from `first_step` on (a new run begins with 1), then the last evaluation.

        `save` saves the checkpoint of a step. It is called when a checkpoint is due, and when the
        run is asked to stop, but never with `checkpoint.every` 0. `export` exports the model of a
        step, after its checkpoint.
        """
        recipe, every = self.setup.recipe, self.setup.recipe.checkpoint.every
        with Stopping(self.monitor.view.note if every else None) as stopping:
            for step in range(first_step, recipe.steps + 1):
                with self.monitor.step(step):
                    self._run_step(step)
                    due = every and (step % every == 0 or step == recipe.steps)
                    if due or stopping.asked:
                        with self.stage("save_checkpoint"):
                            save(step)
                        stopping.leave()
                    if self._exports(step):
                        with self.stage("export"):
                            export(step)
        if recipe.eval.every:
            self.monitor.folder.place = "in the last evaluation"
            self._wake_rollout(recipe.steps + 1)
            self._evaluate(recipe.steps)
            self.to_train()

    def _exports(self, step: int) -> bool:
        recipe, every = self.setup.recipe, self.setup.recipe.checkpoint.export_every
        return every is not None and (step == recipe.steps or bool(every and step % every == 0))

    def _run_step(self, step: int) -> None:
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
        """Wake the rollout and run the evaluation that is due before the step."""
        self._wake_rollout(step)
        if self.setup.recipe.eval.every and (step - 1) % self.setup.recipe.eval.every == 0:
            self._evaluate(step - 1)

    def sample(self, step: int) -> Samples:
        """Sync the step's weights to the rollout and return its answers to the step's prompts."""
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
        # With adapters, the reference is their frozen base, which the policy has on the device.
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
        """Return the log-prob mismatch without router replay.

        It is measured in the first step and after each evaluation, and only with `router_replay`.
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


_TEXT = (
    "asked to stop: the run ends after this step, with a checkpoint; "
    "a second signal ends it immediately"
)


class Stopping:
    """Context manager that defers the first SIGINT or SIGTERM until `leave` is called.

    `tell` shows a line to the user; without it, no signal is deferred. A second signal takes effect
    immediately. Python handles signals in the main thread only, so in another thread this changes
    nothing.
    """

    def __init__(self, tell: Callable[[str], None] | None) -> None:
        self.asked: int | None = None  # the deferred signal
        self._tell = tell
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if self._tell and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def leave(self) -> None:
        """Raise the deferred signal, if any, under its previous handler."""
        if self.asked is not None:
            self._act(self.asked)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked is not None:
            self._act(number)
        self.asked = number
        # In a thread, because the main thread may be printing at this moment.
        threading.Thread(target=self._tell, args=(_TEXT,), daemon=True).start()

    def _act(self, number: int) -> None:
        signal.signal(number, self._before[number])
        signal.raise_signal(number)


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Answers of one step; answers to the same prompt are adjacent.

    Attributes:
        problems: Problem of each answer.
        prompt_ids: Token ids of its prompt.
        response_ids: Token ids of the answer.
        logprobs: The rollout's log-probability of each response token.
        texts: Text of the answer, without the end token.
        ended: Whether the answer ended by the model's end token instead of max_tokens.
        routed_experts: With `router_replay`, as in `SequenceBatch`.
    """

    problems: list[Problem]
    prompt_ids: list[list[int]]
    response_ids: list[list[int]]
    logprobs: list[list[float]]
    texts: list[str]
    ended: list[bool]
    routed_experts: list[NDArray[Any] | None] | None = None

    def batch(self, temperature: float, **learning: Any) -> SequenceBatch:
        """Return the trainer's batch, with further fields of `SequenceBatch` in `learning`."""
        ids: dict[str, Any] = {"prompt_ids": self.prompt_ids, "response_ids": self.response_ids}
        return SequenceBatch(**ids, temperature=temperature, **learning)


def generate_sequences(rollout: Rollout, setup: Setup, step: int) -> Samples:
    """Sample answers to the prompts of a step, whose number decides prompts and seeds.

    The rollout must be awake.
    """
    recipe = setup.recipe
    problems = pick_problems(setup.task.kinds, recipe.loop.prompts_per_step, recipe.seed, step)
    params = [
        SamplingParams(
            max_tokens=recipe.sampling.max_tokens,
            temperature=recipe.sampling.temperature,
            n=recipe.loop.samples_per_prompt,
            seed=sampling_seed(recipe.seed, step, index),
        )
        for index in range(len(problems))
    ]
    return _answers(rollout, setup, problems, params)


def evaluate(rollout: Rollout, setup: Setup) -> dict[str, Any]:
    """Return the share of exact matches among greedy answers to held-out problems, by kind."""
    limit, task = setup.recipe.eval.problems, setup.task
    row = {"exact_match": _exact_match(rollout, setup, task.held_out[:limit])}
    for name, problems in task.beside.items():
        row[f"exact_match_{name}"] = _exact_match(rollout, setup, problems[:limit])
    kinds = {"also_trained": list(task.also_train)} if task.beside else {}
    return {**row, "problems": len(task.held_out[:limit]), **kinds}


def _exact_match(rollout: Rollout, setup: Setup, problems: Sequence[Problem]) -> float:
    greedy = SamplingParams(max_tokens=setup.recipe.sampling.max_tokens, temperature=0.0)
    scores = compute_reward(
        setup.task, _answers(rollout, setup, list(problems), [greedy] * len(problems))
    )
    return sum(score.exact for score in scores) / len(scores)


def compute_reward(task: Task, samples: Samples) -> list[Score]:
    """Return the task's score of every answer.

    Raises:
        ScorerError: The scorer failed; the message names the answer.
    """
    triples = zip(samples.problems, samples.texts, samples.ended, strict=True)
    return [score_answer(task, problem, text, ended) for problem, text, ended in triples]


def pick_problems(
    kinds: Sequence[Sequence[Problem]], count: int, seed: int, step: int
) -> list[Problem]:
    """Return the `count` distinct problems of a step, where steps count from 1.

    Over all steps, the kinds alternate, and each kind runs through one permutation after another.
    So a problem returns only after all problems of its kind have been taken.
    """
    per_kind = -(-count // len(kinds))
    picked: list[Problem] = []
    for number in range((step - 1) * count, step * count):
        position, kind = divmod(number, len(kinds))
        turn, place = divmod(position, len(kinds[kind]))
        order = _permutation(len(kinds[kind]), per_kind, f"{seed}/prompts/{kind}", turn)
        picked.append(kinds[kind][order[place]])
    return picked


@lru_cache(maxsize=16)
def _permutation(size: int, apart: int, seed: str, turn: int) -> Sequence[int]:
    """Return the permutation of one pass, a function of its arguments.

    Passes shuffle within blocks that are the same for all passes. So an index returns after
    `apart` places at the earliest, and no step has a problem twice.
    """
    order = list(range(size))
    random.Random(seed).shuffle(order)
    block = size - apart + 1
    parts = [order[start : start + block] for start in range(0, size, block)]
    for part in parts:
        random.Random(f"{seed}/{turn}/{part[0]}").shuffle(part)
    return array("q", chain.from_iterable(parts))


def sampling_seed(seed: int, step: int, index: int) -> int:
    """Return a seed below 2**63 for the samples of one prompt of one step."""
    return hash_text(f"{seed}/sampling/{step}/{index}") >> 1


def _answers(
    rollout: Rollout, setup: Setup, problems: list[Problem], params: list[SamplingParams]
) -> Samples:
    prompts = [setup.prompt_ids(problem) for problem in problems]
    groups = rollout.generate(prompts, params)
    flat: list[tuple[int, Completion]] = []
    for index, group in enumerate(groups):
        flat += ((index, completion) for completion in group)
    ids = [list(completion.token_ids) for _, completion in flat]
    ended = [completion.finish_reason == "stop" for _, completion in flat]
    routed = [completion.routed_experts for _, completion in flat]
    bodies = [tokens[:-1] if stop else tokens for tokens, stop in zip(ids, ended, strict=True)]
    return Samples(
        problems=[problems[index] for index, _ in flat],
        prompt_ids=[prompts[index] for index, _ in flat],
        response_ids=ids,
        logprobs=[list(completion.logprobs) for _, completion in flat],
        texts=decode(setup.tokenizer, bodies),
        ended=ended,
        routed_experts=routed if setup.recipe.loop.router_replay else None,
    )


def spread_of(numbers: Sequence[float]) -> float:
    """Return the population standard deviation, or 0 if the numbers differ by rounding only.

    Dividing by the deviation of rounding errors would turn noise into a full advantage. A deviation
    counts as rounding if it is at most 1e-12 of the largest number (sums in fp64), or at most 1e-7
    both absolutely and relative to the largest number (scores of about 1, computed in fp32). All
    other differences count, however small or large the numbers are.
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
    """Return the mean and the largest absolute difference over all tokens, in nats."""
    mismatches = [abs(sampled - scored) for sampled, scored in pairs(rollout, trainer)]
    return math.fsum(mismatches) / len(mismatches), max(mismatches)


def kl_to_reference(logprobs: PerToken, ref_logprobs: PerToken) -> float:
    """Return the mean of r - 1 - log(r) over all tokens, in nats, with r = exp(reference - policy).

    This is the estimator k3 of Schulman, "Approximating KL Divergence" (2020).
    """
    log_ratios = [reference - policy for policy, reference in pairs(logprobs, ref_logprobs)]
    return math.fsum(math.expm1(ratio) - ratio for ratio in log_ratios) / len(log_ratios)


def pairs(first: PerToken, second: PerToken) -> list[tuple[float, float]]:
    """Return the two numbers of every token, answer by answer."""
    rows = zip(first, second, strict=True)
    return list(chain.from_iterable(zip(*row, strict=True) for row in rows))
