"""A run that is asked to stop ends its step first, so that the step can be saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

_TEXT = "asked to stop: ends after this step, with a checkpoint; asked again, it ends immediately"


class Stopping:
    """Context manager: inside, the first SIGINT or SIGTERM is noted, and does what it did before
    when `leave` is called; a further one does so immediately.

    Python handles signals in the main thread only: off it nothing is changed.
    """

    def __init__(self, tell: Callable[[str], None] | None) -> None:
        """tell: shows a line to the user; None changes nothing either."""
        self._tell = tell
        self._noted: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if self._tell and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def asked(self) -> bool:
        return self._noted is not None

    def leave(self) -> None:
        """Have the signal that was noted, if any, do what it did before."""
        if self._noted is not None:
            self._act(self._noted, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._noted is not None:
            self._act(number, frame)
        self._noted = number
        # In a thread, as this one may be in the middle of printing.
        threading.Thread(target=self._tell, args=(_TEXT,), daemon=True).start()

    def _act(self, number: int, frame: FrameType | None) -> None:
        if callable(handler := self._before[number]):
            handler(number, frame)
        else:
            signal.signal(number, handler)
            signal.raise_signal(number)
