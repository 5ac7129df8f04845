"""Holders of a GPU's memory by NVML: with a fake binding, and with the real one on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memsaver.system import gpu_processes as nvml

UUID = "GPU-12345678-1234-1234-1234-123456789abc"
GIB = 1 << 30
OWN = os.getpid()
GONE = 2**22 + 1  # no process has this id
Entry = tuple[int, int | None]


class FakeNvml:
    """Fake of ``cuda.bindings.nvml``."""

    class NvmlError(Exception):
        pass

    class NotSupportedError(NvmlError):
        pass

    def __init__(self, compute: Sequence[Entry], graphics: Sequence[Entry] = ()) -> None:
        self.device_get_compute_running_processes_v3 = self._lister(compute)
        self.device_get_graphics_running_processes_v3 = self._lister(graphics)

    def device_get_handle_by_uuid(self, uuid: str) -> int:
        if uuid != UUID:
            raise self.NvmlError("not found")
        return 0xDEAD

    def device_get_mps_compute_running_processes_v3(self, handle: int) -> list[Any]:
        raise self.NotSupportedError("not on this GPU")

    def _lister(self, entries: Sequence[Entry]) -> Callable[[int], list[Any]]:
        def read(handle: int) -> list[Any]:
            assert handle == 0xDEAD
            hidden = (1 << 64) - 1
            return [
                SimpleNamespace(pid=pid, used_gpu_memory=hidden if used is None else used)
                for pid, used in entries
            ]

        return read


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeNvml | None], None]:
    return lambda fake: monkeypatch.setattr(nvml, "session", lambda: fake)


Install = Callable[[FakeNvml | None], None]


def test_without_nvml_holders_are_unknown(install: Install) -> None:
    install(None)
    assert nvml.processes(UUID) is None
    assert nvml.holders(UUID, 5, 0) == {nvml.UNKNOWN: 5}
    assert nvml.holders(UUID, 0, 0) == {}


def test_processes_merges_compute_and_graphics_lists(install: Install) -> None:
    fake = FakeNvml([(1, 10), (2, None), (3, 5), (3, 6)], [(1, 10), (2, 20)])
    install(fake)
    assert nvml.processes(UUID) == {1: 10, 2: 20, 3: 11}
    assert nvml.processes("GPU-other") is None


def test_holders_name_processes_by_their_command_line(install: Install) -> None:
    command = [sys.executable, "-c", "print(flush=True); input()", "/data/train.py", "x" * 100]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()  # past its exec
        install(FakeNvml([(OWN, 10 * GIB), (other.pid, 3 * GIB)], [(GONE, GIB)]))
        holders = nvml.holders(UUID, unaccounted=5 * GIB, accounted=9 * GIB + GIB // 2)
        other.communicate()
    first, *rest = holders
    assert first.startswith(f"process {other.pid} (python")
    assert first.endswith("...)") and len(first) < 70
    assert rest == [f"process {GONE}", nvml.OWN, nvml.HIDDEN]
    assert list(holders.values()) == [3 * GIB, GIB, GIB // 2, GIB // 2]


ONE, TWO = f"process {GONE}", f"process {GONE + 1}"
# Listed processes, GiB unaccounted, GiB accounted, expected GiB by name.
HOLDERS: list[tuple[list[Entry], int, int, dict[str, int]]] = [
    ([(OWN, 10 * GIB)], 1, 11, {nvml.HIDDEN: 1}),
    ([(OWN, None), (GONE, GIB), (GONE + 1, None)], 3, 1, {ONE: 1, nvml.UNKNOWN: 2}),
    # Process ids of the host, which do not include this process.
    ([(1, 2 * GIB), (2, GIB)], 3, 1, {nvml.UNKNOWN: 3}),
    # A leased tag, which two processes count.
    ([(OWN, 41 * GIB), (GONE, 41 * GIB), (GONE + 1, GIB)], 3, 40, {ONE: 2, TWO: 1}),
]


@pytest.mark.parametrize(("listed", "unaccounted", "accounted", "expected"), HOLDERS)
def test_holders_add_up_and_name_only_certain_processes(
    install: Install,
    listed: list[Entry],
    unaccounted: int,
    accounted: int,
    expected: dict[str, int],
) -> None:
    install(FakeNvml(listed))
    holders = nvml.holders(UUID, unaccounted * GIB, accounted * GIB)
    assert holders == {name: count * GIB for name, count in expected.items()}


@pytest.mark.gpu
@pytest.mark.alone
def test_real_nvml_holders_add_up() -> None:
    tensor = torch.ones(64 << 20, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    listed = nvml.processes(uuid)
    assert listed is None or all(used is None or used > 0 for used in listed.values())
    if listed and (used := listed.get(os.getpid())) is not None:
        assert used >= tensor.nbytes
    holders = nvml.holders(uuid, unaccounted=GIB, accounted=torch.cuda.memory_reserved(0))
    assert sum(holders.values()) == GIB and all(holders.values())
    assert nvml.processes("GPU-00000000-0000-0000-0000-000000000000") is None
