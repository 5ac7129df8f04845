"""GRPO over the wake-up cycle.

Step s (version s of the weights, after s - 1 updates):

    to_rollout(s)          the trainer offloads, the rollout wakes in stages, weights are synced
    generate_sequences     samples_per_prompt answers to each of prompts_per_step prompts; with
                           sampling_rounds > 1, new prompts replace groups without signal
    to_score("reference")  with loss.kl_coef only: the rollout sleeps, the reference reloads
    compute_ref_log_prob   log-probabilities under the weights before the first update, or after the
                           last multiple of loss.reference_every steps
    to_score()             the trainer's parameters replace the reference
    compute_log_prob       log-probabilities under the weights that sampled; not if the update
                           computes them, and not with correction.mode=bypass
    compute_reward         the task's score of every answer
    to_train()             the trainer reloads its optimizer
    compute_advantages     rewards compared by grpo.baseline and grpo.scale (`advantages.py`)
    update_actor           epochs x mini_batches updates by the loss of section `loss`

Updates take the answers with a reward that the correction does not reject, and with
loss.mask_cut_off only those that ended. `recipes.loops.corrections` compares the rollout's
log-probabilities with the trainer's; its weights correct the loss for the difference. The answers'
order is a function of (recipe.seed, step), like prompts and sampling seeds.
"""

from typing import Any

from recipes.config.recipe import Recipe
from recipes.config.sections import WITHIN_GROUPS
from recipes.loops.advantages import compute_advantages
from recipes.loops.corrections import correct_step
from recipes.loops.figures import answer_figures
from recipes.loops.loop import Loop, Scoring, schedule_of
from recipes.loops.rounds import learnable, sample_groups
from recipes.loops.sampling import Samples, usable
from recipes.loops.updates import mini_batches
from trainer_bridge.learning import Tokens, reference_figures


class GrpoLoop(Loop):
    """The loop of GRPO."""

    @staticmethod
    def trainer_fields(recipe: Recipe) -> dict[str, Any]:
        return {"schedule": schedule_of(recipe, recipe.steps, recipe.updates_per_step)}

    def train_step(self, step: int) -> dict[str, Any]:
        recipe, sampled = self.setup.recipe, sample_groups(self, step)
        taken, scoring = sampled.to_train_on()
        row: dict[str, Any] = dict(sampled.figures)
        if taken.texts:
            row |= self.learn(step, taken, scoring)
        else:  # no group with signal
            self.to_train()
        samples, scores, seconds = sampled.samples, sampled.scoring(), self.sampling_seconds
        if recipe.grpo.baseline in WITHIN_GROUPS:
            row["groups_without_signal"] = learnable(samples, scores, recipe).count(False)
        return row | answer_figures(samples, scores, seconds, self.setup.tasks.trained)

    def learn(self, step: int, samples: Samples, scoring: Scoring) -> dict[str, float]:
        """Update the policy on answers of whole groups, and return figures of the models."""
        recipe, loop = self.setup.recipe, self.setup.recipe.loop
        ref_logprobs = self.score_by_reference(samples)
        logprobs, scores = self.score(samples, scoring)
        correction = correct_step(self.setup, samples, logprobs)
        own = samples.learned(logprobs), ref_logprobs and samples.learned(ref_logprobs)
        figures = reference_figures(*own) | correction.figures
        figures |= self.unreplayed_mismatch(step, samples)
        self.to_train()
        with self.stage("compute_advantages"):
            rewards = [score.reward for score in scores]
            advantages = compute_advantages(recipe, rewards, *own)
            if isinstance(advantages, Tokens):
                advantages = samples.whole(advantages)
        batch = samples.batch(
            self.temperature,
            **{self.setup.logprobs_field: logprobs},
            advantages=advantages,
            weights=correction.weights,
            ref_logprobs=ref_logprobs if recipe.kl_in == "loss" else None,
            routed_experts=samples.routed_experts,
        )
        taken = correction.kept(usable(samples, scores, recipe.loss.mask_cut_off))
        batch = batch.of_answers(taken)
        parts = mini_batches(len(taken), loop.epochs, loop.mini_batches, recipe.seed, step)
        return figures | self.update_actor(batch, parts)
