"""Runs of GRPO and PPO as YAML files (recipes), their loops, and the command `memsaver`.

    recipe = recipes.load("recipes/tiny.yaml", ["steps=3"])

Importing this package is cheap: the functions that need torch, transformers, ray or matplotlib
import them.
"""

from typing import TYPE_CHECKING, Any

from recipes.errors import RecipeError, RunError

if TYPE_CHECKING:
    from recipes.config.load import load
    from recipes.config.recipe import Recipe

__all__ = ["Recipe", "RecipeError", "RunError", "load"]


def __getattr__(name: str) -> Any:
    """Import `load` and `Recipe` when they are used; worker processes of rewards start without."""
    if name not in ("Recipe", "load"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from recipes.config import load, recipe

    return {"Recipe": recipe.Recipe, "load": load.load}[name]
