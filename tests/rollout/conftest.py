"""Models that are made once, and what asks whether a kernel is interpreted here."""

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
    """Of the model that most tests take: `updates.tiny(0)`."""
    return saved("qwen3", **TINY)[0]


@pytest.fixture
def triton_device(device: str) -> str:
    """`device`, for a test of kernels: not the host's where a GPU compiles them."""
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("Triton is not interpreted here: the kernel runs on the GPU")
    return device


@pytest.fixture(params=["torch", "triton"])
def impl(request: pytest.FixtureRequest, device: str) -> str:
    if request.param == "triton":
        request.getfixturevalue("triton_device")
    return request.param
