"""Loop that GRPO and PPO share: steps, evaluations, checkpoints and the figures of a step.

Prompts are a function of the seed and of the number of prompts drawn before, which checkpoints
record. Sampling seeds are functions of (recipe.seed, step). So a resumed run takes the same prompts
and seeds as an uninterrupted one.
"""

from __future__ import annotations

import abc
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from types import FrameType
from typing import Any, Self

from recipes.config.recipe import Recipe
from recipes.errors import ScorerError
from recipes.logs.monitor import Monitor
from recipes.loops.evaluation import Standing, evaluate, failures, standing
from recipes.loops.sampling import Samples, generate_sequences, rewarded, with_length_penalty
from recipes.rewards import Rewards, Scored
from recipes.setup.preparation import Setup
from rollout import Rollout
from trainer_bridge import Cycle, Schedule
from trainer_bridge.cycle import TrainerProtocol
from trainer_bridge.learning import Tokens, log_ratios, mismatch
from trainer_bridge.tag_names import PARAMS, REFERENCE

Scoring = Callable[[], list[Scored]]
"""Waits for the scores of submitted answers; all calls return the same ones."""
SILENT = 10
"""Steps in a row without signal after which a line says what to look at."""


@dataclass(kw_only=True)
class Loop(abc.ABC):
    """The loop of a run. A subclass defines the step of its algorithm.

    Attributes:
        setup: The prepared recipe.
        trainer: The trainer, or a handle of its actors.
        rollout: The engine, or a handle of its actors.
        cycle: The hand-over between the two.
        rewards: Scores answers.
        monitor: Times the stages and records rows.
        save: Saves the checkpoint of a step, with the number of prompts drawn until then; never
            called with `checkpoint.every` 0.
        export: Exports the model of a step.
        drawn: Number of prompts that the finished steps have drawn.
    """

    setup: Setup
    trainer: TrainerProtocol
    rollout: Rollout
    cycle: Cycle
    rewards: Rewards
    monitor: Monitor
    save: Callable[[int, int], None]
    export: Callable[[int], None]
    drawn: int = 0
    _silent: int = 0  # steps in a row whose groups have no signal

    @staticmethod
    @abc.abstractmethod
    def trainer_fields(recipe: Recipe) -> dict[str, Any]:
        """Return the fields of `TrainerConfig` that depend on the algorithm."""

    @abc.abstractmethod
    def train_step(self, step: int) -> dict[str, Any]:
        """Run one step, from the cycle's state "rollout" to "train", and return its figures."""

    def run(self, first_step: int) -> None:
        """Run all steps from `first_step` on (a new run begins with 1).

        The last evaluation and the export of the model follow. The run ends early after
        `eval.patience` evaluations without improvement.
        """
        steps, every = self.setup.recipe.steps, self.setup.recipe.checkpoint.every
        updates = steps
        self._keep_best()  # A resumed run may have ended between an evaluation and this call.
        with Stopping(self.monitor.view.note if every else None) as stopping:
            for step in range(first_step, steps + 1):
                with self.monitor.step(step):
                    self._run_step(step)
                    due = every and (step % every == 0 or step == steps)
                    if not self.ended_early and (due or stopping.asked):
                        self._save_checkpoint(step)
                    stopping.leave()
                    if self.ended_early:
                        updates = step - 1
                        break
                    if self._exports_between(step):
                        self._export(step)
        if self.setup.recipe.eval.every and updates == steps and not self._is_evaluated(steps):
            self.monitor.folder.place = "in the last evaluation"
            self._wake_rollout(steps + 1)
            self._evaluate(steps)
            self.to_train()
        if self.setup.recipe.checkpoint.export_every is not None:
            self.monitor.folder.place = "in the last export"
            self._export(updates)

    def _exports_between(self, step: int) -> bool:
        every = self.setup.recipe.checkpoint.export_every or 0
        return every > 0 and step % every == 0 and step < self.setup.recipe.steps

    def _export(self, step: int) -> None:
        with self.stage("export"):
            self.export(step)

    def _run_step(self, step: int) -> None:
        """Run a step; if the evaluation before it ends the run, only return to state "train"."""
        started, monitor = time.monotonic(), self.monitor
        self.to_rollout(step)
        if self.ended_early:
            self.to_train()
            return
        row = {"kind": "train", "step": step, **self.whole_step(step)}
        groups = row.get("groups_sampled", self.setup.recipe.prompts_per_step)
        self.drawn += groups
        row["prompts_drawn"] = self.drawn
        row |= {"step_seconds": time.monotonic() - started, "stages": dict(monitor.seconds)}
        row |= {"hidden_seconds": monitor.hidden_seconds}
        row |= {"sync": monitor.sync, "memory": dict(monitor.memory), "peaks": monitor.peaks.take()}
        monitor.row(row)
        self._tell_silence(step, row.get("groups_without_signal") == groups)

    def _tell_silence(self, step: int, silent: bool) -> None:
        """Say after every ten steps in a row without signal what to look at."""
        self._silent = self._silent + 1 if silent else 0
        if self._silent and self._silent % SILENT == 0:
            rule = f"for {self._silent} steps, all answers to a prompt have had the same reward"
            remedy = f"look at memsaver samples {self.monitor.folder.path}, the reward functions"
            keys = "task.extract, sampling.max_tokens and sampling.temperature"
            self.monitor.view.note(f"step {step}: {rule}; {remedy}, {keys}")

    def whole_step(self, step: int) -> dict[str, Any]:
        """Run `train_step` and refresh the reference if it is due; return the step's figures."""
        figures = self.train_step(step)
        if every := self.setup.recipe.reference_every:
            figures["reference_step"] = (step - 1) // every * every
            if step % every == 0:
                with self._reference_held(), self.stage("refresh_reference"):
                    self.trainer.refresh_reference()
        return figures

    @contextmanager
    def _reference_held(self) -> Iterator[None]:
        with self.monitor.phase("reload_reference"), self.cycle.with_reference():
            yield

    def stage(self, name: str) -> AbstractContextManager[None]:
        return self.monitor.stage(name)

    @property
    def temperature(self) -> float:
        return self.setup.recipe.sampling.temperature

    def to_rollout(self, step: int) -> None:
        """Wake the rollout and run the evaluation that is due before the step."""
        self._wake_rollout(step)
        every = self.setup.recipe.eval.every
        if every and (step - 1) % every == 0 and not self._is_evaluated(step - 1):
            self._evaluate(step - 1)

    def _is_evaluated(self, updates: int) -> bool:
        """Return whether the newest row evaluates these weights, as it may in a resumed run."""
        newest = self.monitor.folder.run.newest_evaluation
        return newest is not None and newest["step"] == updates

    def sample(
        self, step: int, places: range | None = None, last: bool = True
    ) -> tuple[Samples, Scoring]:
        """Return the rollout's answers to prompts of a step; their scoring has begun.

        Args:
            step: Number of the step.
            places: Places of the prompts among those that the step draws; None: one generation of
                prompts_per_step prompts.
            last: Whether this is known to be the last generation of the step.

        Returns:
            The answers, and a function that waits for their scores.
        """
        places = places or range(self.setup.recipe.prompts_per_step)
        # The parameters take memory of the KV pool, which a further generation would lack.
        if last:
            with self.monitor.phase("prefetch"):
                self.cycle.prefetch()
        with self.stage("generate_sequences"):
            samples = generate_sequences(self.rollout, self.setup, step, self.drawn, places)
        waiting = self.rewards.submit(samples.answers(), required=places.start == 0)

        @cache
        def scoring() -> list[Scored]:
            scores = with_length_penalty(samples, waiting(), self.setup.recipe.sampling)
            self.monitor.answered(samples, scores)
            return scores

        return samples, scoring

    def to_score(self, model: str = PARAMS) -> None:
        with self.monitor.phase("to_score"):
            self.cycle.to_score(model)

    def score_by_reference(self, samples: Samples) -> Tokens | None:
        """Return log-probabilities under the reference; None without `loss.kl_coef`."""
        if not self.setup.recipe.loss.kl_coef:
            return None
        # With adapters, the reference is their frozen base, which the policy has on the device.
        self.to_score(PARAMS if self.setup.recipe.lora.rank else REFERENCE)
        with self.stage("compute_ref_log_prob"):
            return self.trainer.compute_ref_log_prob(samples.batch(self.temperature))

    def score(self, samples: Samples, scoring: Scoring) -> tuple[Tokens, list[Scored]]:
        """Return log-probabilities under the weights that sampled, and the answers' scores.

        The log-probabilities are the trainer's. They are the rollout's if no pass precedes the
        update; the update then reports the figures.
        """
        self.to_score()
        logprobs = samples.logprobs
        if self.setup.scores_before_update:
            with self.stage("compute_log_prob"):
                logprobs = self._compute_log_prob(samples, samples.routed_experts)
        with self.stage("compute_reward"):
            scores = scoring()
            require_reward(scores)
        return logprobs, scores

    def _compute_log_prob(self, samples: Samples, routed: Any) -> Tokens:
        batch = samples.batch(self.temperature, routed_experts=routed)
        return self.trainer.compute_log_prob(batch)

    def unreplayed_mismatch(self, step: int, samples: Samples) -> dict[str, float]:
        """Return the log-prob mismatch without router replay.

        It is measured in the first step and after each evaluation, and only with `router_replay`.
        """
        every = self.setup.recipe.eval.every
        if samples.routed_experts is None or (step - 1) % (every or self.setup.recipe.steps):
            return {}
        with self.stage("compute_log_prob_unreplayed"):
            logprobs = self._compute_log_prob(samples, None)
        figures = mismatch(log_ratios(samples.logprobs, logprobs))
        return {f"{name}_unreplayed": value for name, value in figures.items()}

    def to_train(self) -> None:
        with self.monitor.phase("to_train"):
            self.cycle.to_train()
        self.monitor.read_memory("train")
        self._keep_best()

    def _keep_best(self) -> None:
        """Keep a checkpoint of the weights just evaluated if they are the best, or the last."""
        folder, section, best = self.monitor.folder, self.setup.recipe.checkpoint, self.standing
        if not (evaluation := folder.run.newest_evaluation):
            return
        updates = evaluation["step"]
        wanted = (best and best.step == updates) or self.ended_early
        # The step may have saved its checkpoint already. The initial weights (0 updates) need none.
        if wanted and section.every and updates > folder.done:
            self._save_checkpoint(updates)
        if best:
            folder.mark_best(best.step, section.keep)

    def _save_checkpoint(self, step: int) -> None:
        every = self.setup.recipe.reference_every
        refreshed = every and step >= every
        held = self._reference_held() if refreshed else nullcontext()
        with held, self.stage("save_checkpoint"):
            self.save(step, self.drawn)

    @property
    def standing(self) -> Standing | None:
        """Return the best of the evaluations by `eval.best`."""
        return standing(self.monitor.folder.run.evaluations, self.setup.recipe.eval.best)

    @property
    def ended_early(self) -> bool:
        """Return whether `eval.patience` evaluations have passed without improvement."""
        if not (patience := self.setup.recipe.eval.patience):
            return False  # Without reading the rows of all steps.
        best = self.standing
        return best is not None and best.since >= patience

    def _wake_rollout(self, version: int) -> None:
        with self.monitor.phase("to_rollout"):
            corrected = self.setup.recipe.correction_mode != "none"
            self.monitor.synced(self.cycle.to_rollout(version), corrected)
        self.monitor.read_memory("rollout")

    def _evaluate(self, updates: int) -> None:
        with self.stage("evaluate"):
            evaluation = evaluate(self.rollout, self.setup, self.rewards)
        self.monitor.answered(evaluation.samples, evaluation.scores)
        self.monitor.row({"kind": "eval", "step": updates, **evaluation.row})
        if self.setup.recipe.eval.best and (lost := failures(evaluation.row)):
            rule = f"{lost} answers lost their rewards to failures of reward functions"
            self.monitor.view.note(
                f"evaluation after {updates} updates: {rule}: cannot be the best"
            )


def schedule_of(recipe: Recipe, steps: int, updates: int) -> Schedule:
    """Return the schedule of a model that is trained in `steps` steps of `updates` updates."""
    trainer = recipe.trainer
    return Schedule(
        kind=trainer.schedule,
        warmup_updates=trainer.warmup_steps * updates,
        updates=steps * updates,
        final_rate=0.0 if trainer.schedule == "constant" else trainer.final_rate,
    )


def require_reward(scores: Sequence[Scored]) -> None:
    """Raise a ScorerError if no answer of a step has a reward."""
    if not rewarded(scores):
        rule = f"none of the step's {len(scores)} answers got a reward"
        raise ScorerError(f"{rule}: all functions returned None; return numbers for some")


_TEXT = (
    "asked to stop: the run ends after this step, with a checkpoint; "
    "a second signal ends it immediately"
)


class Stopping:
    """Context manager that defers the first SIGINT or SIGTERM until `leave` or the block's end.

    `tell` shows a line to the user; without it, no signal is deferred. A second signal takes effect
    immediately. Python handles signals in the main thread only, so in another thread this changes
    nothing.
    """

    def __init__(self, tell: Callable[[str], None] | None) -> None:
        self.asked: int | None = None  # the deferred signal
        self._tell = tell
        self._acted = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if self._tell and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self.asked is not None and not self._acted:
            # The block ended by an error, after which a run may restart, or before `leave`.
            signal.raise_signal(self.asked)

    def leave(self) -> None:
        """Raise the deferred signal, if any, under its previous handler."""
        if self.asked is not None:
            self._act(self.asked)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked is not None:
            self._act(number)
        self.asked = number
        # In a thread, because the main thread may be printing at this moment.
        threading.Thread(target=self._tell, args=(_TEXT,), daemon=True).start()

    def _act(self, number: int) -> None:
        self._acted = True
        signal.signal(number, self._before[number])
        signal.raise_signal(number)
