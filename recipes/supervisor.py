"""The process that supervises a worker: it ends the worker and all that descends from it."""

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
HANDLED = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
"""Signals that the supervisor of a worker waits for."""
SIGNALED = 128
"""Added to the number of the signal that ended a worker, in its supervisor's exit status."""


def main(serve: Callable[[Connection], None], descriptor: int, driver: int) -> None:
    """Let a child serve the calls that the process `driver` sends to a socket, until it closes it.

    When the child or the driver ends, or on SIGTERM, this process kills the child and all processes
    that descend from it.
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
