"""Prompts, answers and their scores: what both algorithms do with the rollout.

Prompts and sampling seeds are functions of (recipe.seed, step), so that a resumed run repeats what
would have been.
"""

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

from numpy.typing import NDArray

from memsaver.ops.hash import hash_text
from recipes.setup.models import decode
from recipes.setup.preparation import Setup
from recipes.tasks import Problem, Score, Task, score_answer
from rollout import Completion, Rollout, SamplingParams
from trainer_bridge import SequenceBatch


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
