"""Importance corrections of a step, as the recipe's section `correction` asks for them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from recipes.config.recipe import Recipe
from recipes.loops.sampling import Samples
from recipes.setup.preparation import Setup
from trainer_bridge import CorrectionConfig, correct
from trainer_bridge.learning import Tokens

OPTIONS = tuple(CorrectionConfig.__dataclass_fields__)


@dataclass(frozen=True, kw_only=True)
class StepCorrection:
    """What a correction changes in the updates of a step.

    Attributes:
        weights: Weight of each token in the policy's loss; None: all are 1.
        rejected: Indices of answers that the updates leave out.
        figures: Figures of the mismatch and of its correction, for the step's row.
    """

    weights: Tokens | None = None
    rejected: frozenset[int] = frozenset()
    figures: dict[str, float] = field(default_factory=dict)

    def kept(self, rows: Sequence[int]) -> list[int]:
        """Return the indices among `rows` of answers that are not rejected."""
        return [row for row in rows if row not in self.rejected]


def correct_step(setup: Setup, samples: Samples, logprobs: Tokens) -> StepCorrection:
    """Compare the log-probabilities of rollout and trainer, and correct for the difference.

    Without a correction, the figures say what token weights of at most 2 would give. Where
    `logprobs` are the rollout's, too, there is nothing to compare: with correction.mode=bypass, and
    if the update computes the trainer's.
    """
    recipe = setup.recipe
    if not setup.scores_before_update:
        return StepCorrection()
    rollout, logprobs = samples.learned(samples.logprobs), samples.learned(logprobs)
    corrected = correct(rollout.values, logprobs.values, rollout.lengths, options(recipe))
    if recipe.correction_mode == "none":
        return StepCorrection(figures=corrected.figures)
    return StepCorrection(
        weights=samples.whole(rollout.with_values(corrected.weights)),
        rejected=frozenset(row for row, kept in enumerate(corrected.kept) if not kept),
        figures=corrected.figures,
    )


def options(recipe: Recipe) -> CorrectionConfig:
    """Return the options of the weights; only correction.mode=decoupled changes the defaults."""
    if recipe.correction.mode != "decoupled":
        return CorrectionConfig()
    return CorrectionConfig(**{name: getattr(recipe.correction, name) for name in OPTIONS})


def summary(recipe: Recipe) -> str:
    """Return the words about corrections at the start of a run; empty if there are none."""
    if recipe.correction_mode == "none":
        return ""
    if recipe.correction_mode == "bypass":
        return "; correction: the loss compares with the rollout's log-probabilities"
    config = options(recipe)
    because = f" ({recipe.inexact_rollout})" if recipe.correction.mode == "auto" else ""
    bounds = f"truncated above {config.high:g}"
    if config.how == "mask":
        bounds = f"masked outside {config.low:g} to {config.high:g}"
    return f"; correction: {config.level} weights, {bounds}{because}"
