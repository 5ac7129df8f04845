"""Environments of conversations, each in a process of its own, and the threads that use them."""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from recipes.errors import RecipeError
from recipes.supervised_process import SupervisedProcess

LOADING = 300.0
"""Seconds that the first call of an environment may take, unless a call may take longer."""
_MODULE = "recipes.environments.served_environments"
_LONGEST_REPLY = 8 << 20  # bytes
_Value = TypeVar("_Value")


class EnvironmentFault(RuntimeError):
    """A call of an environment that failed, took too long, or ended its process."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentKind:
    """What an environment has, or an agent in its place.

    Attributes:
        tools: Its tools as JSON schemas.
        replies: Whether it replies to whole answers.
        rewards: Whether it gives rewards.
        judges: Reward functions that take the environment, by name.
        agent: Whether it is a function that asks the model by itself.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    replies: bool = False
    rewards: bool
    judges: Sequence[str] = ()
    agent: bool = False


class EnvironmentProcess:
    """A process with environments, one of each name, which conversations use in turn.

    The process is replaced after a call that takes too long or ends it.

    Args:
        timeout: Seconds that a call may take.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._process: SupervisedProcess | None = None
        self._made: set[str] = set()
        self._closed = False

    def ask(self, name: str, method: str, *arguments: Any, seconds: float | None = None) -> Any:
        """Call a method of an environment, as `served_environments.serve` does.

        It may take `seconds`, or else the timeout of all calls.

        Raises:
            EnvironmentFault: It raised an error, took too long, or ended the process.
        """
        if self._closed:
            raise EnvironmentFault(f"{name}: {method} was not called: the run ends")
        process = self._process = self._process or SupervisedProcess(_MODULE, quiet=True)
        seconds = self._timeout if seconds is None else seconds
        if name not in self._made:
            seconds = max(LOADING, seconds)
        process.send((name, method, arguments))
        if not process.connection.poll(seconds):
            self._end()
            raise EnvironmentFault(f"{name}: {method} took longer than {seconds:g} s")
        try:  # A tool may run code of the model, which can send anything.
            value, error = json.loads(process.receive_text(_LONGEST_REPLY))
        except (EOFError, TypeError, ValueError):
            raise EnvironmentFault(f"{name}: {method} ended its process: {self._end()}") from None
        if error:
            raise EnvironmentFault(f"{name}: {method}: {error}")
        self._made.add(name)
        return value

    def _end(self) -> str:
        """End the process, which the next call replaces; return how it ended."""
        process, self._process = self._process, None
        self._made.clear()
        return "closed" if process is None else process.kill()

    def close(self) -> None:
        """End the process, even in the middle of a call."""
        self._closed = True
        self._end()


class Environments:
    """Threads for conversations, each of which has a process with environments.

    Args:
        parallel: Number of threads, and so of conversations at a time.
        timeout: Seconds that a call of an environment may take.
    """

    def __init__(self, parallel: int, timeout: float) -> None:
        self._timeout = timeout
        self._threads = ThreadPoolExecutor(parallel, "conversation")
        self._own = threading.local()
        self._processes: list[EnvironmentProcess] = []

    def start(self, function: Callable[..., _Value], *args: Any) -> Future[_Value]:
        """Call a function in one of the threads, with its process before the other arguments."""
        return self._threads.submit(self._run, function, *args)

    def _run(self, function: Callable[..., _Value], *args: Any) -> _Value:
        if not hasattr(self._own, "process"):
            self._own.process = EnvironmentProcess(self._timeout)
            self._processes.append(self._own.process)
        return function(self._own.process, *args)

    def describe(self, name: str, key: str, functions: Sequence[str] = ()) -> EnvironmentKind:
        """Return what an environment has, for the recipe's key that names it.

        Args:
            name: Its class.
            key: The key.
            functions: Reward functions by name, of which it may be an argument.

        Raises:
            RecipeError: It cannot be made, or has nothing to call.
        """
        try:
            found = self.start(EnvironmentProcess.ask, name, "describe", functions).result()
        except EnvironmentFault as error:
            text = str(error).removeprefix(f"{name}: describe: ").removeprefix(f"{name}: ")
            raise RecipeError(f"{key}={name}: {text}") from error
        return EnvironmentKind(**found)

    def close(self) -> None:
        """End the processes, even in the middle of calls, and the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.close()
        self._threads.shutdown()
