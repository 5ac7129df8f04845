"""GRPO over the wake-up cycle.

Step s (version s of the weights, after s - 1 updates):

    to_rollout(s)          the trainer offloads, the rollout wakes in stages, weights are synced
    generate_sequences     samples_per_prompt answers to each of prompts_per_step prompts
    to_score("reference")  with loss.kl_coef only: the rollout sleeps, the reference reloads
    compute_ref_log_prob   log-probabilities under the weights before the first update
    to_score()             the trainer's parameters replace the reference
    compute_log_prob       log-probabilities under the weights that sampled; not with
                           correction.mode=bypass, which takes the rollout's
    compute_reward         the task's score of every answer
    to_train()             the trainer reloads its optimizer
    compute_advantages     rewards compared by grpo.baseline and grpo.scale (`recipes.advantages`)
    update_actor           epochs x mini_batches updates by the loss of section `loss`

Updates take the answers with a reward that the correction does not reject, and with
loss.mask_cut_off only those that ended. `recipes.corrections` compares the rollout's
log-probabilities with the trainer's; its weights correct the loss for the difference. The answers'
order is a function of (recipe.seed, step), like prompts and sampling seeds.
"""

from typing import Any

from recipes.advantages import compute_advantages, groups_without_signal
from recipes.config.recipe import Recipe
from recipes.corrections import correct_step
from recipes.figures import step_row
from recipes.loop import Loop
from recipes.sampling import taught
from recipes.updates import mini_batches, update


class GrpoLoop(Loop):
    """The loop of GRPO."""

    @staticmethod
    def trainer_fields(recipe: Recipe) -> dict[str, Any]:
        updates = recipe.steps * recipe.updates_per_step
        return {"decay_steps": updates if recipe.trainer.lr_decay else None}

    def train_step(self, step: int) -> dict[str, Any]:
        recipe, grpo = self.setup.recipe, self.setup.recipe.grpo
        samples, scoring = self.sample(step)
        ref_logprobs = self.score_by_reference(samples)
        logprobs, scores = self.score(samples, scoring)
        unreplayed = self.unreplayed_mismatch(step, samples)
        correction = correct_step(recipe, samples, logprobs)
        self.to_train()
        rewards = [score.reward for score in scores]
        with self.stage("compute_advantages"):
            advantages = compute_advantages(recipe, rewards, logprobs, ref_logprobs)
        learning = {
            "old_logprobs": logprobs,
            "advantages": advantages,
            "weights": correction.weights,
            "ref_logprobs": ref_logprobs if recipe.kl_in == "loss" else None,
            "routed_experts": samples.routed_experts,
        }
        rows = correction.kept(taught(samples, scores, recipe.loss.mask_cut_off))
        batch = samples.batch(self.temperature, **learning).select(rows)
        parts = mini_batches(len(batch), grpo.epochs, grpo.mini_batches, recipe.seed, step)
        with self.stage("update_actor"):
            learned = update(self.trainer.update_actor, batch, parts)
        seconds, tasks = self.monitor.seconds, self.setup.tasks.trained
        row = step_row(samples, scores, logprobs, ref_logprobs, seconds, tasks)
        row["groups_without_signal"] = groups_without_signal(rewards, grpo.samples_per_prompt)
        return learned | row | correction.figures | unreplayed
