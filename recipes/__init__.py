"""Runs of GRPO and PPO as YAML files (recipes), their loops, and the command `memsaver`.

    recipe = recipes.load("recipes/tiny.yaml", ["steps=3"])

Importing this package is cheap: the functions that need torch, transformers, ray or matplotlib
import them.
"""

from recipes.config.load import load
from recipes.config.recipe import Recipe
from recipes.errors import RecipeError, RunError

__all__ = ["Recipe", "RecipeError", "RunError", "load"]
