"""Answers of the next step, which engines of their own sample while the trainer learns.

Step s learns from answers that were begun under the weights before update s - 1. The sync after
that update came while they ran, so their later tokens are sampled by the weights after it.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from recipes.loops.sampling import Samples


class Drawn(NamedTuple):
    """Answers of a step, and the seconds in which they were sampled."""

    samples: Samples
    seconds: float


class Ahead:
    """The answers that are being sampled, of one step at most.

    Args:
        draw: Samples the answers of a step, from its number and the number of prompts that the
            steps before have drawn; called in a thread.
    """

    def __init__(self, draw: Callable[[int, int], Drawn]) -> None:
        self._draw = draw
        self._begun: dict[int, Future[Drawn]] = {}  # by step

    def begin(self, step: int, drawn: int) -> None:
        """Begin to sample the answers of a step."""
        future: Future[Drawn] = Future()
        self._begun = {step: future}
        args = (future, step, drawn)
        # A daemon: if the run ends, nobody waits for the answers.
        threading.Thread(target=self._run, args=args, name="ahead", daemon=True).start()

    def take(self, step: int) -> Drawn | None:
        """Wait for the answers of a step, or raise their error; None if they were not begun."""
        future = self._begun.pop(step, None)
        return None if future is None else future.result()

    def _run(self, future: Future[Drawn], step: int, drawn: int) -> None:
        try:
            future.set_result(self._draw(step, drawn))
        except BaseException as error:
            future.set_exception(error)
