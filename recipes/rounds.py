"""Dynamic sampling: new prompts replace the groups of a step without signal.

The answers to one prompt are a group. It has signal if two of its rewards differ; otherwise all of
its advantages are 0, apart from KL penalties in the rewards. Each further generation of a step
takes as many new prompts as groups with signal are missing, so no such group is left over.

Source: Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale" (2025),
equation 11, which judges groups by right and wrong answers. Here their rewards decide, with the
length penalty and before KL penalties. verl (`filter_groups`) leaves the figure to the user.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress

from recipes.advantages import with_signal
from recipes.config.recipe import Recipe
from recipes.loop import Loop, Scoring, require_reward
from recipes.sampling import Samples, taught
from recipes.tasks import Score


@dataclass(kw_only=True)
class Rounds:
    """Generations of one step, whose owner iterates over them and extends `signal` after each.

    Attributes:
        wanted: Groups with signal that the step needs.
        most: Most generations.
        used: Number of generations that have begun.
        signal: Whether each sampled group has signal, in the order of the prompts.
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
            rounds.signal += learnable(samples, own, loop.setup.recipe)
        parts.append(samples)
        scores += own
    with loop.stage("select_groups"):
        require_reward(scores)
    if not any(rounds.signal):
        drawn = f"{len(rounds.signal)} groups of {rounds.used} generations"
        loop.monitor.view.note(f"step {step}: no update: none of {drawn} has signal")
    by_answer = chain.from_iterable([has] * grpo.samples_per_prompt for has in rounds.signal)
    taken = list(compress(range(len(scores)), by_answer))
    return Sampled(Samples.joined(parts), lambda: scores, taken, rounds.figures())


def learnable(samples: Samples, scores: Sequence[Score], recipe: Recipe) -> list[bool]:
    """Return for each group whether it has signal and an answer that updates take."""
    size, taken = recipe.grpo.samples_per_prompt, taught(samples, scores, recipe.loss.mask_cut_off)
    signal = with_signal([score.reward for score in scores], size)
    present = {index // size for index in taken}
    return [differs and number in present for number, differs in enumerate(signal)]
