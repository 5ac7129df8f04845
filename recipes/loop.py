"""The loop that GRPO and PPO share: the run around their steps, what they do with the rollout, and
the figures of a step.

Prompts and sampling seeds are functions of (recipe.seed, step), so that a resumed run repeats what
would have been.
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


_TEXT = "asked to stop: ends after this step, with a checkpoint; asked again, it ends immediately"


class Stopping:
    """Context manager: inside, the first SIGINT or SIGTERM is noted, and does what it did before
    when `leave` is called; a further one does so immediately.

    Python handles signals in the main thread only: off it nothing is changed.
    """

    def __init__(self, tell: Callable[[str], None] | None) -> None:
        """tell: shows a line to the user; None changes nothing either."""
        self.asked: int | None = None  # the signal that was noted
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
        """Have the signal that was noted, if any, do what it did before."""
        if self.asked is not None:
            self._act(self.asked)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked is not None:
            self._act(number)
        self.asked = number
        # In a thread, as this one may be in the middle of printing.
        threading.Thread(target=self._tell, args=(_TEXT,), daemon=True).start()

    def _act(self, number: int) -> None:
        signal.signal(number, self._before[number])
        signal.raise_signal(number)


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Answers of one step, those to one prompt adjacent; `logprobs`: the rollout's, one a token."""

    problems: list[Problem]
    prompt_ids: list[list[int]]
    response_ids: list[list[int]]
    logprobs: list[list[float]]
    texts: list[str]
    ended: list[bool]  # by the model's end token, not by max_tokens
    # with `router_replay`, as `SequenceBatch` has them
    routed_experts: list[NDArray[Any] | None] | None = None

    def batch(self, temperature: float, **learning: Any) -> SequenceBatch:
        """Return the trainer's batch; `learning`: fields of `SequenceBatch` besides the tokens."""
        ids: dict[str, Any] = {"prompt_ids": self.prompt_ids, "response_ids": self.response_ids}
        return SequenceBatch(**ids, temperature=temperature, **learning)


def generate_sequences(rollout: Rollout, setup: Setup, step: int) -> Samples:
    """Sample answers to the prompts of this step."""
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
    """Return the fractions of greedy answers to held-out problems that match exactly, by kind."""
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
    """Return the task's score of every answer. Raises ScorerError, which names the answer."""
    triples = zip(samples.problems, samples.texts, samples.ended, strict=True)
    return [score_answer(task, problem, text, ended) for problem, text, ended in triples]


def pick_problems(
    kinds: Sequence[Sequence[Problem]], count: int, seed: int, step: int
) -> list[Problem]:
    """Return the `count` different problems of a step, which counts from 1.

    All steps together take the kinds in turn, and of each kind one permutation after the other: a
    problem comes again when all others of its kind have come.
    """
    most = -(-count // len(kinds))
    picked: list[Problem] = []
    for number in range((step - 1) * count, step * count):
        position, kind = divmod(number, len(kinds))
        turn, place = divmod(position, len(kinds[kind]))
        order = _permutation(len(kinds[kind]), most, f"{seed}/prompts/{kind}", turn)
        picked.append(kinds[kind][order[place]])
    return picked


@lru_cache(maxsize=16)
def _permutation(size: int, apart: int, seed: str, turn: int) -> Sequence[int]:
    """Return the permutation of one pass, a function of its arguments.

    An index comes again after `apart` places at the earliest, so that no step has a problem twice:
    passes shuffle within blocks that are the same for all of them.
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
    shown = [tokens[:-1] if stop else tokens for tokens, stop in zip(ids, ended, strict=True)]
    return Samples(
        problems=[problems[index] for index, _ in flat],
        prompt_ids=[prompts[index] for index, _ in flat],
        response_ids=ids,
        logprobs=[list(completion.logprobs) for _, completion in flat],
        texts=decode(setup.tokenizer, shown),
        ended=ended,
        routed_experts=routed if setup.recipe.loop.router_replay else None,
    )


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
