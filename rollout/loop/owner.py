"""A thread that owns an engine: what other threads want of it happens there, in turn."""

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from memsaver import StateError
from rollout.engine.stepping import SteppedEngine

_Value = TypeVar("_Value")
_log = logging.getLogger("rollout")


class OwnerThread(ABC):
    """Thread that alone uses an engine until it ends. Any thread may call its public methods."""

    def __init__(self, engine: SteppedEngine, on_turn: Callable[[], None] = lambda: None) -> None:
        """Start the thread, which calls `on_turn` after each thing that it does."""
        self.engine, self._on_turn = engine, on_turn
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._wanted: set[Future[Any]] = set()  # fail with the thread
        self._closing = False
        self._end: Exception | None = None  # of all calls after the end
        self._lock = threading.Lock()  # of the inbox and its end
        self._thread = threading.Thread(target=self._run, daemon=True, name="engine")
        self._thread.start()
        engine.owner = self._thread.ident

    @property
    def inside(self) -> bool:
        """Return whether the present thread is the one that owns the engine."""
        return self._thread is threading.current_thread()

    @property
    def ended(self) -> bool:
        """Return whether the thread takes no more calls."""
        return self._end is not None

    def call(self, function: Callable[[], _Value], shared: str = "") -> Future[_Value]:
        """Call a function of the engine between two of its steps.

        Args:
            function: The function; it may take as long as it wants.
            shared: Name of a call that every rank of the engine makes, each on its own loop. All
                ranks make it between the same two steps, when the first rank does. Empty: the
                function changes nothing that other ranks must change, too.

        Returns:
            The function's result, or its error; a StateError once the loop is closed.
        """
        future: Future[_Value] = Future()
        self._put(partial(self._call, future, function, shared), future)
        return future

    @abstractmethod
    def _call(self, future: Future[Any], function: Callable[[], Any], shared: str) -> None:
        """Make a call of `call`, in the thread."""

    def _turn(self) -> None:
        """Do the next thing, in the thread."""
        self._inbox.get()()

    def _run(self) -> None:
        if self.engine.saver.device.type == "cuda":
            torch.cuda.set_device(self.engine.saver.device)  # the choice is of each thread
        end: Exception = StateError("the loop of this engine is closed, and takes no calls")
        try:
            while not self._closing:
                self._turn()
                self._on_turn()
        except BaseException as error:
            _log.warning("the loop of an engine ends: %s: %s", type(error).__name__, str(error))
            end = error if isinstance(error, Exception) else StateError(f"{end}: {error!r}")
        self.engine.owner = None
        with self._lock:
            self._end = end
        for future in [*self._wanted]:
            fail(future, end)

    def _put(self, work: Callable[[], None], *wanted: Future[Any]) -> None:
        """Let the thread do something; once it has ended, or ends before, the futures fail."""
        with self._lock:
            end = self._end
            if end is None:
                self._wanted.update(wanted)
                self._inbox.put(work)
        for future in wanted:
            if end is not None:
                fail(future, end)
            else:
                future.add_done_callback(self._wanted.discard)


def settle(future: Future[_Value], function: Callable[[], _Value]) -> None:
    """Give a future the result, or the error, of a function; not if its owner has cancelled it."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        value = function()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(value)


def fail(future: Future[Any], error: BaseException) -> None:
    """Give a future an error; not if its owner has cancelled it."""
    if future.set_running_or_notify_cancel():
        future.set_exception(error)


def when_cancelled(future: Future[_Value], function: Callable[[Future[_Value]], object]) -> None:
    """Call a function with a future when that is cancelled."""

    def done(future: Future[_Value]) -> None:
        if future.cancelled():
            function(future)

    future.add_done_callback(done)
