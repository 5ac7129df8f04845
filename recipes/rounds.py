"""Dynamic sampling: new prompts replace the groups of a step without signal.

The answers to one prompt are a group. It has signal if two of its rewards differ; otherwise all of
its advantages are 0. Each further generation of a step takes as many new prompts as groups with
signal are missing, so no such group is left over.

Source: Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale" (2025),
equation 11. It judges groups by right and wrong answers, verl (`filter_groups`) by rewards before
penalties or by another figure; here the rewards that training uses decide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress

from recipes.loop import Loop, Scoring, require_reward
from recipes.sampling import Samples
from recipes.tasks import Score


@dataclass(kw_only=True)
class Rounds:
    """Generations of one step, whose owner iterates over them and extends `signal` after each.

    Attributes:
        wanted: Groups with signal that the step needs.
        most: Most generations.
        used: Generations so far.
        signal: Whether each group so far has signal, in the order of the prompts.
    """

    wanted: int
    most: int
    used: int = 0
    signal: list[bool] = field(default_factory=list)

    def __iter__(self) -> Iterator[range]:
        """Yield the places of each generation's prompts among those of the step."""
        while self.used < self.most and (missing := self.wanted - sum(self.signal)):
            self.used += 1
            yield range(len(self.signal), len(self.signal) + missing)

    @property
    def is_last(self) -> bool:
        """Return whether no further generation can follow the present one."""
        return self.used == self.most

    def figures(self) -> dict[str, int]:
        return {"groups_sampled": len(self.signal), "sampling_rounds": self.used}


@dataclass(frozen=True)
class Sampled:
    """Answers of a step.

    Attributes:
        samples: All answers.
        scoring: Waits for their scores.
        taken: Indices of the answers to train on; None: all.
        figures: Figures of dynamic sampling, for metrics.jsonl.
    """

    samples: Samples
    scoring: Scoring
    taken: list[int] | None = None
    figures: dict[str, int] = field(default_factory=dict)

    def to_train_on(self) -> tuple[Samples, Scoring]:
        """Return the answers to train on, and a function that waits for their scores."""
        if (taken := self.taken) is None:
            return self.samples, self.scoring
        return self.samples.select(taken), lambda: [self.scoring()[index] for index in taken]


def sample_groups(loop: Loop, step: int) -> Sampled:
    """Sample answers to the prompts of a step, in up to `grpo.sampling_rounds` generations.

    With one generation, all groups are taken, and their scoring overlaps with the next stages.
    """
    grpo = loop.setup.recipe.grpo
    if grpo.sampling_rounds == 1:
        return Sampled(*loop.sample(step))
    rounds = Rounds(wanted=grpo.prompts_per_step, most=grpo.sampling_rounds)
    parts, scores = list[Samples](), list[Score]()
    for places in rounds:
        samples, scoring = loop.sample(step, places, last=rounds.is_last)
        with loop.stage("select_groups"):
            own = scoring()
            rounds.signal += with_signal(own, grpo.samples_per_prompt)
        parts.append(samples)
        scores += own
    with loop.stage("select_groups"):
        require_reward(scores)
    if not any(rounds.signal):
        drawn = f"{len(rounds.signal)} groups of {rounds.used} generations"
        loop.monitor.view.note(f"step {step}: no update: rewards are equal within all {drawn}")
    each = chain.from_iterable([signal] * grpo.samples_per_prompt for signal in rounds.signal)
    taken = list(compress(range(len(scores)), each))
    return Sampled(Samples.joined(parts), lambda: scores, taken, rounds.figures())


def with_signal(scores: Sequence[Score], group_size: int) -> list[bool]:
    """Return for each group whether two of its rewards differ."""
    groups = [scores[begin : begin + group_size] for begin in range(0, len(scores), group_size)]
    return [len({score.reward for score in group} - {None}) > 1 for group in groups]
