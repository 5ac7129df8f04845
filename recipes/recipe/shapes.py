"""Named model shapes (`shapes.yaml`)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf


@cache
def shapes() -> dict[str, dict[str, Any]]:
    """Fields of a transformers config, with its model_type, by name of the shape."""
    loaded = OmegaConf.to_container(OmegaConf.load(Path(__file__).parent / "shapes.yaml"))
    assert isinstance(loaded, dict)
    return {str(name): fields for name, fields in loaded.items()}
