"""Recipes: one YAML for a run, the loops of GRPO and PPO, and the command `memsaver`.

    recipe = recipes.load("recipes/tiny.yaml", ["steps=3"])

Importing this package stays cheap: torch, transformers, ray and matplotlib are imported where they
are used.
"""

from recipes.config.load import load
from recipes.config.recipe import Recipe
from recipes.errors import RecipeError, RunError

__all__ = ["Recipe", "RecipeError", "RunError", "load"]
