"""Signals that come while something is done, at a moment that a test chooses."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from typing import Any

from tests.helpers.memory import uncollected


class Hit(KeyboardInterrupt):
    """What the handler raises, as Python's own does at Ctrl-C."""


def interrupted(work: Callable[[], Any], seconds: float) -> bool:
    """Whether the handler of a timer's signal raised, that many seconds after the work began."""
    came: list[int] = []

    def handler(number: int, frame: object) -> None:
        came.append(number)
        raise Hit

    # of pytest-timeout, which has the same timer
    limit, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    before = signal.signal(signal.SIGALRM, handler)
    # what finalizers are interrupted in is not the work
    with uncollected(), contextlib.suppress(Hit):
        signal.setitimer(signal.ITIMER_REAL, seconds)
        work()
        signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    signal.setitimer(signal.ITIMER_REAL, limit)
    return bool(came)
