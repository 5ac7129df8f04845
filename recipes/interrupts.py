"""Ctrl-C, and a job being stopped: both end a run with what was done written down."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def interrupts() -> Iterator[list[int]]:
    """Inside, SIGINT and SIGTERM raise KeyboardInterrupt; the list holds the numbers of those that
    came.

    A library may turn the KeyboardInterrupt that it lets pass into an error of its own; the list
    still tells. Python handles signals in the main thread only: off it nothing is changed, and
    whoever owns the main thread sees to them.
    """
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return

    def note(number: int, frame: object) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
