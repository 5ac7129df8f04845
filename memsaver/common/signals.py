"""Ctrl-C waits until what was begun with memory has ended.

Python runs signal handlers in the main thread, between any two of its instructions, and most raise:
in the middle of a pause, extents would be behind a tag and in the page pool, or in neither. So
while ``held`` lasts a gate stands in for every handler that is written in Python: it notes the
signal, and the handler is called when the operation has ended, whole or undone. Long waits call
``deliver`` where an exception does no harm. Signals that Python does not handle (the kernel's
default, handlers in C) act at once, as ever.

A handler that raises in the middle of a finalizer would end it, too: ``weakref.finalize`` has
forgotten the call by then, and what it was to give back is lost. A ``Finalizer`` here is a function
in C that notes the death, and what was noted is called where signals wait: at once, or, where an
interrupt came in between, when something else dies or ``call_due`` is called.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any, Generic, TypeVar

_SIGNALS = (  # what is sent to programs, and what their timers send
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2),
    *(signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGXCPU),
)
_Value = TypeVar("_Value")

# All of this is the main thread's own.
_main = threading.main_thread().ident
_depth = 0  # how many ``held`` it is in
_open = 0  # how many ``Unbroken`` it is in: the gate stays
_noted: deque[int] = deque()
# what the gate stands, or once stood, in for
_handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
# of finalizers
_due: deque[weakref.ref[Any]] = deque()
_calls: dict[int, Finalizer] = {}  # by id of the reference that is noted


class held(contextlib.ContextDecorator):
    """Context manager or decorator: inside, no handler runs; then those due do, and may raise.

    Nested uses end with the outermost. Takes some 20 us, in the main thread alone.
    """

    def __enter__(self) -> None:
        if threading.get_ident() == _main:
            _hold()

    def __exit__(self, *error: object) -> None:
        if threading.get_ident() == _main:
            _release()


def deliver() -> None:
    """Inside one ``held`` and no other, where an exception does no harm: call what is to run."""
    if _noted and _depth == 1 and threading.get_ident() == _main:
        _call_noted()


class Unbroken(Generic[_Value]):
    """A context manager whose ends no interrupt cuts short; what is between them it may."""

    def __init__(self, inner: contextlib.AbstractContextManager[_Value]) -> None:
        self._inner = inner

    def __enter__(self) -> _Value:
        entered = False
        try:
            with held():
                value = self._inner.__enter__()
                _count(1)
                entered = True
            return value
        except BaseException:  # of the interrupt that came meanwhile: nobody else would end it
            if entered:
                self.__exit__(*sys.exc_info())
            raise

    def __exit__(self, *error: Any) -> bool | None:
        with held():
            _count(-1)
            return self._inner.__exit__(*error)


def _count(more: int) -> None:
    global _open
    if threading.get_ident() == _main:
        _open = max(0, _open + more)  # it is 0 in a child that was forked in between


def _hold() -> None:
    global _depth
    if not _depth and not _open:
        _close_gate()
    _depth += 1


def _release() -> None:
    global _depth
    _depth -= 1
    if not _depth:
        if not _open:
            _open_gate()
        _call_noted()


def _call_noted() -> None:
    while _noted:
        number = _noted.popleft()
        _handlers[number](number, sys._getframe(2))


def _gate(number: int, frame: FrameType | None) -> None:
    if _depth or (frame is not None and frame.f_code in _ENDING):
        _noted.append(number)
    else:  # between the ends of an ``Unbroken``, or as the gate was put up or taken down
        _handlers[number](number, frame)


_ENDING = {function.__code__ for function in (Unbroken.__exit__, held.__enter__, _hold)}
"""Until ``_depth`` says so: what runs between the last instruction of an ``Unbroken``'s body and
that.
"""


def _close_gate() -> None:
    for number in _SIGNALS:
        handler = signal.getsignal(number)
        if callable(handler) and handler is not _gate:
            _handlers[number] = handler
            signal.signal(number, _gate)


def _open_gate() -> None:
    for number, handler in tuple(_handlers.items()):
        if signal.getsignal(number) is _gate:  # nobody has put another one there meanwhile
            signal.signal(number, handler)


def _after_fork() -> None:
    global _main, _depth, _open
    _main, _depth, _open = threading.get_ident(), 0, 0
    _noted.clear()
    _open_gate()


os.register_at_fork(after_in_child=_after_fork)


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
