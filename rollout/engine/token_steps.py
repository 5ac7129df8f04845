"""Steps of an engine: each computes the next token of its samples, or a part of prompts."""

import logging
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from rollout.ops.token_sampling import Sent
from rollout.running.runner import ModelRunner
from rollout.running.step_routing import StepRouting
from rollout.scheduling.prompt_source import PromptSource
from rollout.scheduling.samples import Sample, Step, names_of
from rollout.scheduling.scheduler import Scheduler
from rollout.weights.pages import shorten
from rollout.weights.store import WeightStore

_log = logging.getLogger("rollout")


class Launched(NamedTuple):
    """A step whose results may still be under way from the device."""

    samples: list[Sample]  # of which each receives a token
    sent: Sent | None  # their tokens and log-probabilities; None without samples
    logits: Tensor
    branches: list[tuple[int, Sample]]  # (row of the logits, branch of a beam search)
    routing: StepRouting | None


class TokenSteps:
    """The steps of one engine, which calls `run` when weights and KV cache are ready.

    Args:
        scheduler: Chooses the samples of each step, and receives their tokens.
        runner: Computes the steps.
        store: The weights, whose version each token records.
    """

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, store: WeightStore) -> None:
        self._scheduler, self._runner, self._store = scheduler, runner, store
        self._suspects = frozenset[Sample]()  # the samples of the last step, if it failed

    def run(self, prompts: PromptSource) -> None:
        """Run one forward of the samples that the scheduler chooses, and choose their next tokens.

        If the step fails, the running samples start over, because pages were allocated for tokens
        that were not computed. Samples of two failed steps in a row end with the error.

        Args:
            prompts: Present source of the keys and values of prompts.

        Raises:
            BaseException: The step failed before samples were chosen, the error is no `Exception`,
                or other ranks share the model, which cannot continue without this rank.
        """
        step = None
        try:
            step = self._scheduler.schedule()
            prompts.ask(step)
            if step.decode or step.chunks:
                self._collect(self._launch(step, prompts))
        except BaseException as error:
            self._scheduler.preempt_all()
            if step is None or not isinstance(error, Exception) or self._runner.ranks.size > 1:
                raise
            self._blame(step.samples, error)
        else:
            self._suspects = frozenset()

    def not_finite(self, sample: Sample) -> FloatingPointError:
        """Return the error of a sample whose last log-probability was not finite."""
        text = f"a log-probability of sample {sample.name} is not finite after "
        text += f"{sample.length - len(sample.prompt)} tokens of version {self._store.last_version}"
        if names := self._store.not_finite():
            return FloatingPointError(
                f"{text}: NaN or infinity in {shorten(names)}; load or sync finite weights"
            )
        return FloatingPointError(
            f"{text}: the weights are finite, so values exceeded the range of the dtype of the "
            f"engine or of its KV cache; use dtype bfloat16 or float32 and kv_cache_dtype auto"
        )

    def _blame(self, samples: Sequence[Sample], error: Exception) -> None:
        """End the samples of a failed step that were in the failed step before it, too."""
        guilty = [sample for sample in samples if sample in self._suspects]
        self._suspects = frozenset(samples)
        text = "a step of samples %s failed, and %d of them end: %s: %s"
        _log.warning(text, names_of(samples), len(guilty), type(error).__name__, error)
        for sample in guilty:
            sample.error = error
        self._scheduler.abort(guilty, "error")

    def _launch(self, step: Step, prompts: PromptSource) -> Launched:
        """Start a step's forward and the choice of its next tokens."""
        logits = self._runner.forward(step)
        routing = None
        if self._runner.recorder is not None:
            routing = self._runner.recorder.take(step.tokens)
            step.record(routing.experts)
        self._scheduler.computed(step)
        members = list(enumerate(step.decode))
        last = (chunk for chunk in step.chunks if chunk.last)
        for row, chunk in enumerate(last, start=len(members)):
            prompts.computed(chunk.sample)
            family = chunk.sample, *self._scheduler.fork_siblings(chunk.sample)
            members += [(row, sample) for sample in family]
        plain = [(row, sample) for row, sample in members if sample.beams is None]
        samples = [sample for _, sample in plain]
        sent = self._runner.sample(logits, [row for row, _ in plain], samples) if plain else None
        branches = [(row, sample) for row, sample in members if sample.beams is not None]
        return Launched(samples, sent, logits, branches, routing)

    def _collect(self, launched: Launched) -> None:
        """Wait for the tokens of a launched step, and add them to its samples."""
        if launched.branches:
            self._branch(launched.logits, launched.branches)
        if launched.sent is not None:
            version = self._store.last_version
            drawn = zip(launched.samples, *launched.sent.lists(), strict=True)
            for sample, token, logprob in drawn:
                self._scheduler.append(sample, token, logprob, version)
        if launched.routing is not None:
            launched.routing.arrive(waited=launched.sent is not None)

    def _branch(self, logits: Tensor, members: Sequence[tuple[int, Sample]]) -> None:
        """Advance every beam search by one token. All branches of a search are in the same step."""
        searches = (branch.beams for _, branch in members)
        groups = list(dict.fromkeys(search for search in searches if search is not None))
        count = max(group.search.num_candidates for group in groups)
        ranked = self._runner.candidates(logits, [row for row, _ in members], count)
        candidates = {branch: row for (_, branch), row in zip(members, ranked, strict=True)}
        for group in groups:
            likeliest = [candidates[branch] for branch in group.members]
            self._scheduler.branch(group, likeliest, self._store.last_version)
