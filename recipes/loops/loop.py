"""Loop that GRPO and PPO share: steps, evaluations, checkpoints and the figures of a step.

Prompts are a function of the seed and of the number of prompts drawn before, which checkpoints
record. Sampling seeds are functions of (recipe.seed, step). So a resumed run takes the same prompts
and seeds as an uninterrupted one. A loop decides by its own state: it reports to a sink, and reads
nothing back.
"""

import abc
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from types import FrameType
from typing import Any, Self

from recipes.config.recipe import Recipe
from recipes.errors import ScorerError, counted
from recipes.loops.ahead import Ahead, Drawn
from recipes.loops.evaluation import Standing, evaluate, failures, standing
from recipes.loops.sampling import Samples, generate_sequences, rewarded, with_length_penalty
from recipes.loops.sink import Sink
from recipes.loops.updates import update
from recipes.rewards import Rewards, Scored
from recipes.setup.preparation import Setup
from rollout import Rollout
from trainer_bridge import Cycle, Schedule, SequenceBatch
from trainer_bridge.cycle import TrainerProtocol
from trainer_bridge.learning import Tokens, log_ratios, mismatch
from trainer_bridge.tag_names import PARAMS, REFERENCE

Scoring = Callable[[], list[Scored]]
"""Waits for the scores of submitted answers; all calls return the same ones."""
SILENT = 10
"""Steps in a row without signal after which a line says what to look at."""


def _save_nothing(*numbers: int) -> None:
    """Stand for a checkpoint or an export that nobody keeps."""


@dataclass(kw_only=True)
class Loop(abc.ABC):
    """The loop of a run. A subclass defines the step of its algorithm.

    A resumed run gives `drawn`, `updates` and `evaluations` of the sessions before.

    Attributes:
        setup: The prepared recipe.
        trainer: The trainer, or a handle of its actors.
        rollout: The engine, or a handle of its actors.
        cycle: The hand-over between the two.
        rewards: Scores answers.
        sink: Receives stages, figures and answers.
        save: Begins to save the checkpoint of a step, with the number of prompts drawn until then;
            never called with `checkpoint.every` 0.
        complete: Completes the checkpoint that is being saved, if it is written, or with True when
            it is; returns whether none is being saved any more.
        mark_best: Makes the checkpoint of a step the best one; it may not exist.
        export: Exports the model of a step.
        drawn: Number of prompts that the finished steps have drawn.
        updates: Number of finished steps; a resumed run has a checkpoint of that step.
        evaluations: Rows of the evaluations so far.
        sampling_seconds: Seconds of this step's generations.
    """

    setup: Setup
    trainer: TrainerProtocol
    rollout: Rollout
    cycle: Cycle
    rewards: Rewards
    sink: Sink = field(default_factory=Sink)
    save: Callable[[int, int], None] = _save_nothing
    complete: Callable[[bool], bool] = bool  # without files, nothing is being saved after a wait
    mark_best: Callable[[int], None] = _save_nothing
    export: Callable[[int], None] = _save_nothing
    drawn: int = 0
    updates: int = 0
    evaluations: list[Mapping[str, Any]] = field(default_factory=list)
    sampling_seconds: float = 0.0
    _silent: int = 0  # steps in a row whose groups have no signal

    def __post_init__(self) -> None:
        self._saved = self.updates  # step of the newest checkpoint, which may be being written
        self._saving = False
        self._ahead, self._staleness = Ahead(self._draw_beside), 0.0

    @staticmethod
    @abc.abstractmethod
    def trainer_fields(recipe: Recipe) -> dict[str, Any]:
        """Return the fields of `TrainerConfig` that depend on the algorithm."""

    @abc.abstractmethod
    def train_step(self, step: int) -> dict[str, Any]:
        """Run one step, from the cycle's state "rollout" to "train", and return its figures."""

    def run(self) -> None:
        """Run all steps that follow the finished ones.

        The last evaluation and the export of the model follow. The run ends early after
        `eval.patience` evaluations without improvement.
        """
        steps, every = self.setup.recipe.steps, self.setup.recipe.checkpoint.every
        self._keep_best()  # A resumed run may have ended between an evaluation and this call.
        saves = every and self.save is not _save_nothing
        with Stopping(self.sink.note if saves else None) as stopping:
            for step in range(self.updates + 1, steps + 1):
                with self.sink.part(f"step {step}"):
                    self._run_step(step)
                    due = every and (step % every == 0 or step == steps)
                    if not self.ended_early and (due or stopping.asked):
                        self._save_checkpoint(step)
                    self._complete_checkpoint(wait=stopping.asked is not None)
                    stopping.leave()
                    if self.ended_early:
                        break
                    if self._exports_between(step):
                        self._export(step)
        if self.setup.recipe.eval.every and self.updates == steps and not self._is_evaluated:
            with self.sink.part("the last evaluation"):
                self._wake_rollout(steps + 1)
                self._evaluate()
                self.to_train()
        self._complete_checkpoint(wait=True)
        if self.setup.recipe.checkpoint.export_every is not None:
            with self.sink.part("the last export"):
                self._export(self.updates)

    def _exports_between(self, step: int) -> bool:
        every = self.setup.recipe.checkpoint.export_every or 0
        return every > 0 and step % every == 0 and step < self.setup.recipe.steps

    def _export(self, step: int) -> None:
        with self.stage("export"):
            self.export(step)

    def _run_step(self, step: int) -> None:
        """Run a step; if the evaluation before it ends the run, only return to state "train"."""
        started = time.monotonic()
        self.to_rollout(step)
        if self.ended_early:
            self.to_train()
            return
        self._complete_checkpoint(wait=False)
        row = {"kind": "train", "step": step, **self.whole_step(step)}
        groups = row.get("groups_sampled", self.setup.recipe.prompts_per_step)
        self.drawn += groups
        row |= {"prompts_drawn": self.drawn, "step_seconds": time.monotonic() - started}
        self.sink.row(row)
        self.updates = step
        self._silent = self._silent + 1 if row.get("groups_without_signal") == groups else 0
        if self._silent and self._silent % SILENT == 0:
            self.sink.silent(step, self._silent)

    def whole_step(self, step: int) -> dict[str, Any]:
        """Run `train_step` and refresh the reference if it is due; return the step's figures."""
        self.sampling_seconds = 0.0
        figures = self.train_step(step)
        if self.setup.recipe.loop.max_staleness:
            figures["staleness"] = self._staleness
        if every := self.setup.recipe.reference_every:
            figures["reference_step"] = (step - 1) // every * every
            if step % every == 0:
                with self._reference_held(), self.stage("refresh_reference"):
                    self.trainer.refresh_reference()
        return figures

    @contextmanager
    def _reference_held(self) -> Iterator[None]:
        with self.sink.phase("reload_reference"), self.cycle.with_reference():
            yield

    def stage(self, name: str) -> AbstractContextManager[None]:
        return self.sink.stage(name)

    @property
    def temperature(self) -> float:
        return self.setup.recipe.sampling.temperature

    def to_rollout(self, step: int) -> None:
        """Wake the rollout and run the evaluation that is due before the step."""
        self._wake_rollout(step)
        every = self.setup.recipe.eval.every
        if every and (step - 1) % every == 0 and not self._is_evaluated:
            self._evaluate()

    @property
    def _is_evaluated(self) -> bool:
        """Return whether the present weights are evaluated, as they may be in a resumed run."""
        return bool(self.evaluations) and self.evaluations[-1]["step"] == self.updates

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
            with self.sink.phase("prefetch"):
                self.cycle.prefetch()
        with self.stage("generate_sequences"):
            samples, seconds = self._ahead.take(step) or self._draw(step, self.drawn, places)
        self.sampling_seconds += seconds
        if self.setup.recipe.loop.max_staleness:
            self._sample_ahead(step, samples)
        waiting = self.rewards.submit(samples.answers(), required=places.start == 0)

        @cache
        def scoring() -> list[Scored]:
            scores = with_length_penalty(samples, waiting(), self.setup.recipe.sampling)
            self.sink.answered(samples, scores)
            return scores

        return samples, scoring

    def _draw(self, step: int, drawn: int, places: range, **how: Any) -> Drawn:
        started = time.monotonic()
        samples = generate_sequences(self.rollout, self.setup, step, drawn, places, **how)
        return Drawn(samples, time.monotonic() - started)

    def _sample_ahead(self, step: int, samples: Samples) -> None:
        """Begin to sample the next step's answers, and note how old this step's are."""
        assert samples.weight_versions is not None
        self._staleness = step - float(samples.weight_versions.values.mean())
        if step < self.setup.recipe.steps:
            self._ahead.begin(step + 1, self.drawn + self.setup.recipe.prompts_per_step)

    def _draw_beside(self, step: int, drawn: int) -> Drawn:
        """Return the answers of a step, which are sampled during the step before."""
        # A sync may begin before the engines have accepted the requests.
        return self._draw(step, drawn, range(self.setup.recipe.prompts_per_step), asleep="queue")

    def update_actor(
        self, batch: SequenceBatch, parts: Sequence[Sequence[int]]
    ) -> dict[str, float]:
        """Update the policy on each part of a batch, and return the means of the figures."""
        started, operations = time.monotonic(), self.setup.operations
        with self.stage("update_actor"):
            figures = update(self.trainer.update_actor, batch, parts)
        seconds = max(time.monotonic() - started, 1e-9)
        if figures and operations is not None:
            taken = batch.of_answers([*chain.from_iterable(parts)])  # an answer once in each epoch
            needed = operations.update(taken.lengths, taken.num_tokens)
            figures["update_tflops"] = needed / seconds / self.setup.recipe.cluster.size / 1e12
        return figures

    def to_score(self, model: str = PARAMS) -> None:
        with self.sink.phase("to_score"):
            self.cycle.to_score(model)

    def score_by_reference(self, samples: Samples) -> Tokens | None:
        """Return log-probabilities under the reference; None without `loss.kl_coef`."""
        if not self.setup.recipe.loss.kl_coef:
            return None
        # With adapters, the reference is their frozen base, which the policy has on the device.
        self.to_score(PARAMS if self.setup.recipe.lora.rank else REFERENCE)
        with self.stage("compute_ref_log_prob"):
            batch = samples.batch(self.temperature)
            return batch.by_answer(self.trainer.compute_ref_log_prob(batch))

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
        return batch.by_answer(self.trainer.compute_log_prob(batch))

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
        with self.sink.phase("to_train"):
            self.cycle.to_train()
        self.sink.read_memory("train")
        self._keep_best()

    def _keep_best(self) -> None:
        """Keep a checkpoint of the weights just evaluated if they are the best, or the last."""
        if not self._is_evaluated:
            return
        best, every = self.standing, self.setup.recipe.checkpoint.every
        wanted = (best and best.step == self.updates) or self.ended_early
        # The step may have saved its checkpoint already. The initial weights (0 updates) need none.
        if wanted and every and self.updates > self._saved:
            self._save_checkpoint(self.updates)
        if best:
            self.mark_best(best.step)

    def _save_checkpoint(self, step: int) -> None:
        every = self.setup.recipe.reference_every
        refreshed = every and step >= every
        held = self._reference_held() if refreshed else nullcontext()
        with held, self.stage("save_checkpoint"):
            self.save(step, self.drawn)
        self._saved, self._saving = step, True

    def _complete_checkpoint(self, wait: bool) -> None:
        if self._saving:
            with self.stage("save_checkpoint"):
                self._saving = not self.complete(wait)

    @property
    def standing(self) -> Standing | None:
        """Return the best of the evaluations by `eval.best`."""
        return standing(self.evaluations, self.setup.recipe.eval.best)

    @property
    def ended_early(self) -> bool:
        """Return whether `eval.patience` evaluations have passed without improvement."""
        patience, best = self.setup.recipe.eval.patience, self.standing
        return patience > 0 and best is not None and best.since >= patience

    def _wake_rollout(self, version: int) -> None:
        with self.sink.phase("to_rollout"):
            corrected = self.setup.recipe.correction_mode != "none"
            self.sink.synced(self.cycle.to_rollout(version), corrected)
        self.sink.read_memory("rollout")

    def _evaluate(self) -> None:
        with self.stage("evaluate"):
            evaluation = evaluate(self.rollout, self.setup, self.rewards)
        row = {"kind": "eval", "step": self.updates, **evaluation.row}
        self.evaluations.append(row)
        self.sink.answered(evaluation.samples, evaluation.scores)
        self.sink.row(row)
        if self.setup.recipe.eval.best and (lost := failures(row)):
            rule = f"failures of reward functions left {counted(lost, 'answer')} without a reward"
            place = f"evaluation after {counted(self.updates, 'update')}"
            self.sink.note(f"{place}: {rule}: cannot be the best")


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
