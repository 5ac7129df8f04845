"""Delay signal handlers, such as Ctrl-C's, until a memory operation has ended.

Python runs signal handlers in the main thread, between any two of its instructions, and most of
them raise. In the middle of a pause, that would leave extents both behind a tag and in the page
pool, or in neither. So inside ``held`` a gate replaces every handler that is written in Python: it
notes the signal, and the handler is called when the operation has ended, complete or undone. A gate
belongs to one handler forever, because a newer handler may save it and call it as its predecessor:
calls go from newer handlers to older ones, so they end. Long waits call ``deliver`` where an
exception does no harm. Signals that Python does not handle (the kernel's default, handlers in C)
act immediately, as usual.

A handler that raises in the middle of a finalizer would end it, too: ``weakref.finalize`` has
already forgotten the call, so the resource would leak. A ``Finalizer`` here only notes the death,
in C, and its call is made where signals wait: immediately, or, if an interrupt came first, when
another object dies or ``call_due`` is called.
"""

import contextlib
import os
import signal
import sys
import threading
import weakref

# The C functions: those of `signal` look every handler up in an enum, 2 us each.
from _signal import getsignal
from _signal import signal as set_handler
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any, Generic, TypeVar

_SIGNALS = (  # sent to programs by users, schedulers and timers
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2),
    *(signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGXCPU),
)
_Value = TypeVar("_Value")
_Handler = Callable[[int, FrameType | None], Any]

# State of the main thread.
_main = threading.main_thread().ident
_depth = 0  # nesting of ``held``
# ``Unbroken`` contexts that it has entered and no thread has left: gates stay while there are any
_open: set[weakref.ref[Any]] = set()
_noted: "deque[tuple[_Gate, int]]" = deque()
_gates: "dict[int, _Gate]" = {}  # the newest gate of each signal
_chains: "list[list[_Gate]]" = []  # the gates passed by each signal whose handler is running
# Dead references whose finalizers are due, and every finalizer by the id of its reference.
_due: deque[weakref.ref[Any]] = deque()
_calls: "dict[int, Finalizer]" = {}


class held(contextlib.ContextDecorator):
    """Context manager or decorator that delays handlers to its end, where they may raise.

    Nested uses end with the outermost. It takes some 3 us in the main thread and does nothing in
    other threads.
    """

    def __enter__(self) -> None:
        if threading.get_ident() == _main:
            _hold()

    def __exit__(self, *error: object) -> None:
        if threading.get_ident() == _main:
            _release()


def deliver() -> None:
    """Call the delayed handlers now, unless ``held`` is nested.

    To be used inside ``held``, where an exception does no harm.
    """
    if _noted and _depth == 1 and threading.get_ident() == _main:
        _call_noted()


class Unbroken(Generic[_Value]):
    """Context manager whose enter and exit cannot be interrupted, unlike its body.

    Any thread may leave it: a generator suspended in its body is closed by the thread that drops
    the generator.
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
        except BaseException:  # an interrupt on entry: no ``with`` block will exit it
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
        except BaseException:  # from a handler that has no gate yet
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
    """A signal handler that stands in for ``handler``, and calls it immediately or delayed.

    ``before`` is the handler of the signal's previous gate.
    """

    def __init__(self, handler: _Handler, before: _Handler | None) -> None:
        self.handler = handler
        self._before = before

    def __call__(self, number: int, frame: FrameType | None) -> None:
        by_handler = sys._getframe(1) is not frame  # a newer handler calls its predecessor
        if by_handler and _chains:
            self.let_through(number, frame, _chains[-1])
        elif _depth or (frame is not None and frame.f_code in _ENDING):
            _noted.append((self, number))
        else:  # in the body of an ``Unbroken``, or while gates are installed or removed
            own = by_handler and getsignal(number) == self.handler
            self.let_through(number, frame, [self] if own else [])

    def let_through(self, number: int, frame: FrameType | None, chain: "list[_Gate]") -> None:
        """Call the handler of a signal that has passed the gates of ``chain``."""
        # a handler that saved its own gate as its predecessor would call itself: call the older one
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
"""Code that may run after the body of an ``Unbroken`` but before ``_depth`` is raised."""


def _close_gates() -> None:
    for number in _SIGNALS:
        handler = getsignal(number)
        if callable(handler) and not isinstance(handler, _Gate):
            gate = _gates.get(number)
            if gate is None or gate.handler != handler:
                gate = _gates[number] = _Gate(handler, gate.handler if gate else None)
            set_handler(number, gate)


def _open_gates() -> None:
    for number in tuple(_gates):
        gate = getsignal(number)
        if isinstance(gate, _Gate):  # not replaced by another handler meanwhile
            set_handler(number, gate.handler)


def _after_fork() -> None:
    global _main, _depth
    _main, _depth = threading.get_ident(), 0
    _open.clear()
    _noted.clear()
    _open_gates()


os.register_at_fork(after_in_child=_after_fork)


class Finalizer:
    """A call that is made once, when ``target`` dies or this object is called; never at exit.

    It runs in any thread, under any lock, so ``call`` must not wait for a thread or take a lock.
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
    """Call the finalizers of objects that have died, in any thread and under any lock."""
    if _due and not sys.is_finalizing():  # at exit nothing can be imported, or waited for
        _call_due()


@held()
def _call_due() -> None:
    while _due:
        if (finalizer := _calls.get(id(_due.popleft()))) is not None:
            finalizer()
