"""Engines that are stepped: requests come and go between steps, and `generate` is a client."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from memsaver import StateError
from memsaver.system.interrupts import deliver, held
from rollout.engine_base import SaverSide
from rollout.requests import Completion, Output, Progress, SamplingParams, for_each


class SteppedEngine(SaverSide):
    """Engine whose caller runs the steps, and submits requests between them.

    Ranks that share a model make the same calls in the same order.
    """

    _stepped_by = ""  # the call that steps the engine now

    @property
    @abstractmethod
    def unfinished(self) -> list[int]:
        """Return the numbers of the requests whose last outputs `step` has not returned."""

    @abstractmethod
    def unavailable_reason(self) -> str | None:
        """Return why a step would raise a StateError now; None if the engine is available."""

    @abstractmethod
    def _require_ready(self) -> None:
        """Raise a StateError if the engine cannot generate; all ranks decide together."""

    @abstractmethod
    def _check(self, name: str, prompt: Sequence[int], params: SamplingParams) -> None:
        """Raise a ValueError, which calls the prompt `name`, if it can never be answered."""

    @abstractmethod
    def _enqueue(self, prompt: Sequence[int], params: SamplingParams, stream: bool) -> int:
        """Queue a checked request, and return its number."""

    @abstractmethod
    def _abort(self, ids: Sequence[int]) -> None:
        """End requests with their present answers, which the next step tells."""

    @abstractmethod
    def _abandon(self, ids: Sequence[int], error: BaseException) -> None:
        """End the requests of a call that failed, of which nothing is told."""

    @abstractmethod
    def _advance(self) -> list[Output]:
        """Run one step, and return what is new; without a step if requests have ended since."""

    @held()
    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        stream: bool = True,
        asleep: Literal["queue", "refuse"] = "queue",
    ) -> int:
        """Queue a request, which later calls of `step` answer.

        Args:
            prompt: Token ids.
            params: Sampling parameters.
            stream: Tell each token in the step that generates it; False: all at the sample's end.
            asleep: Whether a request is queued or refused while the engine cannot generate.

        Returns:
            The number of the request, which no other request has.

        Raises:
            ValueError: The prompt is invalid or can never fit. Nothing changed, as after any error.
            StateError: The engine cannot generate and `asleep` is "refuse", or a call of `generate`
                steps the engine.
        """
        if asleep not in ("queue", "refuse"):
            raise ValueError(f"asleep={asleep!r} must be queue or refuse")
        self._require_own_steps("submit")
        self._check("the prompt", prompt, params)
        if asleep == "refuse" and (reason := self.unavailable_reason()):
            raise StateError(f"cannot submit: {reason}")
        return self._enqueue(prompt, params, stream)

    @held()
    def abort(self, id: int) -> None:
        """End a request; the next `step` returns its last outputs, without running.

        Args:
            id: Number of the request.

        Raises:
            ValueError: No request has this number, or its last output was returned.
        """
        if id not in self.unfinished:
            raise ValueError(f"request {id} is unknown or has ended; nothing was aborted")
        self._abort([id])

    @held()
    def step(self) -> list[Output]:
        """Compute the next token of every running sample, or a part of the prompts.

        A signal that Python handles, such as Ctrl-C, takes effect at the end of the step.

        Returns:
            What is new, in no particular order; empty without a request.

        Raises:
            StateError: Names why the engine cannot generate; the requests wait. Or a callback of a
                step, or of `generate`, called this.
            RankError: A tensor-parallel rank failed or did not answer; restart all ranks.
        """
        with self._stepping("step"):
            return self._advance()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        on_progress: Progress | None = None,
    ) -> list[list[Completion]]:
        """Continue every prompt `params.n` times: submit all, and step until they have ended.

        After any error, no request of this call is left in the engine. Ctrl-C, or another signal
        that Python handles, takes effect at the end of the present step.

        Args:
            prompts: Token ids.
            params: Sampling parameters, for all prompts or one per prompt.
            on_progress: Callback after every step.

        Returns:
            The samples, [prompt][sample]; of a beam search the best `n`, best first.

        Raises:
            StateError: Names why the engine is unavailable, or requests of `submit` are unfinished.
            ValueError: Names a prompt that is invalid or can never fit.
            FloatingPointError: A log-probability is not finite. Names the weights that are not, if
                any. Later requests use no prefix that is cached now.
            RankError: A tensor-parallel rank failed or did not answer; restart all ranks.
        """
        if left := self.unfinished:
            raise StateError(
                f"cannot generate: {len(left)} requests of submit are unfinished; step until they "
                f"end, or abort them"
            )
        with held(), self._stepping("generate"):
            self._require_ready()
            pairs = list(zip(prompts, for_each(prompts, params), strict=True))
            for number, (prompt, param) in enumerate(pairs):
                self._check(f"prompt {number}", prompt, param)
            parts: dict[int, list[list[Output]]] = {}  # outputs of each sample, by request
            try:
                for prompt, param in pairs:
                    id = self._enqueue(prompt, param, on_progress is not None)
                    parts[id] = [[] for _ in range(param.n)]
                self._step_until_ended(parts, on_progress)
            except BaseException as error:
                self._abandon(list(parts), error)
                raise
        return [list(map(Completion.joined, samples)) for samples in parts.values()]

    def _step_until_ended(
        self, parts: Mapping[int, Sequence[list[Output]]], on_progress: Progress | None
    ) -> None:
        """Run steps until all samples of the requests have ended; sort their outputs into them."""
        total = sum(map(len, parts.values()))
        done = tokens = 0
        while done < total:
            for output in self._advance():
                if output.error is not None:
                    raise output.error
                parts[output.id][output.sample].append(output)
                done += output.finish_reason is not None
                tokens += len(output.token_ids)
            if on_progress is not None:
                on_progress(done, total, tokens)
            deliver()

    @contextlib.contextmanager
    def _stepping(self, call: str) -> Iterator[None]:
        self._require_own_steps(call)
        self._stepped_by = call
        try:
            yield
        finally:
            self._stepped_by = ""

    def _require_own_steps(self, call: str) -> None:
        """Raise a StateError inside a step, or inside a call of `generate`."""
        if self._stepped_by:
            raise StateError(
                f"cannot call {call} from a callback of {self._stepped_by}, whose steps would "
                f"answer it; call it when {self._stepped_by} has returned"
            )
