"""Signals that interrupt work at a moment that a test chooses."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from typing import Any

from tests.helpers.memory import uncollected


class Hit(KeyboardInterrupt):
    """Raised by the handler, as by Python's own at Ctrl-C."""


def interrupted(work: Callable[[], Any], seconds: float) -> bool:
    """Return whether a timer's signal interrupted the work `seconds` after its start."""
    received: list[int] = []

    def handler(number: int, frame: object) -> None:
        received.append(number)
        raise Hit

    # pytest-timeout uses the same timer
    limit, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    before = signal.signal(signal.SIGALRM, handler)
    # an interrupt in a finalizer would miss the work
    with uncollected(), contextlib.suppress(Hit):
        signal.setitimer(signal.ITIMER_REAL, seconds)
        work()
        signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    signal.setitimer(signal.ITIMER_REAL, limit)
    return bool(received)
