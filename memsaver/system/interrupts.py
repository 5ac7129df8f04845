"""Ctrl-C waits until what was begun with memory has ended.

Python runs signal handlers in the main thread, between any two of its instructions, and most raise:
in the middle of a pause, extents would be behind a tag and in the page pool, or in neither. So
while ``held`` lasts a gate stands in for every handler that is written in Python: it notes the
signal, and the handler is called when the operation has ended, whole or undone. Each gate stands in
for one handler, for good, so a handler that calls "the one before" may find a gate there and keep
it: calls go from newer handlers to older ones, and end. Long waits call
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
_Handler = Callable[[int, FrameType | None], Any]

# All of this is the main thread's own.
_main = threading.main_thread().ident
_depth = 0  # how many ``held`` it is in
# the ``Unbroken`` that it has entered, whoever leaves them: the gates stay
_open: set[weakref.ref[Any]] = set()
_noted: deque[tuple[_Gate, int]] = deque()
_gates: dict[int, _Gate] = {}  # the newest of each signal
_chains: list[list[_Gate]] = []  # of the signals whose handlers run
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
    """A context manager whose ends no interrupt cuts short; what is between them it may.

    Any thread may leave it: a generator that is inside is closed by whoever drops it.
    """

    def __init__(self, inner: contextlib.AbstractContextManager[_Value]) -> None:
        self._inner = inner
        self._mark: weakref.ref[Any] | None = None

    def __enter__(self) -> _Value:
        entered = False
        try:
            with held():
                value = self._inner.__enter__()
                if threading.get_ident() == _main:
                    self._mark = weakref.ref(self, _open.discard)
                    _open.add(self._mark)
                entered = True
            return value
        except BaseException:  # of the interrupt that came meanwhile: nobody else would end it
            if entered:
                self.__exit__(*sys.exc_info())
            raise

    def __exit__(self, *error: Any) -> bool | None:
        with held():
            if self._mark is not None:
                _open.discard(self._mark)
            return self._inner.__exit__(*error)


def _hold() -> None:
    global _depth
    _depth += 1
    if _depth == 1:
        try:
            _close_gates()
        except BaseException:  # of a handler that no gate stands in for yet
            _depth = 0
            raise


def _release() -> None:
    global _depth
    _depth -= 1
    if not _depth:
        if not _open:
            _open_gates()
        _call_noted()


def _call_noted() -> None:
    while _noted:
        gate, number = _noted.popleft()
        gate.let_through(number, sys._getframe(2), [])


class _Gate:
    """Stands in for ``handler``. before: what the gate before it stands in for."""

    def __init__(self, handler: _Handler, before: _Handler | None) -> None:
        self.handler = handler
        self._before = before

    def __call__(self, number: int, frame: FrameType | None) -> None:
        by_handler = sys._getframe(1) is not frame  # which calls the one before it
        if by_handler and _chains:
            self.let_through(number, frame, _chains[-1])
        elif _depth or (frame is not None and frame.f_code in _ENDING):
            _noted.append((self, number))
        else:  # between the ends of an ``Unbroken``, or as gates are put up or taken down
            own = by_handler and signal.getsignal(number) == self.handler
            self.let_through(number, frame, [self] if own else [])

    def let_through(self, number: int, frame: FrameType | None, chain: list[_Gate]) -> None:
        """Call the handler. chain: gates that this signal has come through so far."""
        # a handler that took the gate for another one calls itself: it means the one before
        handler = (self.handler, self._before, None)[min(chain.count(self), 2)]
        chain.append(self)
        _chains.append(chain)
        try:
            if handler is not None:
                handler(number, frame)
        finally:
            _chains.pop()
            chain.pop()


_ENDING = {function.__code__ for function in (Unbroken.__exit__, held.__enter__, _hold)}
"""Until ``_depth`` says so: what runs between the last instruction of an ``Unbroken``'s body and
that.
"""


def _close_gates() -> None:
    for number in _SIGNALS:
        handler = signal.getsignal(number)
        if callable(handler) and not isinstance(handler, _Gate):
            gate = _gates.get(number)
            if gate is None or gate.handler != handler:
                gate = _gates[number] = _Gate(handler, gate.handler if gate else None)
            signal.signal(number, gate)


def _open_gates() -> None:
    for number in tuple(_gates):
        gate = signal.getsignal(number)
        if isinstance(gate, _Gate):  # nobody has put another handler there meanwhile
            signal.signal(number, gate.handler)


def _after_fork() -> None:
    global _main, _depth
    _main, _depth = threading.get_ident(), 0
    _open.clear()
    _noted.clear()
    _open_gates()


os.register_at_fork(after_in_child=_after_fork)


class Finalizer:
    """``call`` when ``target`` dies, or when this is called, whichever is first; never at exit.

    It runs in any thread, under any lock, so ``call`` must wait for no thread and take no lock.
    """

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
    if _due and not sys.is_finalizing():  # at the end nothing can be imported, or waited for
        _call_due()


@held()
def _call_due() -> None:
    while _due:
        if (finalizer := _calls.get(id(_due.popleft()))) is not None:
            finalizer()
