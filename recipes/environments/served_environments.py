"""What an environment's process does: it makes the environments, and calls their methods.

The process imports neither torch nor the rest of a run, unless an environment does.
"""

import contextlib
import inspect
import json
import os
import resource
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import psutil

from recipes.awaited import run_awaited
from recipes.errors import RecipeError, one_line, shown, typed
from recipes.importing import import_named

MEMORY = 8 << 30
"""Bytes of address space that environments may take beyond that of Python itself."""
FILE = 1 << 30
"""Bytes of the largest file that they may write."""
TASKS = 1024
"""Processes and threads of the user that they may start beyond the present ones."""
LONGEST = 100_000
"""Characters of the longest text that a method may return."""
_NO_TOOLS = ("reset", "get_reward")


def serve(connection: Connection) -> None:
    """Call methods of environments.

    A message is (name, method, arguments), where the name is `package.module:Class`,
    `file.py:Class`, or that of a function, an agent; the first one with a name makes the
    environment. The reply is (value, error) as JSON: what the method returned, and an empty text,
    or None and what it raised.
    """
    _limit()
    environments: dict[str, _Callee] = {}
    with contextlib.suppress(EOFError):
        while True:
            name, method, arguments = connection.recv()
            try:
                if name not in environments:
                    environments[name] = _made(import_named(name))
                reply = environments[name].call(method, arguments), ""
            except RecipeError as error:
                reply = None, str(error)
            except (Exception, SystemExit) as error:
                reply = None, typed(error)
            connection.send_bytes(json.dumps(reply).encode())


def _limit() -> None:
    """Limit memory, files and processes. It does not stop an attacker."""
    used = psutil.Process().memory_info().vms
    tasks = sum(map(_tasks, psutil.process_iter()))
    for kind, most in (
        (resource.RLIMIT_AS, used + MEMORY),
        (resource.RLIMIT_FSIZE, FILE),
        (resource.RLIMIT_NPROC, tasks + TASKS),
    ):
        highest = resource.getrlimit(kind)[1]
        bound = most if highest == resource.RLIM_INFINITY else min(most, highest)
        resource.setrlimit(kind, (bound, bound))


def _tasks(process: psutil.Process) -> int:
    """Return the number of threads of a process of this user."""
    with contextlib.suppress(psutil.Error):
        return process.num_threads() if process.uids().real == os.getuid() else 0
    return 0


def _made(found: Any) -> "_Callee":
    return _Environment(found()) if inspect.isclass(found) else _Agent(found)


class _Callee:
    """What a name names; its methods with an underscore are what the run may call."""

    def call(self, method: str, arguments: Any) -> Any:
        return getattr(self, f"_{method}")(*arguments)


class _Agent(_Callee):
    """A function that asks the model by itself."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def _describe(self, functions: Sequence[str]) -> Mapping[str, Any]:
        return {"agent": True, "rewards": True}

    def _solve(self, row: Mapping[str, Any], access: Mapping[str, str]) -> float | None:
        """Return the reward of a row; clients of OpenAI find the model without further words."""
        for name in ("base_url", "api_key"):
            os.environ[f"OPENAI_{name.upper()}"] = access[name]
        given = _taken(self._function, {"row": row, **access})
        reward = _result(self._function(**given))
        return None if reward is None else float(reward)


class _Environment(_Callee):
    """An environment by the protocol of TRL's `environment_factory`, and what may be called."""

    def __init__(self, made: Any) -> None:
        self._made = made
        if not callable(getattr(self._made, "reset", None)):
            raise RecipeError("has no method reset; define it")
        public = inspect.getmembers(type(self._made), predicate=inspect.isfunction)
        names = [name for name, _ in public if name not in _NO_TOOLS and name[0] != "_"]
        self._tools = {name: getattr(self._made, name) for name in names}

    def _describe(self, functions: Sequence[str]) -> Mapping[str, Any]:
        """Return what the environment has, and which reward functions take environments."""
        from transformers.utils import get_json_schema

        replies = callable(self._made)
        if not replies and not self._tools:
            raise RecipeError("has neither public methods, which are tools, nor __call__")
        schemas = [] if replies else [get_json_schema(tool) for tool in self._tools.values()]
        rewards = callable(getattr(self._made, "get_reward", None))
        judges = [name for name in functions if ":" in name and _takes_environments(name)]
        return {"tools": schemas, "replies": replies, "rewards": rewards, "judges": judges}

    def _reset(self, row: Mapping[str, Any]) -> str:
        """Begin a conversation; return what is added to its last message."""
        said = _result(self._made.reset(**_taken(self._made.reset, row)))
        return "" if said is None else _text(said)

    def _tool(self, name: str, arguments: str) -> tuple[str, bool]:
        """Return what a tool says, and whether it failed; its error is a text for the model."""
        try:
            if name not in self._tools:
                known = ", ".join(self._tools)
                raise ValueError(f"there is no tool {shown(name, 40)}; there are {known}")
            given = json.loads(arguments)
            if not isinstance(given, dict):
                raise ValueError("the arguments are no JSON object")
            return _text(_result(self._tools[name](**given))), False
        except (Exception, SystemExit) as error:
            return _text({"error": one_line(error) or type(error).__name__}), True

    def _reply(self, answer: str) -> str | None:
        """Return the user's next message; None ends the conversation."""
        said = _result(self._made(answer))
        return None if said is None else _text(said)

    def _reward(self) -> float | None:
        reward = _result(self._made.get_reward())
        return None if reward is None else float(reward)

    def _judged(self, name: str, given: Mapping[str, Any]) -> float | None:
        """Return the reward of a function that takes environments, for this one."""
        function = import_named(name)
        lists = {name: [value] for name, value in _taken(function, given).items()}
        (reward,) = _result(function(environments=[self._made], **lists))
        return None if reward is None else float(reward)


def _takes_environments(name: str) -> bool:
    """Return whether a reward function has such an argument; not, if it cannot be imported."""
    with contextlib.suppress(RecipeError, TypeError, ValueError):
        return "environments" in inspect.signature(import_named(name)).parameters
    return False


def _text(said: Any) -> str:
    """Return what an environment says as text; of a list of content parts, their texts."""
    if isinstance(said, list) and all(isinstance(part, Mapping) for part in said):
        if others := [part for part in said if part.get("type") != "text"]:
            raise ValueError(
                f"content of type {others[0].get('type')!r} is not served; return text"
            )
        said = "".join(str(part.get("text", "")) for part in said)
    text = str(said)
    left = len(text) - LONGEST
    return text if left <= 0 else f"{text[:LONGEST]}... ({left} more characters)"


def _result(value: Any) -> Any:
    """Return a value, awaited if it is awaitable."""
    return run_awaited(value) if inspect.isawaitable(value) else value


def _taken(function: Callable[..., Any], given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments among those given that a function has."""
    parameters = inspect.signature(function).parameters
    if any(item.kind is item.VAR_KEYWORD for item in parameters.values()):
        return given
    return {name: given[name] for name in parameters.keys() & given.keys()}
