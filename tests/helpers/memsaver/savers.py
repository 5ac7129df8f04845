"""Helpers for tests of savers: injected faults, threads, processes and waiting."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from memsaver import MemorySaver, Ticket
from memsaver.native import shim

MIB = 1 << 20
ROOT = Path(__file__).parents[3]
ERROR = {"cpu": errno.ENOMEM, "cuda:0": 2}  # CUDA_ERROR_OUT_OF_MEMORY


def large(device: str) -> int:
    """Return a size that stands out from the noise of other allocations."""
    return 1 << 30 if device.startswith("cuda") else 64 << 20


def inject_fault(backend: Any, after: int, error: int) -> int:
    """Make the driver call number `after` from now fail with `error`; 0: none.

    The result is the number of calls since the last injection.
    """
    calls: int = shim.library().ms_inject(backend.phys, after, error)
    return calls


class Fault:
    """A driver call that is to fail; `fired` tells afterwards whether it was reached."""

    def __init__(self, call: int, code: int) -> None:
        self.call, self.code, self.fired = call, code, False

    @contextlib.contextmanager
    def at(self, backend: Any) -> Iterator[None]:
        """Make the call fail if this backend makes it inside the context."""
        inject_fault(backend, self.call, self.code)
        try:
            yield
        finally:
            self.fired = inject_fault(backend, 0, 0) >= self.call


def every_call(device: str) -> Iterator[Fault]:
    """Yield a fault for the first driver call, the second and so on, until a round has fewer."""
    fault = Fault(0, 0)
    while fault.fired or not fault.call:
        fault = Fault(fault.call + 1, ERROR[device])
        yield fault


@contextlib.contextmanager
def may_raise(*kinds: type[Exception]) -> Iterator[None]:
    """Allow these exceptions, unless their cause is an answer that did not arrive in time."""
    try:
        yield
    except kinds as error:
        assert "gave no answer" not in str(error) and "was busy for" not in str(error), error


def until(
    done: Callable[[], Any], seconds: float = 30.0, found: Callable[[], Any] = lambda: ""
) -> None:
    """Wait for a condition that another thread or process brings about; `found` tells its state."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"the condition is false after {seconds:g} s {found()}"
        time.sleep(0.002)


def connections() -> int:
    """Count the open ends of savers' connections in this process; each has a reading thread."""
    return sum(thread.name.endswith("-read") for thread in threading.enumerate())


def own_threads() -> int:
    """Count memsaver's threads without pools', such as "memsaver-copy_1", which grow with use."""
    names = [thread.name for thread in threading.enumerate()]
    return sum(name.startswith("memsaver-") and "_" not in name for name in names)


def at_once(*works: Callable[[], Any]) -> list[Any]:
    """Run functions at the same time, each in a thread, and return their results."""
    with ThreadPoolExecutor(len(works)) as threads:
        return [future.result(120) for future in [threads.submit(work) for work in works]]


def shared(device: str, nbytes: int = 8 * MIB) -> tuple[MemorySaver, torch.Tensor, Ticket]:
    """Return a saver, the tensor on its tag "t" (int64 0, 1, 2 ... as bytes), and a ticket."""
    saver = MemorySaver(device)
    tensor = saver.empty(nbytes, torch.uint8, tag="t")
    tensor.view(torch.int64).copy_(torch.arange(nbytes // 8))
    return saver, tensor, saver.share("t", writable=True)


class Calls(NamedTuple):
    """Statistics of one driver operation; `nbytes` counts successful calls only."""

    calls: int
    failed: int
    nbytes: int
    seconds: float


class CallsRecord(ctypes.Structure):
    """The struct ``ms_calls`` of shim.h."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("calls", "failed", "nbytes", "ns")]


def driver_calls(saver: MemorySaver) -> dict[str, Calls]:
    """Return a saver's driver calls by operation ("create", "map", "copy" ...)."""
    array = (CallsRecord * len(shim.Operation))()
    shim.library().ms_get_calls(saver.backend.phys, array)
    return {
        operation.name.lower(): Calls(item.calls, item.failed, item.nbytes, item.ns * 1e-9)
        for operation, item in zip(shim.Operation, array, strict=True)
    }


@contextlib.contextmanager
def busy(saver: MemorySaver) -> Iterator[None]:
    """Keep another thread inside an operation of the saver."""
    inside, leave = threading.Event(), threading.Event()

    def stay(*_: object) -> None:
        inside.set()
        leave.wait(60)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as thread:
        patch.setattr("memsaver.saver.check_tables", stay)
        thread.submit(saver.check_integrity)
        assert inside.wait(60)
        try:
            yield
        finally:
            leave.set()


def python(code: str, *, status: int = 0, **environment: str) -> str:
    """Run code in a fresh interpreter, check its exit status, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )
    assert done.returncode == status, done.stderr
    return done.stdout.strip()
