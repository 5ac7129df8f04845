"""Dynamic sampling: new prompts replace the groups of a step without signal.

The answers to one prompt are a group. It has signal if two of its rewards differ before shaping,
that is, before the length penalty and KL penalties. Each further generation of a step
takes as many new prompts as groups with signal are missing, so no such group is left over.

Source: Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale" (2025),
equation 11, which judges groups by right and wrong answers. Here the rewards of the functions
decide. verl (`filter_groups`) leaves the figure to the user.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from recipes.config.recipe import Recipe
from recipes.errors import counted
from recipes.loops.advantages import with_signal
from recipes.loops.loop import Loop, Scoring, require_reward
from recipes.loops.sampling import Samples, usable
from recipes.rewards import Scored


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
        scores = self.scoring()
        return self.samples.select(taken), lambda: [scores[index] for index in taken]


def sample_groups(loop: Loop, step: int) -> Sampled:
    """Sample answers to the prompts of a step, in up to `grpo.sampling_rounds` generations.

    With one generation, all groups are taken, and their scoring overlaps with the next stages.
    """
    recipe, grpo = loop.setup.recipe, loop.setup.recipe.grpo
    if grpo.sampling_rounds == 1:
        return Sampled(*loop.sample(step))
    signal, parts, scores = list[bool](), list[Samples](), list[Scored]()
    while len(parts) < grpo.sampling_rounds and (missing := recipe.prompts_per_step - sum(signal)):
        places = range(len(signal), len(signal) + missing)
        last = len(parts) + 1 == grpo.sampling_rounds
        samples, scoring = loop.sample(step, places, last)
        with loop.stage("select_groups"):
            own = scoring()
        signal += learnable(samples, own, recipe)
        parts.append(samples)
        scores += own
    with loop.stage("select_groups"):
        require_reward(scores)
    if not any(signal):
        drawn = f"{counted(len(signal), 'group')} of {counted(len(parts), 'generation')}"
        loop.sink.note(f"step {step}: no update: none of {drawn} has signal")
    taken = [index for index in range(len(scores)) if signal[index // recipe.samples_per_prompt]]
    figures = {"groups_sampled": len(signal), "sampling_rounds": len(parts)}
    return Sampled(Samples.joined(parts), lambda: scores, taken, figures)


def learnable(samples: Samples, scores: Sequence[Scored], recipe: Recipe) -> list[bool]:
    """Return for each group whether it has signal and an answer that updates take."""
    size, taken = recipe.samples_per_prompt, usable(samples, scores, recipe.loss.mask_cut_off)
    signal = with_signal([score.raw_reward for score in scores], size)
    present = {index // size for index in taken}
    return [differs and number in present for number, differs in enumerate(signal)]
