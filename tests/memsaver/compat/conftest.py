"""Drop-ins with memory of their own, on the device under test."""

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
    """What a process holds from an installation on is not held in other tests."""
    monkeypatch.setattr(torch_allocator, "_workspaces_in_graphs", False)


@pytest.fixture
def clears_workspaces(monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Tells whether who empties torch's cache frees cuBLAS's workspaces, to which graphs write."""
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
    made = Savers(lambda: torch.device(device))
    yield made
    for saver in made:
        saver.close()


@pytest.fixture
def tms(savers: Savers) -> TorchMemorySaver:
    return TorchMemorySaver(savers)


@pytest.fixture
def allocator(savers: Savers) -> CuMemAllocator:
    return CuMemAllocator(savers)


@pytest.fixture
def scribble(device: str) -> Iterator[Callable[[int], None]]:
    """Fills so many bytes of freed memory from another process: it cannot keep its old content."""
    scribbler = Scribbler(device)
    scribbler.fill(1)
    yield scribbler.fill
    scribbler.close()
