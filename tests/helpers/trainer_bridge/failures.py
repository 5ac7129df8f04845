"""A layer that fails in the middle of a pass."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn


@contextlib.contextmanager
def out_of_memory(layer: nn.Module, where: str) -> Iterator[None]:
    """Expect the error of a layer's second forward, or of the backward of that forward."""
    with failing_once(layer, where), pytest.raises(torch.OutOfMemoryError, match="short of mem"):
        yield


@contextlib.contextmanager
def failing_once(layer: nn.Module, where: str) -> Iterator[None]:
    """Let a layer's second forward fail, or the backward of that forward."""
    calls = itertools.count(1)

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("short of memory")

    def watch(module: Any, inputs: Any, output: Tensor) -> None:
        if next(calls) == 2:
            output.register_hook(fail) if where == "backward" else fail()

    watching = layer.register_forward_hook(watch)
    try:
        yield
    finally:
        watching.remove()
