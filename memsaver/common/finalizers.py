"""Calls when objects die that no interrupt can swallow.

Python runs signal handlers at the first instruction of a finalizer, too. A handler that raises ends
it, ``weakref.finalize`` has forgotten the call by then, and what it was to give back is lost. Here
a function in C notes the death, and what was noted is called where signals wait: at once, or, where
an interrupt came in between, when something else dies or ``call_due`` is called.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from memsaver.common.signals import held

_due: deque[weakref.ref[Any]] = deque()
_calls: dict[int, Finalizer] = {}  # by id of the reference that is noted


class Finalizer:
    """``call`` when ``target`` dies, or when this is called, whichever is first; never at exit."""

    def __init__(self, target: Any, call: Callable[..., object], *args: Any) -> None:
        self._call, self._args = call, args
        # the newest reference's callback runs first
        self._second = weakref.ref(target, call_due)
        self._first = weakref.ref(target, _due.append)
        _calls[id(self._first)] = self

    def __call__(self) -> None:
        if _calls.pop(id(self._first), None) is not None:
            self._call(*self._args)


def call_due(_: object = None) -> None:
    """Call what belongs to objects that have died. Any thread may, under any lock."""
    if _due:
        _call_due()


@held()
def _call_due() -> None:
    while _due:
        if (finalizer := _calls.get(id(_due.popleft()))) is not None:
            finalizer()
