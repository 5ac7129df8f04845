"""`memsaver plan`: prints a plan, and writes it where it is wanted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipes.config import Recipe
from recipes.config.shapes import random_model_fields
from recipes.errors import RecipeError
from recipes.fetch import find_model
from recipes.loading import find_recipe, load
from recipes.models import toy_tokenizer
from recipes.planner.plan import Plan, make_plan
from recipes.planner.show import draw_plan, print_plan
from recipes.tasks import TOY_WORDS

DOES_NOT_FIT = 3


def plan_recipe(
    recipe_path: str,
    overrides: Sequence[str] = (),
    *,
    gpu: str | None = None,
    unstaged: bool = False,
    prompt_tokens: int | None = None,
    picture: Path | None = None,
    into: Path | None = None,
) -> int:
    """Exit status: 0, or 3 where it does not fit. picture: a PNG to draw. into: a run folder that gets plan.json."""
    if into is not None and not (into / "recipe.yaml").is_file():
        raise RecipeError(f"--into {into}: holds no run (no recipe.yaml); give the folder of a run")
    plan = plan_of(
        load(recipe_path, overrides), find_recipe(recipe_path).stem, gpu=gpu, staged=not unstaged, prompt=prompt_tokens
    )
    print_plan(plan)
    if picture is not None:
        draw_plan(plan, picture)
        print(f"picture: {picture}")
    if into is not None:
        (into / "plan.json").write_text(json.dumps(plan.as_json(), indent=1) + "\n")
        print(f"written: {into / 'plan.json'}; look at it beside what was measured: memsaver report {into}")
    return 0 if plan.fits else DOES_NOT_FIT


def plan_of(recipe: Recipe, name: str, *, gpu: str | None, staged: bool = True, prompt: int | None = None) -> Plan:
    """The plan of a recipe; a model on the disk is planned by its config.json."""
    return make_plan(recipe, name, gpu=gpu, staged=staged, prompt_tokens=prompt, fields=_fields(recipe))


def _fields(recipe: Recipe) -> dict[str, Any]:
    """Of the model's config. One that is not there yet has the shape that the recipe names beside it, if it does."""
    if recipe.model.path is None:
        return {"vocab_size": len(toy_tokenizer(TOY_WORDS)), **random_model_fields(recipe.model)}
    try:
        directory = find_model(recipe.model.path)
    except RecipeError:
        if recipe.model.shape is None:
            raise
        return random_model_fields(recipe.model)
    loaded = json.loads((directory / "config.json").read_text())
    assert isinstance(loaded, dict)
    return loaded
