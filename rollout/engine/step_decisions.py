"""What the first rank of an engine decides for all of its ranks: requests, aborts and steps."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from memsaver import StateError
from memsaver.system.plain import Plain
from rollout.parallel import TensorParallel
from rollout.requests import SamplingParams


class StepDecision(NamedTuple):
    """News since the last decision, and whether they are followed by a step, and by another one.

    Attributes:
        requests: Prompt, parameters and `stream` of each new request, in order.
        aborted: Numbers of requests whose ends are told.
        dropped: Numbers of requests of which nothing is told.
        step: Whether all ranks run a step.
        more: Whether another decision belongs to the same call of the first rank.
        failed: Whether that call raised an error.
        requeued: Whether running requests wait and start over.
        call: Name of the call that every rank makes now, by its own arguments; empty: none.
    """

    requests: Sequence[tuple[list[int], SamplingParams, bool]]
    aborted: Sequence[int]
    dropped: Sequence[int]
    step: bool
    more: bool
    failed: bool
    requeued: bool
    call: str


_NEWS = Plain(SamplingParams)


class StepDecisions:
    """Collects what the first rank decides between steps, and sends it before the next step.

    Without other ranks, nothing is collected.
    """

    def __init__(self, ranks: TensorParallel) -> None:
        self._ranks = ranks
        self._leading = False
        self._requests: list[tuple[list[int], SamplingParams, bool]] = []
        self._aborted: list[int] = []
        self._dropped: list[int] = []
        self._requeued = False
        self._call = ""

    def require_first(self, call: str) -> None:
        """Raise a StateError on every rank but the first."""
        if self.following:
            place = f"rank {self._ranks.rank} of {self._ranks.size}"
            raise StateError(
                f"cannot call {call} on {place}: the first rank decides; call it there, and follow "
                f"here"
            )

    def require_following(self) -> None:
        """Raise a StateError on the first rank."""
        if not self.following:
            raise StateError("cannot call follow on the first rank, which decides; call step there")

    @property
    def following(self) -> bool:
        """Return whether this is not the first rank."""
        return self._ranks.rank > 0

    @property
    def possible(self) -> bool:
        """Return whether no rank has failed, so that the first one can send decisions."""
        return self._ranks.failure is None

    def check_first(self) -> None:
        """Raise a RankError if a rank has failed, before a wait for its decisions."""
        self._ranks.check_others()

    def require_outside(self, call: str) -> None:
        """Raise a StateError while other ranks follow, which would not make the same call."""
        if self._leading and self._ranks.size > 1:
            raise StateError(
                f"cannot {call} while the other ranks follow the steps of this one; do so on all "
                f"ranks, between two calls of generate or step"
            )

    @property
    def unsent(self) -> bool:
        """Return whether the other ranks do not know of requests or aborts."""
        return bool(self._requests or self._aborted or self._dropped)

    def request(self, prompt: Sequence[int], params: SamplingParams, stream: bool) -> None:
        if self._ranks.size > 1:
            self._requests.append((np.asarray(prompt).tolist(), params, stream))

    def abort(self, ids: Sequence[int]) -> None:
        if self._ranks.size > 1:
            self._aborted += ids

    def drop(self, ids: Sequence[int]) -> None:
        if self._ranks.size > 1:
            self._dropped += ids

    def requeue(self) -> None:
        self._requeued = True

    @contextlib.contextmanager
    def leading(self) -> Iterator[None]:
        """Let one call of `follow` on the other ranks last until the end of the block."""
        outer, self._leading, failed = self._leading, True, True
        try:
            yield
            failed = False
        finally:
            self._leading = outer
            if not outer:
                self._send(step=False, more=False, failed=failed)

    def step(self) -> None:
        """Send what is new, and a step."""
        self._send(step=True, more=self._leading)

    def call(self, name: str) -> None:
        """Send what is new, and that all ranks make a call of their own, see `EngineLoop.call`."""
        self._call = name
        self._send(step=False, more=False)

    def _send(self, step: bool, more: bool, failed: bool = False) -> None:
        """Send a decision, unless a rank has failed, which ends the engine."""
        if self._ranks.size == 1 or not self.possible:
            return
        news = self._requests, self._aborted, self._dropped, self._call
        self._requests, self._aborted, self._dropped, self._call = [], [], [], ""
        flags, self._requeued = [step, more, failed, self._requeued], False
        self._ranks.tell(_NEWS.text([*news]) if any(news) else "", flags)

    def receive(self, seconds: float | None = None) -> StepDecision:
        """Wait for the first rank's next decision; by default as long as the group waits."""
        text, flags = self._ranks.hear(4, seconds)
        requests, aborted, dropped, call = _NEWS.value(text) if text else ((), (), (), "")
        step, more, failed, requeued = map(bool, flags)
        return StepDecision(requests, aborted, dropped, step, more, failed, requeued, call)
