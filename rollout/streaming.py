"""An engine that takes new requests between the steps of running ones, for servers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from memsaver.system.interrupts import deliver, held
from rollout.engine import Engine
from rollout.requests import Completion, SamplingParams
from rollout.serving.samples import Sample
from rollout.weights.update import require_active

Ended = dict[str, list[Completion] | ValueError | FloatingPointError]


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A new request of a `StreamingEngine`.

    Attributes:
        key: Name of the request, unique among the unfinished ones.
        prompt: Token ids.
        params: Sampling parameters.
    """

    key: str
    prompt: Sequence[int]
    params: SamplingParams


class StreamingEngine(Engine):
    """An `Engine` whose caller runs the steps, and adds requests between them.

    `generate` and `advance` exclude each other while requests of `advance` are unfinished. Ranks of
    a tensor-parallel engine make the same calls of `advance` with the same arguments.
    """

    @cached_property
    def _opened(self) -> dict[str, list[Sample]]:
        """Samples of the unfinished requests, by key."""
        return {}

    def advance(
        self, arrivals: Sequence[Arrival] = (), *, cancelled: Iterable[str] = (), steps: int = 1
    ) -> Ended:
        """Queue and cancel requests, then run steps until a request ends.

        A cancelled request ends with its present answers; an unknown key is ignored.

        Args:
            arrivals: New requests.
            cancelled: Keys of requests to end.
            steps: Maximum number of steps.

        Returns:
            The samples of each request that has ended, by key; or a ValueError if it can never be
            answered, or a FloatingPointError if a log-probability of it is not finite.

        Raises:
            ValueError: A key is in use by an unfinished request or twice in `arrivals`. Nothing
                changed.
            StateError: Names why the engine is unavailable. No request is left, as after any error.
            RankError: A tensor-parallel rank failed or did not answer; restart all ranks.
        """
        opened = self._opened
        names = Counter(arrival.key for arrival in arrivals) + Counter(opened.keys())
        if twice := [arrival.key for arrival in arrivals if names[arrival.key] > 1]:
            rule = "is the key of an unfinished request; give each request a key of its own"
            raise ValueError(f"arrival {twice[0]!r} {rule}")
        with held():
            try:
                if not self.scheduler.running:
                    self._require_current(together=True)
                ended = self._admit(arrivals)
                for key in cancelled:
                    self.scheduler.abort(opened.get(key, ()))
                ended |= self._take_ended()
                for _ in range(steps):
                    if ended or not opened:
                        break
                    self._step()
                    ended |= self._take_ended()
                    deliver()
            except BaseException as error:
                self._abandon([*chain.from_iterable(opened.values())], error)
                opened.clear()
                raise
        return ended

    def _admit(self, arrivals: Sequence[Arrival]) -> Ended:
        """Queue new requests, and return the errors of those that can never be answered."""
        refused: Ended = {}
        for arrival in arrivals:
            try:
                self._intake.check("the prompt", arrival.prompt, arrival.params)
            except ValueError as error:
                refused[arrival.key] = error
            else:
                self._opened[arrival.key] = self._submit(arrival.prompt, arrival.params)
        return refused

    def _take_ended(self) -> Ended:
        ended: Ended = {}
        for key, samples in [*self._opened.items()]:
            if (error := self._not_finite(samples)) is not None:
                self.scheduler.abort(samples)
                ended[key] = error
                del self._opened[key]
            elif all(sample.finish_reason is not None for sample in samples):
                ended[key] = [sample.completion() for sample in samples[: samples[0].params.n]]
                del self._opened[key]
        return ended

    def forget_prefixes(self) -> None:
        """Let no later request use the prefixes that are cached now."""
        self.prefixes.new_weights()

    def digest(self) -> int:
        """Read the weights in memory.

        Returns:
            The digest of all parameters.

        Raises:
            StateError: The weights sleep.
        """
        require_active(self.saver, self.store.tag, "read the weights")
        return self.store.digest()
