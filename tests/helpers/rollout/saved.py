"""Models on disk that are saved once per session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from tests.helpers.models import save_tiny


class Saved:
    """Cache of saved models: `saved(kind, seed=0, **overrides)` returns directory and model.

    Neither may be changed. `folder` creates a new directory with a name like its argument.
    """

    def __init__(self, folder: Callable[[str], Path]) -> None:
        self._folder = folder
        self._made: dict[str, tuple[Path, PreTrainedModel]] = {}

    def __call__(self, kind: str, seed: int = 0, **overrides: Any) -> tuple[Path, PreTrainedModel]:
        key = f"{kind} {seed} {sorted(overrides.items())}"
        if key not in self._made:
            path = self._folder("saved")
            self._made[key] = path, save_tiny(path, kind, seed, **overrides)
        return self._made[key]
