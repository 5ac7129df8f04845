"""Recipes: one YAML for a run, the loops of GRPO and PPO, and the command `memsaver`.

    recipe = recipes.load("recipes/tiny.yaml", ["steps=3"])

Importing this package stays cheap: torch, transformers, ray and matplotlib are imported where they
are used.
"""

from recipes.config import Recipe
from recipes.config.loading import load
from recipes.errors import RecipeError, RunError

__all__ = ["Recipe", "RecipeError", "RunError", "load"]
