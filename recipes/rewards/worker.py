"""Main function of a worker process, which imports the reward functions once and calls them.

The process imports neither torch nor the rest of a run, unless a reward function does.
"""

import contextlib
import ctypes
import os
import pickle
import resource
import signal
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection

import psutil

from recipes.errors import RecipeError, typed
from recipes.rewards.function import RewardFunction

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
HANDLED = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
"""Signals that the supervisor of a worker waits for."""
SIGNALED = 128
"""Added to the number of the signal that ended a worker, in its supervisor's exit status."""


def main(descriptor: int, driver: int) -> None:
    """Serve the calls that the process `driver` sends to a socket, until it closes the socket.

    The process becomes the supervisor of a child that serves. When the child or the driver ends,
    or on SIGTERM, it kills the child and every process that descends from it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != driver:  # It ended before the call of prctl.
        return
    supervisor = os.getpid()
    if worker := os.fork():
        os.close(descriptor)
        os._exit(_supervise(worker, driver))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == supervisor:
        # A process that a function starts would keep the socket open beyond the end of this one.
        os.set_inheritable(descriptor, False)
        serve(Connection(descriptor))


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)


def _supervise(worker: int, driver: int) -> int:
    """Wait for the end of the worker or the driver, or a signal, and end all descendants.

    A function that signals the parent of its process means the run, which gets the signal. The
    result is the exit status.
    """
    code = 0
    while os.getppid() == driver:
        info = signal.sigwaitinfo(HANDLED)
        if info.si_signo == signal.SIGCHLD:
            pid, status = os.waitpid(worker, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                break
        elif info.si_pid != worker:
            break
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(driver, info.si_signo)
    with contextlib.suppress(ChildProcessError):  # There are no more children.
        while True:
            for child in psutil.Process().children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            os.waitpid(-1, 0)  # The children of a child that ends become children of this process.
    return code if code >= 0 else SIGNALED - code


def serve(connection: Connection) -> None:
    """Load the functions and call them.

    The first message has, for each function's number, its setting in the recipe and the pickled
    arguments of `RewardFunction`. The reply is why a function cannot be loaded, or kind and seconds
    of each function. A call is (number, answers, seconds); the replies are the scores, one after
    the other, and then None.
    """
    sources: Mapping[int, tuple[str, bytes]] = connection.recv()
    functions, memory = {}, {}
    for number, (setting, packed) in sources.items():
        try:
            source, *arguments = pickle.loads(packed)
            functions[number] = RewardFunction(source, *arguments)
            memory[number] = getattr(source, "memory", None)
        except (Exception, SystemExit) as error:
            connection.send(f"{setting}: {_rule(error)}")
            return
    connection.send({number: (item.kind, item.seconds) for number, item in functions.items()})
    with contextlib.suppress(EOFError):
        while True:
            number, answers, seconds = connection.recv()
            with _limited(memory[number]):
                for score in functions[number].scores(answers, seconds):
                    connection.send(score)
            connection.send(None)


@contextlib.contextmanager
def _limited(memory: int | None) -> Iterator[None]:
    """Limit the address space inside the block to its present size and `memory` bytes."""
    if memory is None:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (used + memory, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _rule(error: BaseException) -> str:
    if isinstance(error, RecipeError):
        return str(error)
    return f"cannot be loaded: {typed(error)}; correct it"
