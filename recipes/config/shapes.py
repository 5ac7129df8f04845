"""Named model shapes (`shapes.yaml`), and the description of a recipe's random model."""

from __future__ import annotations

import difflib
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from recipes.config import ModelSection
from recipes.errors import RecipeError


@cache
def shapes() -> dict[str, dict[str, Any]]:
    """Fields of a transformers config, with its model_type, by name of the shape."""
    loaded = OmegaConf.to_container(OmegaConf.load(Path(__file__).parent / "shapes.yaml"))
    assert isinstance(loaded, dict)
    return {str(name): fields for name, fields in loaded.items()}


def random_model_fields(section: ModelSection) -> dict[str, Any]:
    """What describes the random model: its shape's fields, or those that the recipe gives."""
    if section.shape is None:
        return dict(section.config or {})
    if (fields := shapes().get(section.shape)) is not None:
        return dict(fields)
    close = difflib.get_close_matches(section.shape, shapes(), n=1)
    hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(shapes())}"
    raise RecipeError(f"model.shape={section.shape}: unknown shape; {hint}")
