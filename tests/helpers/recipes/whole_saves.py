"""A checkpoint that is complete at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from recipes.logs.checkpoints import Checkpoints


def save(checkpoints: Checkpoints, step: int, keep: int, write: Callable[[Path], None]) -> None:
    checkpoints.begin(step, keep, write, lambda wait: True)
    checkpoints.complete()
