"""Drop-ins with their own savers, on the device under test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from memsaver.compat.savers import Savers
from memsaver.compat.torch_memory_saver import TorchMemorySaver
from memsaver.compat.vllm import CuMemAllocator
from memsaver.memory import torch_allocator
from memsaver.native import cuda_hook
from tests.helpers.memory import Scribbler


@pytest.fixture(autouse=True)
def _forgets_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo the effect of an installation on the process's cuBLAS workspaces."""
    monkeypatch.setattr(torch_allocator, "_workspaces_in_graphs", False)


@pytest.fixture
def clears_workspaces(monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Return a function that tells whether emptying torch's cache frees cuBLAS's workspaces."""
    cleared: list[str] = []
    clear = partial(cleared.append, "all")
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", clear, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(cuda_hook, "empty_cache", lambda device: None)

    def clears() -> bool:
        cleared.clear()
        torch_allocator.empty_torch_cache(torch.device("cuda:0"))
        return bool(cleared)

    return clears


@pytest.fixture
def savers(device: str) -> Iterator[Savers]:
    instance = Savers(lambda: torch.device(device))
    yield instance
    for saver in instance:
        saver.close()


@pytest.fixture
def tms(savers: Savers) -> TorchMemorySaver:
    return TorchMemorySaver(savers)


@pytest.fixture
def allocator(savers: Savers) -> CuMemAllocator:
    return CuMemAllocator(savers)


@pytest.fixture
def scribble(device: str) -> Iterator[Callable[[int], None]]:
    """Return a function that overwrites freed memory from another process."""
    scribbler = Scribbler(device)
    scribbler.fill(1)
    yield scribbler.fill
    scribbler.close()
