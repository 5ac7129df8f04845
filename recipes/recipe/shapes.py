"""Named model shapes (`shapes.yaml`), and the description of a recipe's random model."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

if TYPE_CHECKING:
    from recipes.recipe.sides import ModelSection


@cache
def shapes() -> dict[str, dict[str, Any]]:
    """Fields of a transformers config, with its model_type, by name of the shape."""
    loaded = OmegaConf.to_container(OmegaConf.load(Path(__file__).parent / "shapes.yaml"))
    assert isinstance(loaded, dict)
    return {str(name): fields for name, fields in loaded.items()}


def random_model_fields(section: ModelSection) -> dict[str, Any]:
    """What describes the random model: its shape's fields, or those that the recipe gives."""
    return dict(section.config or {}) if section.shape is None else dict(shapes()[section.shape])
