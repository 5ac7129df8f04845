"""Steps of an engine: each computes the next token of its samples, or a part of prompts."""

import contextlib
import logging
import time
from collections import deque
from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvcache.allocators import Int64Array
from rollout.ops.token_sampling import Sent
from rollout.running.runner import ModelRunner
from rollout.running.step_routing import StepRouting
from rollout.scheduling.prompt_source import PromptSource
from rollout.scheduling.samples import Sample, Step, names_of
from rollout.scheduling.scheduler import Scheduler
from rollout.weights.pages import shorten
from rollout.weights.store import WeightStore

_log = logging.getLogger("rollout")


class Told(NamedTuple):
    """The likeliest tokens at some places of a step, on their way from the device."""

    places: Int64Array  # in the rows of the step
    sent: Sent  # [places, most]


class ScoredTokens(NamedTuple):
    """Tokens of a prompt whose scores are on their way from the device."""

    sample: Sample
    first: int  # number of the token before them
    sent: Sent


class Launched(NamedTuple):
    """A step whose results may still be under way from the device.

    A row that has another generation when the results arrive belongs to no sample any more, or to
    another one: its sample has ended or was preempted since. The result is dropped: the sample
    needs none, or the same token is chosen again.
    """

    rows: Int64Array  # of the samples that receive a token; those that decode are the first
    generations: Int64Array  # of these rows then
    sent: Sent | None  # their tokens and log-probabilities; None without rows
    likeliest: Told | None
    prompts: list[ScoredTokens]
    version: int  # of the weights
    branches: list[tuple[int, Sample]]  # (row of the logits, branch of a beam search)
    logits: Tensor | None  # of a step with branches
    decoded: Int64Array  # places of the leading rows in the packed tokens
    routing: StepRouting | None


class TokenSteps:
    """The steps of one engine, which calls `run` when weights and KV cache are ready.

    With a depth above 0, a step is launched before the results of the one before are read, so that
    the device does not wait for the host. Everything that the host launches runs in the order of
    one stream: whoever gets the row or the pages of a sample that has ended writes to them after
    it. What does not run in that order, or needs the results, calls `drain` first.

    Args:
        scheduler: Chooses the samples of each step, and receives their tokens.
        runner: Computes the steps.
        store: The weights, whose version each token records.
        depth: Number of steps that may stay under way when `run` returns.

    Attributes:
        under_way: The steps whose results are not read, in the order of their launches.
        waited: Seconds for which results were waited for since `run` began.
    """

    def __init__(
        self, scheduler: Scheduler, runner: ModelRunner, store: WeightStore, depth: int
    ) -> None:
        self._scheduler, self._runner, self._store = scheduler, runner, store
        self._rows = scheduler.rows
        self.depth = depth
        self.under_way = deque[Launched]()
        self.waited = 0.0
        self._suspects = frozenset[Sample]()  # the samples of the last step, if it failed

    def run(self, prompts: PromptSource) -> None:
        """Launch a forward of the samples that the scheduler chooses, and read earlier results.

        The next tokens of beam searches and of a split are chosen on the host, and penalties are
        counted there, so such steps are read at once. If the step fails, the running samples start
        over, because pages were allocated for tokens that were not computed. Samples of two failed
        steps in a row end with the error.

        Args:
            prompts: Present source of the keys and values of prompts.

        Raises:
            BaseException: The step failed before samples were chosen, the error is no `Exception`,
                or other ranks share the model, which cannot continue without this rank.
        """
        step, self.waited = None, 0.0
        try:
            step = self._scheduler.schedule(self._collect_all)
            prompts.ask(step)
            depth = 0
            if step.decode or step.chunks:
                launched = self._launch(step, prompts)
                self.under_way.append(launched)
                waits = launched.branches or self._rows.looking_back[launched.rows].any()
                depth = self.depth if prompts.overlap and not waits else 0
            self._collect_until(depth)
        except BaseException as error:
            self._start_over()
            if step is None or not isinstance(error, Exception) or self._runner.ranks.size > 1:
                raise
            self._blame(step.samples, error)
        else:
            self._suspects = frozenset()

    def drain(self) -> None:
        """Read the results of the steps under way.

        Raises:
            BaseException: They could not be read. The running samples start over.
        """
        try:
            self._collect_all()
        except BaseException:
            self._start_over()
            raise

    def not_finite(self, sample: Sample) -> FloatingPointError:
        """Return the error of a sample whose last log-probability was not finite."""
        text = f"a log-probability of sample {sample.name} is not finite after "
        text += f"{len(sample.output)} tokens of version {self._store.last_version}"
        if names := self._store.not_finite():
            return FloatingPointError(
                f"{text}: NaN or infinity in {shorten(names)}; load or sync finite weights"
            )
        return FloatingPointError(
            f"{text}: the weights are finite, so values exceeded the range of the dtype of the "
            f"engine or of its KV cache; use dtype bfloat16 or float32 and kv_cache_dtype auto"
        )

    def _collect_all(self) -> bool:
        """Read the results of the steps under way, and return whether there were any."""
        launched = bool(self.under_way)
        self._collect_until(0)
        return launched

    def _collect_until(self, left: int) -> None:
        """Read results until `left` steps are under way; after an error, none is."""
        while len(self.under_way) > left:
            try:
                self._collect(self.under_way.popleft())
            except BaseException:
                self.under_way.clear()  # later tokens follow those that were lost
                raise

    def _start_over(self) -> None:
        """Preempt all running samples after an error; results of earlier steps are read first."""
        with contextlib.suppress(Exception):
            self._collect_all()
        for sample in self._scheduler.unfinished:
            if sample.scores is not None and len(sample.scores.rows) < len(sample.prompt) - 1:
                sample.scores.lose()
        with contextlib.suppress(Exception):
            self._runner.wait()  # kernels may still write to the memory of dropped results
        self._scheduler.preempt_all()

    def _blame(self, samples: Sequence[Sample], error: Exception) -> None:
        """End the samples of a failed step that were in the failed step before it, too."""
        guilty = [sample for sample in samples if sample in self._suspects]
        self._suspects = frozenset(samples)
        text = "a step of samples %s failed, and %d of them end: %s: %s"
        _log.warning(text, names_of(samples), len(guilty), type(error).__name__, str(error))
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
        at, rows = np.arange(len(step.rows)), step.rows
        if step.chunks:
            begun = self._begin_answers(step, prompts)
            at = np.concatenate([at, np.array([place for place, _ in begun], dtype=np.int64)])
            rows = np.concatenate([rows, np.array([row for _, row in begun], dtype=np.int64)])
        if (searching := self._rows.searching[rows]).any():
            places = zip(at[searching].tolist(), rows[searching].tolist(), strict=True)
            branches = [(place, self._rows.sample(row)) for place, row in places]
            at, rows = at[~searching], rows[~searching]
        else:
            branches = []
        return Launched(
            rows=rows,
            generations=self._rows.generation[rows],
            sent=self._runner.sample(logits, at, rows) if len(rows) else None,
            likeliest=self._likeliest(logits, at, rows),
            prompts=self._score(step),
            version=self._store.last_version,
            branches=branches,
            logits=logits if branches else None,
            decoded=at[at < len(step.rows)],
            routing=routing,
        )

    def _likeliest(self, logits: Tensor, at: Int64Array, rows: Int64Array) -> Told | None:
        """Start to find the likeliest tokens of the rows that tell them."""
        places = np.flatnonzero(self._rows.top[rows])
        if not len(places):
            return None
        return Told(places, self._runner.likeliest(logits, at[places], rows[places]))

    def _score(self, step: Step) -> list[ScoredTokens]:
        """Start to score the prompts of which this is asked."""
        scored, place, states = [], len(step.rows), self._runner.take_states()
        for chunk in step.chunks:
            sample, first = chunk.sample, chunk.start
            count = sample.params.prompt_logprobs
            following = sample.prompt[first + 1 : first + chunk.length + 1]
            if count is not None and following:
                assert states is not None, "prompts are computed"
                sent = self._runner.score(states, place, following, count)
                scored.append(ScoredTokens(sample, first, sent))
            place += chunk.length
        return scored

    def _begin_answers(self, step: Step, prompts: PromptSource) -> list[tuple[int, int]]:
        """Fork the samples whose prompts are computed now; return (row of the logits, row)."""
        begun = []
        last = (chunk.sample for chunk in step.chunks if chunk.last)
        for place, sample in enumerate(last, start=len(step.rows)):
            prompts.computed(sample)
            family = sample, *self._scheduler.fork_siblings(sample)
            begun += [(place, member.row) for member in family]
        return begun

    def _collect(self, launched: Launched) -> None:
        """Wait for the tokens of a launched step, and add them to its samples."""
        if launched.routing is not None:
            launched.routing.arrive()
        for sample, first, sent in launched.prompts:
            assert sample.scores is not None
            pairs = zip(*(part.tolist() for part in sent.arrays()), strict=True)
            sample.scores.add(first, [list(zip(*pair, strict=True)) for pair in pairs])
        if launched.logits is not None:
            self._branch(launched.logits, launched.branches, launched.version)
        if launched.sent is not None:
            began = time.perf_counter()
            tokens, logprobs = launched.sent.arrays()
            self.waited += time.perf_counter() - began
            known = self._rows.generation[launched.rows] == launched.generations
            if launched.routing is not None:
                decoded = zip(launched.rows, launched.decoded, strict=False)
                for row, place in compress(decoded, known):
                    sample, experts = self._rows.sample(row), launched.routing.experts
                    sample.routing.add(sample.seen - 1, experts[place : place + 1])
            if launched.likeliest is not None:
                self._add_likeliest(launched.likeliest, launched.rows, known)
            self._scheduler.receive(
                launched.rows[known], tokens[known], logprobs[known], launched.version
            )

    def _add_likeliest(self, told: Told, rows: Int64Array, known: NDArray[np.bool_]) -> None:
        for place, *found in zip(told.places, *told.sent.arrays(), strict=True):
            if known[place]:
                sample = self._rows.sample(rows[place])
                best = list(zip(*(part.tolist() for part in found), strict=True))
                sample.top.append(best[: sample.params.top_logprobs])

    def _branch(self, logits: Tensor, members: Sequence[tuple[int, Sample]], version: int) -> None:
        """Advance every beam search by one token. All branches of a search are in the same step."""
        searches = (branch.beams for _, branch in members)
        groups = list(dict.fromkeys(search for search in searches if search is not None))
        count = max(group.search.num_candidates for group in groups)
        places = np.array([row for row, _ in members])
        ranked = self._runner.candidates(logits, places, count)
        candidates = {branch: row for (_, branch), row in zip(members, ranked, strict=True)}
        for group in groups:
            likeliest = [candidates[branch] for branch in group.members]
            self._scheduler.branch(group, likeliest, version)
