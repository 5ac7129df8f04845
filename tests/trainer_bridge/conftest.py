"""Fixtures: trainers that are closed after their test, and implementations of operations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import memsaver
from memsaver.system.devices import Impl
from rollout.weights import Manifest
from tests.helpers.trainer_bridge.models import config, write_model
from tests.helpers.trainer_bridge.trl_generation import imported, tiny_generation
from trainer_bridge import Trainer
from trainer_bridge.models import Runtime


@pytest.fixture(params=["torch", "triton"])
def impl(request: pytest.FixtureRequest, device: str) -> Impl:
    """Return an implementation of operations: the reference, or Triton's kernels."""
    if request.param == "triton" and device == "cpu" and torch.cuda.is_available():
        pytest.skip("Triton is not interpreted here: the kernels run on the GPU")
    return request.param


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write a tied Qwen3 with 2 layers."""
    return write_model(Path(tmp_path_factory.mktemp("model")))


@pytest.fixture
def make_trainer() -> Iterator[Callable[..., Trainer]]:
    """Yield a function that creates trainers, which are closed after the test.

    With `packed=False` sequences are padded for every model. The first trainer owns the process
    group, and is closed last.
    """
    with contextlib.ExitStack() as undo:

        def make(
            path: str, layout: Manifest | None = None, packed: bool = True, **changes: Any
        ) -> Trainer:
            settings = config(path, **changes)
            memory = memsaver.MemorySaver(device=settings.device)
            undo.callback(memory.close)
            runtime = None
            if not packed:
                runtime = Runtime.open(settings.device)
                runtime.packed_attention = None
            trainer = Trainer(settings, memory, layout=layout, runtime=runtime)
            undo.callback(trainer.close)
            return trainer

        yield make


@pytest.fixture(scope="module")
def trl_class() -> Iterator[Any]:
    """Yield TRL's class for colocated vLLM; its import reads the metadata of every package."""
    with pytest.MonkeyPatch.context() as patch:
        yield from imported(patch)


@pytest.fixture
def generation(trl_class: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield TRL's object for colocated vLLM over a tiny Qwen2, with a stand-in for vLLM."""
    yield from tiny_generation(trl_class, tmp_path, monkeypatch)
