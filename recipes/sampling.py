"""Answers of a step: which prompts, how they are sampled, and what the trainer gets of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from recipes.rewards import Answer
from recipes.setup.models import decode
from recipes.setup.preparation import Setup
from recipes.tasks import Problem, Score, Task
from recipes.tasks.schedule import pick_problems
from recipes.tasks.scoring import to_answer
from recipes.tasks.split import hash_text
from rollout import Completion, Rollout, SamplingParams
from trainer_bridge import SequenceBatch

PerToken = list[list[float]]
"""A list for each answer with a number for each of its tokens."""


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Answers of one step; answers to the same prompt are adjacent.

    Attributes:
        tasks: Set from which the prompt of each answer comes.
        problems: Problem of each answer.
        prompt_ids: Token ids of its prompt.
        response_ids: Token ids of the answer.
        logprobs: The rollout's log-probability of each response token.
        texts: Text of the answer, without the end token.
        ended: Whether the answer ended by the model's end token instead of max_tokens.
        routed_experts: With `router_replay`, as in `SequenceBatch`.
    """

    tasks: list[Task]
    problems: list[Problem]
    prompt_ids: list[list[int]]
    response_ids: list[list[int]]
    logprobs: list[list[float]]
    texts: list[str]
    ended: list[bool]
    routed_experts: list[NDArray[Any] | None] | None = None

    def answers(self) -> list[Answer]:
        """Return what reward functions get of each answer."""
        parts = self.tasks, self.problems, self.texts, self.ended, self.response_ids
        return list(map(to_answer, *parts))

    def batch(self, temperature: float, **learning: Any) -> SequenceBatch:
        """Return the trainer's batch, with further fields of `SequenceBatch` in `learning`."""
        ids: dict[str, Any] = {"prompt_ids": self.prompt_ids, "response_ids": self.response_ids}
        return SequenceBatch(**ids, temperature=temperature, **learning)


def generate_sequences(rollout: Rollout, setup: Setup, step: int) -> Samples:
    """Sample answers to the prompts of a step, whose number decides prompts and seeds.

    The rollout must be awake.
    """
    recipe = setup.recipe
    tasks, count = setup.tasks.trained, recipe.loop.prompts_per_step
    prompts = pick_problems(tasks, count, recipe.seed, step)
    seeds = [sampling_seed(recipe.seed, step, index) for index in range(len(prompts))]
    temperature, samples = recipe.sampling.temperature, recipe.loop.samples_per_prompt
    return answer(rollout, setup, prompts, seeds, temperature=temperature, samples=samples)


def scored(scores: Sequence[Score]) -> list[int]:
    """Return the indices of the answers that have a reward, from which training learns."""
    return [index for index, score in enumerate(scores) if score.reward is not None]


def taught(samples: Samples, scores: Sequence[Score], mask_cut_off: bool) -> list[int]:
    """Return the indices of the answers from which updates learn.

    Each has a reward; with `mask_cut_off`, max_tokens did not cut it off.
    """
    return [index for index in scored(scores) if samples.ended[index] or not mask_cut_off]


def sampling_seed(seed: int, step: int, index: int) -> int:
    """Return a seed below 2**63 for the samples of one prompt of one step."""
    return hash_text(f"{seed}/sampling/{step}/{index}") >> 1


def answer(
    rollout: Rollout,
    setup: Setup,
    prompts: Sequence[tuple[Task, Problem]],
    seeds: Sequence[int],
    *,
    temperature: float,
    samples: int,
) -> Samples:
    """Return the rollout's answers to prompts, `samples` to each, in the order of the prompts."""
    prompt_ids = [setup.prompt_ids(problem) for _, problem in prompts]
    most = setup.recipe.sampling.max_tokens
    params = [
        SamplingParams(max_tokens=most, temperature=temperature, n=samples, seed=seed)
        for seed in seeds
    ]
    groups = rollout.generate(prompt_ids, params)
    flat: list[tuple[int, Completion]] = []
    for index, group in enumerate(groups):
        flat += ((index, completion) for completion in group)
    ids = [list(completion.token_ids) for _, completion in flat]
    ended = [completion.finish_reason == "stop" for _, completion in flat]
    routed = [completion.routed_experts for _, completion in flat]
    bodies = [tokens[:-1] if stop else tokens for tokens, stop in zip(ids, ended, strict=True)]
    return Samples(
        tasks=[prompts[index][0] for index, _ in flat],
        problems=[prompts[index][1] for index, _ in flat],
        prompt_ids=[prompt_ids[index] for index, _ in flat],
        response_ids=ids,
        logprobs=[list(completion.logprobs) for _, completion in flat],
        texts=decode(setup.tokenizer, bodies),
        ended=ended,
        routed_experts=routed if setup.recipe.loop.router_replay else None,
    )
