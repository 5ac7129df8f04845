"""Who holds a GPU's memory: against a stand-in for NVML, and against the real one where there is a
GPU.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from memsaver.system import gpu_processes

UUID = "GPU-12345678-1234-1234-1234-123456789abc"
GIB = 1 << 30
OWN = os.getpid()
NO_PERMISSION, NOT_FOUND = 4, 6
Entry = tuple[int, int | None]


class FakeNvml:
    """The functions of libnvidia-ml.so.1 that are used, with its protocol for lists."""

    def __init__(
        self,
        compute: Sequence[Entry] = (),
        graphics: Sequence[Entry] = (),
        mps: Sequence[Entry] = (),
    ) -> None:
        self.init_code = 0
        self.inits = 0
        self.list_code = 0
        self.starting: list[list[Entry]] = []  # processes that start after each call for a list
        self.nvmlDeviceGetComputeRunningProcesses_v3: Any = self._lister(list(compute))
        self.nvmlDeviceGetGraphicsRunningProcesses_v3: Any = self._lister(list(graphics))
        self.nvmlDeviceGetMPSComputeRunningProcesses_v3: Any = self._lister(list(mps))

    def nvmlInit_v2(self) -> int:
        self.inits += 1
        time.sleep(0.02)
        return self.init_code

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        ctypes.cast(handle, ctypes.POINTER(ctypes.c_void_p))[0] = 0xDEAD
        return 0 if uuid == UUID.encode() else NOT_FOUND

    def _lister(self, entries: list[Entry]) -> Callable[..., int]:
        def function(handle: ctypes.c_void_p, count: Any, infos: Any) -> int:
            assert handle.value == 0xDEAD
            count = ctypes.cast(count, ctypes.POINTER(ctypes.c_uint)).contents
            room = count.value
            if self.list_code:
                return self.list_code
            count.value = len(entries)
            fits = room >= len(entries)
            for place, (pid, used) in enumerate(entries if fits else []):
                infos[place].pid = pid
                infos[place].used = (1 << 64) - 1 if used is None else used
            if self.starting:
                entries.extend(self.starting.pop(0))
            return 0 if fits else 7

        return function


@pytest.fixture(autouse=True)
def fresh_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_processes, "session", gpu_processes.Session())


Install = Callable[[FakeNvml], FakeNvml]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    def put(fake: FakeNvml) -> FakeNvml:
        monkeypatch.setattr(gpu_processes, "load", lambda: fake)
        return fake

    return put


@pytest.fixture
def other() -> Any:
    """A process with a command line of its own."""
    command = [
        sys.executable,
        "-c",
        "print(flush=True); input()",
        "/data/train.py",
        "--long=" + "x" * 100,
    ]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()  # past its exec
    yield process
    process.kill()
    process.communicate()


def test_without_the_library_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise OSError("libnvidia-ml.so.1: cannot open shared object file")

    monkeypatch.setattr(gpu_processes, "load", absent)
    assert gpu_processes.processes(UUID) is None
    assert gpu_processes.holders(UUID, 5, 0) == {gpu_processes.UNKNOWN: 5}
    assert gpu_processes.holders(UUID, 0, 0) == {}


def test_an_init_that_is_refused_is_asked_for_once(install: Install) -> None:
    fake = install(FakeNvml([(OWN, GIB)]))
    fake.init_code = 9  # driver not loaded
    assert gpu_processes.processes(UUID) is None and gpu_processes.processes(UUID) is None
    assert fake.inits == 1


def test_threads_initialise_once(install: Install) -> None:
    fake = install(FakeNvml([(OWN, GIB)]))
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(gpu_processes.processes, [UUID] * 8))
    assert fake.inits == 1 and found == [{OWN: GIB}] * 8


def test_an_unknown_device_and_a_refused_list(install: Install) -> None:
    fake = install(FakeNvml([(OWN, GIB)]))
    assert gpu_processes.processes("GPU-other") is None
    fake.list_code = NO_PERMISSION
    assert gpu_processes.processes(UUID) is None
    fake.list_code = 3  # not supported on this GPU
    assert gpu_processes.processes(UUID) == {}


def test_lists_are_merged_and_old_drivers_lack_some(install: Install) -> None:
    fake = install(FakeNvml([(1, 10), (2, None), (3, 5), (3, 6)], [(1, 10), (2, 20)], [(4, None)]))
    assert gpu_processes.processes(UUID) == {1: 10, 2: 20, 3: 11, 4: None}
    del fake.nvmlDeviceGetMPSComputeRunningProcesses_v3
    assert gpu_processes.processes(UUID) == {1: 10, 2: 20, 3: 11}


def test_a_list_that_grows_between_the_calls(install: Install) -> None:
    fake = install(FakeNvml([(1, 10)]))
    fake.starting = [[(pid, 1) for pid in range(2, 40)]]
    assert gpu_processes.processes(UUID) == {1: 10, **dict.fromkeys(range(2, 40), 1)}
    fake.starting = [[(1000 + turn, 1)] for turn in range(4)]  # one at a time finds room
    assert len(gpu_processes.processes(UUID) or {}) >= 40
    fake.starting = [[(100 * turn + pid, 1) for pid in range(60)] for turn in range(1, 20)]
    assert gpu_processes.processes(UUID) is None  # it never stands still


def test_processes_have_names(install: Install, other: subprocess.Popen[bytes]) -> None:
    install(FakeNvml([(OWN, 10 * GIB), (other.pid, 3 * GIB)], [(2**22 + 1, GIB)]))
    found = gpu_processes.holders(UUID, unaccounted=5 * GIB, accounted=9 * GIB + GIB // 2)
    first, *rest = found
    assert (
        first.startswith(f"process {other.pid} (python")
        and first.endswith("...)")
        and len(first) < 70
    )
    assert rest == [ONE, gpu_processes.OWN, gpu_processes.HIDDEN]
    assert list(found.values()) == [3 * GIB, GIB, GIB // 2, GIB // 2]


ONE, TWO = f"process {2**22 + 1}", f"process {2**22 + 2}"  # gone, or another user's
# listed, GiB unaccounted and accounted
HOLDERS: list[tuple[list[Entry], int, int, dict[str, int]]] = [
    ([(OWN, 10 * GIB)], 1, 9, {gpu_processes.OWN: 1}),
    ([(OWN, 10 * GIB)], 1, 11, {gpu_processes.HIDDEN: 1}),
    ([(OWN, None), (2**22 + 1, GIB), (2**22 + 2, None)], 3, 1, {ONE: 1, gpu_processes.UNKNOWN: 2}),
    ([(OWN, 2 * GIB), (2**22 + 2, None)], 3, 1, {gpu_processes.OWN: 1, gpu_processes.HIDDEN: 2}),
    # ids of the host: this process is not among them
    ([(1, 2 * GIB), (2, GIB)], 3, 1, {gpu_processes.UNKNOWN: 3}),
    # a tag that is leased
    ([(OWN, 41 * GIB), (2**22 + 1, 41 * GIB), (2**22 + 2, GIB)], 3, 40, {ONE: 2, TWO: 1}),
]


@pytest.mark.parametrize(("listed", "unaccounted", "accounted", "expected"), HOLDERS)
def test_bytes_are_counted_once_and_nobody_is_named_wrongly(
    install: Install,
    listed: list[Entry],
    unaccounted: int,
    accounted: int,
    expected: dict[str, int],
) -> None:
    install(FakeNvml(listed))
    found = gpu_processes.holders(UUID, unaccounted * GIB, accounted * GIB)
    assert found == {name: count * GIB for name, count in expected.items()}


@pytest.mark.gpu
@pytest.mark.alone
def test_the_real_one_adds_up() -> None:
    tensor = torch.ones(64 << 20, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    listed = gpu_processes.processes(uuid)
    assert listed is None or all(used is None or used > 0 for used in listed.values())
    if listed and (used := listed.get(os.getpid())) is not None:
        assert used >= tensor.nbytes
    found = gpu_processes.holders(uuid, unaccounted=GIB, accounted=torch.cuda.memory_reserved(0))
    assert sum(found.values()) == GIB and all(found.values())
    assert gpu_processes.processes("GPU-00000000-0000-0000-0000-000000000000") is None
