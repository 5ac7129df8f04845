"""Models on disk that are made once a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from tests.helpers.models import save_tiny


class Saved:
    """saved(kind, seed=0, **overrides): where such a model lies, and the model. Neither may be
    changed.
    """

    def __init__(self, folder: Callable[[str], Path]) -> None:
        """folder: makes a new one of some name."""
        self._folder = folder
        self._made: dict[str, tuple[Path, PreTrainedModel]] = {}

    def __call__(self, kind: str, seed: int = 0, **overrides: Any) -> tuple[Path, PreTrainedModel]:
        key = f"{kind} {seed} {sorted(overrides.items())}"
        if key not in self._made:
            path = self._folder("saved")
            self._made[key] = path, save_tiny(path, kind, seed, **overrides)
        return self._made[key]
