"""For tests of savers: driver calls that fail one after the other, threads, processes, and what is
waited for.
"""

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
    """Bytes that stand out from what else goes on."""
    return 1 << 30 if device.startswith("cuda") else 64 << 20


class Fault:
    """One of the coming driver calls. fired: it came that far, and failed; known afterwards."""

    def __init__(self, call: int, code: int) -> None:
        self.call, self.code, self.fired = call, code, False

    @contextlib.contextmanager
    def at(self, backend: Any) -> Iterator[None]:
        """Inside, the call fails if it is one of this backend's."""
        backend.inject_fault(self.call, self.code)
        try:
            yield
        finally:
            self.fired = backend.inject_fault(0, 0) >= self.call


def every_call(device: str) -> Iterator[Fault]:
    """Round by round: the first driver call fails, the second ... until a round has fewer."""
    fault = Fault(0, 0)
    while fault.fired or not fault.call:
        fault = Fault(fault.call + 1, ERROR[device])
        yield fault


@contextlib.contextmanager
def not_in_vain(*kinds: type[Exception]) -> Iterator[None]:
    """Inside, these may be raised, but not because somebody was waited for whose answer did not
    come.
    """
    try:
        yield
    except kinds as error:
        assert "gave no answer" not in str(error) and "is busy for" not in str(error), error


def until(done: Callable[[], Any], seconds: float = 30.0) -> None:
    """Wait for what another thread or process does, however busy the machine is."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"after {seconds:g} s still not"
        time.sleep(0.002)


def connections() -> int:
    """Ends of connections between savers that are open in this process; each is closed by its own
    thread.
    """
    return sum(thread.name.endswith("-read") for thread in threading.enumerate())


def at_once(*works: Callable[[], Any]) -> list[Any]:
    """What functions return that run at the same time, each in a thread; raises what one of them
    raises.
    """
    with ThreadPoolExecutor(len(works)) as threads:
        return [future.result(120) for future in [threads.submit(work) for work in works]]


def shared(device: str, nbytes: int = 8 * MIB) -> tuple[MemorySaver, torch.Tensor, Ticket]:
    """A saver whose tag "t" is one tensor of bytes, the int64 0, 1, 2 ..., and the writable ticket
    of it.
    """
    saver = MemorySaver(device)
    tensor = saver.empty(nbytes, torch.uint8, tag="t")
    tensor.view(torch.int64).copy_(torch.arange(nbytes // 8))
    return saver, tensor, saver.share("t", writable=True)


class Calls(NamedTuple):
    """All calls of one driver operation; nbytes: of those that succeeded."""

    calls: int
    failed: int
    nbytes: int
    seconds: float


class CallsRecord(ctypes.Structure):
    """Is ``ms_calls`` of shim.h."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("calls", "failed", "nbytes", "ns")]


def driver_calls(saver: MemorySaver) -> dict[str, Calls]:
    """Count a saver's driver calls so far by operation ("create", "map", "copy" ...)."""
    array = (CallsRecord * len(shim.Operation))()
    shim.library().ms_get_calls(saver.backend.phys, array)
    return {
        operation.name.lower(): Calls(item.calls, item.failed, item.nbytes, item.ns * 1e-9)
        for operation, item in zip(shim.Operation, array, strict=True)
    }


@contextlib.contextmanager
def busy(saver: MemorySaver) -> Iterator[None]:
    """Another thread is in an operation of the saver, and stays there."""
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
    """What a fresh interpreter prints that runs the code; it must end with the status."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )
    assert done.returncode == status, done.stderr
    return done.stdout.strip()
