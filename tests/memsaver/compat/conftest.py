"""Drop-ins with memory of their own, on the device under test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from memsaver.compat.savers import Savers
from memsaver.compat.torch_memory_saver import TorchMemorySaver
from memsaver.compat.vllm import CuMemAllocator
from tests.helpers.memory import Scribbler


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


@pytest.fixture(scope="session")
def scribblers() -> Iterator[dict[str, Scribbler]]:
    made: dict[str, Scribbler] = {}
    yield made
    for scribbler in made.values():
        scribbler.close()


@pytest.fixture
def scribble(device: str, scribblers: dict[str, Scribbler]) -> Callable[[int], None]:
    """Fills so many bytes of freed memory: it cannot keep its old content. From one other process for all tests."""
    if device not in scribblers:
        scribblers[device] = Scribbler(device)
        scribblers[device].fill(1)
    return scribblers[device].fill
