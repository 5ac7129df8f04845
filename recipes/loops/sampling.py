"""Answers of a step: which prompts, how they are sampled, and what the trainer gets of them."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from operator import attrgetter
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from recipes.config.sections import SamplingSection
from recipes.loops.conversation import Conversation
from recipes.loops.conversing import Begun, converse
from recipes.rewards import Answer, Scored
from recipes.setup.model_files import decode
from recipes.setup.preparation import Setup
from recipes.tasks import Problem, Task
from recipes.tasks.schedule import pick_problems
from recipes.tasks.scoring import to_answer
from recipes.tasks.split import hash_text
from rollout import Completion, Rollout, SamplingParams
from trainer_bridge import SequenceBatch
from trainer_bridge.learning import Tokens


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
        rendered: Prompt of each answer as the chat template writes it.
        weight_versions: Version of the weights that sampled each response token, if it is known.
        mask: Of conversations, whether the policy generated each response token; None: all.
        conversations: The conversations; None: the model answered once.
    """

    tasks: list[Task]
    problems: list[Problem]
    prompt_ids: list[list[int]]
    response_ids: list[list[int]]
    logprobs: Tokens
    texts: list[str]
    ended: list[bool]
    routed_experts: list[NDArray[Any] | None] | None = None
    rendered: list[str] | None = None
    weight_versions: Tokens | None = None
    mask: Tokens | None = None
    conversations: list[Conversation] | None = None

    @property
    def lengths(self) -> list[int]:
        """Return the number of tokens that the policy generated, of each answer."""
        if self.mask is None:
            return list(map(len, self.response_ids))
        return [sum(own) for own in self.mask]

    def learned(self, numbers: Tokens) -> Tokens:
        """Return the numbers of the tokens that the policy generated, from those of all."""
        return numbers if self.mask is None else numbers.where(self.mask)

    def whole(self, learned: Tokens) -> Tokens:
        """Return numbers of all response tokens; the inverse of `learned`, 0 elsewhere."""
        return learned if self.mask is None else learned.spread(self.mask)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Return the answers of all parts in their order."""
        columns: dict[str, Any] = {}
        for name in (field.name for field in fields(cls)):
            own = [getattr(part, name) for part in parts]
            if isinstance(own[0], Tokens):
                columns[name] = Tokens.joined(own)
            else:
                columns[name] = None if own[0] is None else list(chain.from_iterable(own))
        return cls(**columns)

    def select(self, indices: Sequence[int]) -> Self:
        """Return the answers with these indices."""
        columns: dict[str, Any] = {}
        for name in (field.name for field in fields(self)):
            column = getattr(self, name)
            if isinstance(column, Tokens):
                columns[name] = column.select(indices)
            else:
                columns[name] = None if column is None else [column[index] for index in indices]
        return replace(self, **columns)

    def answers(self) -> list[Answer]:
        """Return what reward functions get of each answer."""
        parts = self.tasks, self.problems, self.texts, self.ended, self.response_ids
        talks: Sequence[Any] = self.conversations or [None] * len(self.texts)
        earned = [talk.scores if talk else {} for talk in talks]
        return list(map(to_answer, *parts, self.rendered or [""] * len(self.texts), earned))

    def batch(self, temperature: float, **learning: Any) -> SequenceBatch:
        """Return the trainer's batch, with further fields of `SequenceBatch` in `learning`.

        The rows of a conversation become the parts of an answer.
        """
        fields: dict[str, Any] = {"mask": self.mask, **learning}
        if self.conversations is None:
            ids: dict[str, Any] = {"prompt_ids": self.prompt_ids, "response_ids": self.response_ids}
            return SequenceBatch(**ids, temperature=temperature, **fields)
        rows = [*chain.from_iterable(talk.rows for talk in self.conversations)]
        counts = [len(talk.rows) for talk in self.conversations]
        owners = np.repeat(np.arange(len(counts)), counts).tolist()
        lengths = np.array([len(row.response_ids) for row in rows], np.int64)
        for name, value in fields.items():
            if isinstance(value, Tokens):
                fields[name] = Tokens(value.values, lengths)
            elif value is not None:
                fields[name] = [value[owner] for owner in owners]
        return SequenceBatch(
            prompt_ids=[row.prompt_ids for row in rows],
            response_ids=[row.response_ids for row in rows],
            answers=owners,
            temperature=temperature,
            **fields,
        )


def generate_sequences(
    rollout: Rollout, setup: Setup, step: int, drawn: int, places: range, **how: Any
) -> Samples:
    """Sample answers to prompts of a step.

    Args:
        rollout: The engine, which must be awake.
        setup: The prepared recipe.
        step: Number of the step, which decides the sampling seeds.
        drawn: Number of prompts that the steps before have drawn.
        places: Places of the prompts among those that the step draws.
        **how: Further arguments of the engine's `generate`.

    Returns:
        The answers, in the order of the prompts.
    """
    recipe = setup.recipe
    apart, begin = recipe.prompts_per_step, drawn + places.start
    prompts = pick_problems(setup.tasks.trained, len(places), recipe.seed, begin, apart)
    seeds = [sampling_seed(recipe.seed, step, place) for place in places]
    temperature, samples = recipe.sampling.temperature, recipe.samples_per_prompt
    alike: dict[str, Any] = {"temperature": temperature, "samples": samples, **how}
    return answer(rollout, setup, prompts, seeds, **alike)


def rewarded(scores: Sequence[Scored]) -> list[int]:
    """Return the indices of the answers that have a reward, from which training learns."""
    return [index for index, score in enumerate(scores) if score.reward is not None]


def usable(samples: Samples, scores: Sequence[Scored], mask_cut_off: bool) -> list[int]:
    """Return the indices of the answers from which updates may learn.

    Each has a reward; with `mask_cut_off`, max_tokens did not cut it off.
    """
    return [index for index in rewarded(scores) if samples.ended[index] or not mask_cut_off]


def with_length_penalty(
    samples: Samples, scores: Sequence[Scored], section: SamplingSection
) -> list[Scored]:
    """Return the records with the length penalty in their rewards and figures.

    Over the last `section.penalized_tokens` tokens before max_tokens, the deduction grows linearly
    from 0 to `section.length_penalty`, which an answer that max_tokens ended gets in full.

    Source: Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale" (2025),
    equation 13 (soft overlong punishment); there the largest deduction is 1, as if length_penalty
    were 1. verl's `overlong_buffer` deducts the same with `penalty_factor` = length_penalty.
    """
    if not section.length_penalty:
        return list(scores)
    window = section.penalized_tokens
    free, penalized = section.max_tokens - window, list[Scored]()
    for score, length in zip(scores, samples.lengths, strict=True):
        if score.reward is not None:
            deduction = section.length_penalty * max(0, length - free) / window
            figures = {**score.figures, "sampling.length_penalty": deduction}
            score = replace(score, reward=score.reward - deduction, figures=figures)
        penalized.append(score)
    return penalized


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
    **how: Any,
) -> Samples:
    """Return the rollout's answers to prompts, `samples` to each, in the order of the prompts.

    `how` are further arguments of the rollout's `generate`.
    """
    if setup.conversations is not None:
        return _talked(rollout, setup, prompts, seeds, temperature, samples)
    prompt_ids = [problem.prompt_ids.tolist() for _, problem in prompts]
    rendered = decode(setup.tokenizer, prompt_ids)
    alike: dict[str, Any] = {
        "max_tokens": setup.recipe.sampling.max_tokens,
        "temperature": temperature,
        "n": samples,
        "adapter": setup.recipe.served_adapter,
    }
    params = [SamplingParams(**alike, seed=seed) for seed in seeds]
    flat: list[tuple[int, Completion]] = []
    for index, group in enumerate(rollout.generate(prompt_ids, params, **how)):
        flat += ((index, completion) for completion in group)
    ids = [list(completion.token_ids) for _, completion in flat]
    ended = [completion.finish_reason == "stop" for _, completion in flat]
    routed = [completion.routed_experts for _, completion in flat]
    logprobs = Tokens.of([completion.logprobs for _, completion in flat])
    _check_finite(logprobs, setup.recipe.model.dtype)
    bodies = [tokens[:-1] if stop else tokens for tokens, stop in zip(ids, ended, strict=True)]
    return Samples(
        tasks=[prompts[index][0] for index, _ in flat],
        problems=[prompts[index][1] for index, _ in flat],
        prompt_ids=[prompt_ids[index] for index, _ in flat],
        response_ids=ids,
        logprobs=logprobs,
        weight_versions=Tokens.of([answer.weight_versions for _, answer in flat], np.int64),
        texts=decode(setup.tokenizer, bodies),
        ended=ended,
        rendered=[rendered[index] for index, _ in flat],
        routed_experts=routed if setup.recipe.loop.router_replay else None,
    )


def _talked(
    rollout: Rollout,
    setup: Setup,
    prompts: Sequence[tuple[Task, Problem]],
    seeds: Sequence[int],
    temperature: float,
    samples: int,
) -> Samples:
    """Return conversations that begin with prompts, `samples` with each, as `answer` does."""
    begun = list[Begun]()
    for (task, problem), seed in zip(prompts, seeds, strict=True):
        begun += (Begun(task, problem, f"{seed}/{at}") for at in range(samples))
    talks = converse(rollout, setup, begun, temperature)
    prompt_ids = [talk.rows[0].prompt_ids for talk in talks]
    logprobs = _of_rows(talks, "logprobs")
    _check_finite(logprobs, setup.recipe.model.dtype)
    return Samples(
        tasks=[one.task for one in begun],
        problems=[one.problem for one in begun],
        prompt_ids=prompt_ids,
        response_ids=list(_of_rows(talks, "response_ids", np.int64)),
        logprobs=logprobs,
        weight_versions=_of_rows(talks, "weight_versions", np.int64),
        mask=_of_rows(talks, "learned", bool),
        texts=[talk.text for talk in talks],
        ended=[talk.ended for talk in talks],
        rendered=decode(setup.tokenizer, prompt_ids),
        conversations=talks,
    )


def _of_rows(talks: Sequence[Conversation], name: str, dtype: Any = None) -> Tokens:
    """Return a field of all rows by conversation, whose rows follow each other."""
    read = attrgetter(name)
    columns = [[*chain.from_iterable(map(read, talk.rows))] for talk in talks]
    return Tokens.of(columns, dtype)


def _check_finite(logprobs: Tokens, dtype: str) -> None:
    """Raise a FloatingPointError if a log-probability is not finite, so its token is arbitrary."""
    if not (wrong := len({*logprobs.answers_at(~np.isfinite(logprobs.values)).tolist()})):
        return
    remedy = "look for NaN and infinities in the model's weights"
    if dtype == "float16":
        remedy = "the model exceeds float16's 65,504; start a new run with model.dtype=bfloat16"
    rule = "have log-probabilities in the rollout that are not finite"
    raise FloatingPointError(f"{wrong} of {len(logprobs)} answers {rule}: {remedy}")
