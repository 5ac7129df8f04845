"""Main function of a worker process, which imports the reward functions once and calls them.

The process imports neither torch nor the rest of a run, unless a reward function does.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
from collections.abc import Mapping
from multiprocessing.connection import Connection

from recipes.errors import RecipeError, typed
from recipes.rewards.function import RewardFunction

PR_SET_PDEATHSIG = 1


def main(descriptor: int, driver: int) -> None:
    """Serve the calls that the process `driver` sends to a socket, until it closes the socket.

    The first message has, for each function's number, its setting in the recipe and the pickled
    arguments of `RewardFunction`. The reply is why a function cannot be loaded, or None. A call is
    (number, rows, seconds), and the reply is the result of `RewardFunction.outcomes`.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != driver:  # It ended before the call of prctl.
        return
    # A process that a function starts would keep the socket open beyond the end of this process.
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    sources: Mapping[int, tuple[str, bytes]] = connection.recv()
    functions = {}
    for number, (setting, packed) in sources.items():
        try:
            functions[number] = RewardFunction(*pickle.loads(packed))
        except (Exception, SystemExit) as error:
            connection.send(f"{setting}: {_rule(error)}")
            return
    connection.send(None)
    with contextlib.suppress(EOFError):
        while True:
            number, rows, seconds = connection.recv()
            connection.send(functions[number].outcomes(rows, seconds))


def _rule(error: BaseException) -> str:
    if isinstance(error, RecipeError):
        return str(error)
    return f"cannot be loaded: {typed(error)}; correct it"
