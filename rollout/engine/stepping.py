"""Engines that are stepped: requests come and go between steps, and `generate` is a client."""

import contextlib
import threading
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from memsaver import StateError
from memsaver.system.interrupts import deliver, held
from memsaver.system.replaced import having
from memsaver.types import check_choice
from rollout.engine.engine_base import SaverSide
from rollout.engine.step_decisions import StepDecision, StepDecisions
from rollout.requests import Completion, Output, Progress, SamplingParams, for_each

Asleep = Literal["queue", "refuse"]
"""Whether a request is queued or refused while the engine cannot generate."""


class SteppedEngine(SaverSide):
    """Engine whose caller runs the steps, and submits requests between them.

    Of ranks that share a model, the first decides: only there are requests submitted, aborted and
    stepped. The others call `follow` beside each call of `step` or `generate`. All other methods
    are called on every rank, between these calls.

    Attributes:
        decisions: What the first rank decides for all.
        ends_only: Whether `step` tells first tokens and ends only. What is new of other samples is
            kept until then, and costs nothing.
        owner: Thread of the `EngineLoop` that alone may submit, abort and step; None: any thread.
    """

    decisions: StepDecisions
    ends_only = False
    owner: int | None = None
    _stepped_by = ""  # the call that steps the engine now

    @property
    def idle_seconds(self) -> float:
        """Return how long the last step waited for the device, as far as the engine knows."""
        return 0.0

    @property
    @abstractmethod
    def unfinished(self) -> list[int]:
        """Return the numbers of the requests whose last outputs `step` has not returned."""

    @abstractmethod
    def unavailable_reason(self) -> str | None:
        """Return why a step would raise a StateError now; None if the engine is available."""

    def prepare(self, params: SamplingParams) -> None:
        """Do what takes long before a request, in any thread; later requests need not.

        Args:
            params: The request's sampling parameters.

        Raises:
            ValueError: The engine cannot follow them, as `submit` says, too.
        """

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
    def _drop(self, ids: Sequence[int]) -> None:
        """End requests of which nothing is told; the call that submitted them has failed."""

    @abstractmethod
    def _requeue(self) -> None:
        """Let running requests wait, without keys and values; raise a StateError if it cannot."""

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
        asleep: Asleep = "queue",
        name: str = "the prompt",
    ) -> int:
        """Queue a request, which later calls of `step` answer.

        Args:
            prompt: Token ids.
            params: Sampling parameters.
            stream: Tell each token in the step that generates it; False: all at the sample's end.
            asleep: Whether a request is queued or refused while the engine cannot generate.
            name: What errors call the prompt.

        Returns:
            The number of the request, which no other request has.

        Raises:
            ValueError: The prompt is invalid or can never fit. Nothing changed, as after any error.
            StateError: The engine cannot generate and `asleep` is "refuse", or it has failed for
                good, or a call of `generate` steps it, or this is not its first rank.
        """
        check_choice("asleep", asleep, Asleep)
        self.decisions.require_first("submit")
        self._require_own_steps("submit")
        self._check(name, prompt, params)
        refused = asleep == "refuse" or not self.decisions.possible
        if refused and (reason := self.unavailable_reason()):
            raise StateError(f"cannot generate: {reason}")
        return self._submit(prompt, params, stream)

    def _submit(self, prompt: Sequence[int], params: SamplingParams, stream: bool) -> int:
        id = self._enqueue(prompt, params, stream)
        self.decisions.request(prompt, params, stream)
        return id

    @held()
    def abort(self, id: int) -> None:
        """End a request; the next `step` returns its last outputs, without running.

        Args:
            id: Number of the request.

        Raises:
            ValueError: No request has this number, or its last output was returned.
            StateError: This is not the engine's first rank.
        """
        self.decisions.require_first("abort")
        self._require_owner("abort")
        if id not in self.unfinished:
            raise ValueError(f"request {id} is unknown or has ended; nothing was aborted")
        self._abort([id])
        self.decisions.abort([id])

    @held()
    def requeue(self) -> None:
        """Let running requests wait; later steps compute their prompts and answers again.

        They keep the tokens that they have, and their keys and values are freed.

        Raises:
            StateError: A hosted engine cannot, or this is not the engine's first rank.
        """
        self.decisions.require_first("requeue")
        self._require_owner("requeue")
        self._requeue()
        self.decisions.requeue()

    @held()
    def step(self) -> list[Output]:
        """Compute the next token of every running sample, or a part of the prompts.

        On a GPU, the tokens are read in the next call, after its launches. A signal that Python
        handles, such as Ctrl-C, takes effect at the end of the step. Call this on one CUDA stream.

        Returns:
            What is new, in no particular order; may be empty.

        Raises:
            StateError: Names why the engine cannot generate; the requests wait. Or a callback of a
                step, or of `generate`, called this, or this is not the engine's first rank.
            RankError: A tensor-parallel rank failed or did not answer; restart all ranks.
        """
        self.decisions.require_first("step")
        with self._stepping("step"):
            self.decisions.step()
            return self._advance()

    def leading(self) -> contextlib.AbstractContextManager[None]:
        """Let the other ranks follow all steps of a block in one call of `follow`.

        Returns:
            The context of the block, on the first rank. With one rank, it does nothing.
        """
        return self.decisions.leading()

    @held()
    def follow(self) -> list[Output]:
        """Run the steps of the first rank's next `step`, `generate` or block of `leading`.

        Every other rank calls this once for each of these.

        Returns:
            The outputs of these steps, which are the first rank's.

        Raises:
            StateError: This is the first rank. Or names why this rank cannot generate; the first
                rank raises a StateError, too.
            RankError: A tensor-parallel rank failed or did not answer; restart all ranks.
        """
        self.decisions.require_following()
        return self._follow()[0]

    def obey(self, decision: StepDecision) -> list[Output]:
        """Do what the first rank decided, except for a call that the ranks make themselves."""
        for request in decision.requests:
            self._enqueue(*request)
        self._abort(decision.aborted)
        self._drop(decision.dropped)
        if decision.requeued:
            self._requeue()
        return self._advance() if decision.step else []

    def _follow(self) -> tuple[list[Output], bool]:
        """Do what the first rank decides until its call ends.

        Return the outputs, and whether the call failed.
        """
        outputs: list[Output] = []
        refused: StateError | None = None
        if not self.decisions.possible:
            raise StateError(f"cannot generate: {self.unavailable_reason()}")
        self.decisions.check_first()
        with self._stepping("follow"):
            while True:
                decision = self.decisions.receive()
                try:
                    outputs += self.obey(decision)
                except StateError as error:
                    if not self.decisions.possible:
                        raise
                    refused = error  # the first rank got one, too, and decides what follows
                if not decision.more:
                    break
        if refused is not None:
            raise refused
        return outputs, decision.failed

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        on_progress: Progress | None = None,
    ) -> list[list[Completion]]:
        """Continue every prompt `params.n` times: submit all, and step until they have ended.

        After any error, no request of this call is left in the engine. Ctrl-C, or another signal
        that Python handles, takes effect at the end of the present step. On a rank that is not the
        engine's first, this follows the first rank's call; its own arguments have no effect.

        Args:
            prompts: Token ids.
            params: Sampling parameters, for all prompts or one per prompt.
            on_progress: Callback after every step.

        Returns:
            The samples, [prompt][sample]; of a beam search the best `n`, best first.

        Raises:
            StateError: Names why the engine is unavailable, or requests of `submit` are unfinished.
                On another rank, the call of the first rank failed.
            ValueError: Names a prompt that is invalid or can never fit.
            FloatingPointError: A log-probability is not finite. Names the weights that are not, if
                any. Later requests use no prefix that is cached now.
            RankError: A tensor-parallel rank failed or did not answer; restart all ranks.
        """
        if self.decisions.following:
            return self._followed()
        with held(), self.leading(), self._stepping("generate"):
            if left := self.unfinished:
                raise StateError(
                    f"cannot generate: {len(left)} requests of submit are unfinished; step until "
                    f"they end, or abort them"
                )
            if reason := self.unavailable_reason():
                raise StateError(f"cannot generate: {reason}")
            pairs = list(zip(prompts, for_each(prompts, params), strict=True))
            for number, (prompt, param) in enumerate(pairs):
                self._check(f"prompt {number}", prompt, param)
            ids: list[int] = []
            try:
                for prompt, param in pairs:
                    ids.append(self._submit(prompt, param, on_progress is not None))
                total = sum(param.n for _, param in pairs)
                return joined(self._step_until_ended(total, on_progress))
            except BaseException:
                self._drop(ids)
                self.decisions.drop(ids)
                raise

    @held()
    def _followed(self) -> list[list[Completion]]:
        """Return the answers of the first rank's call of `generate`."""
        outputs, failed = self._follow()
        if failed:
            raise StateError("generate failed on the first rank of this engine; its error is there")
        return joined(outputs)

    def _step_until_ended(self, total: int, on_progress: Progress | None) -> list[Output]:
        """Run steps until `total` samples have ended."""
        outputs: list[Output] = []
        done = tokens = 0
        while done < total:
            self.decisions.step()
            for output in self._advance():
                if output.error is not None:
                    raise output.error
                outputs.append(output)
                done += output.finish_reason is not None
                tokens += len(output.token_ids)
            if on_progress is not None:
                on_progress(done, total, tokens)
            deliver()
        return outputs

    @contextlib.contextmanager
    def _stepping(self, call: str) -> Iterator[None]:
        self._require_own_steps(call)
        with having(self, _stepped_by=call):
            yield

    def _require_own_steps(self, call: str) -> None:
        """Raise a StateError in a step or a call of `generate`, or beside a loop of the engine."""
        self._require_owner(call)
        if self._stepped_by:
            raise StateError(
                f"cannot call {call} from a callback of {self._stepped_by}, whose steps would "
                f"answer it; call it when {self._stepped_by} has returned"
            )

    def _require_owner(self, call: str) -> None:
        """Raise a StateError in all threads but the owner."""
        if self.owner not in (None, threading.get_ident()):
            raise StateError(
                f"cannot call {call}: the thread of an EngineLoop steps this engine; use the "
                f"loop's submit and generate, or close the loop"
            )


def joined(outputs: Iterable[Output]) -> list[list[Completion]]:
    """Join outputs to samples, [request][sample], in the order of the requests' numbers."""
    by_sample: dict[tuple[int, int], list[Output]] = {}
    for output in outputs:
        by_sample.setdefault((output.id, output.sample), []).append(output)
    requests: dict[int, list[Completion]] = {}
    for (id, _), parts in sorted(by_sample.items(), key=lambda pair: pair[0]):
        requests.setdefault(id, []).append(Completion.joined(parts))
    return list(requests.values())
