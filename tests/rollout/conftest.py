"""Fixtures for models saved once per session and for devices on which Triton kernels can run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.rollout.saved import Saved
from tests.helpers.rollout.updates import TINY


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp)


@pytest.fixture(scope="session")
def path(saved: Saved) -> Path:
    """Return the directory of the model that most tests use, `updates.tiny(0)`."""
    return saved("qwen3", **TINY)[0]


@pytest.fixture
def triton_device(device: str) -> str:
    """Return `device` for a test of a kernel; skip the CPU if a GPU compiles the kernel."""
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("Triton's interpreter is off: the kernel runs on the GPU")
    return device


@pytest.fixture(params=["torch", "triton"])
def impl(request: pytest.FixtureRequest, device: str) -> str:
    if request.param == "triton":
        request.getfixturevalue("triton_device")
    return request.param
