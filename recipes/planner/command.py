"""`memsaver plan`: prints a plan, and writes it where it is wanted."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from memsaver.common.files import replace_text
from recipes.errors import RecipeError, writable
from recipes.planner.plan import Plan, make_plan
from recipes.planner.show import draw_plan, print_plan
from recipes.recipe import Recipe
from recipes.recipe.loading import find_recipe, load
from recipes.setup.preparation import described_model, longest_prompt
from recipes.tasks import make_task

DOES_NOT_FIT = 3


def plan_recipe(recipe_path: str, overrides: Sequence[str], options: Namespace) -> int:
    """Exit status: 0, or 3 where it does not fit.

    options: `memsaver plan`'s. picture: a PNG to draw. into: a run folder that gets plan.json.
    """
    picture, into, prompt = options.picture, options.into, options.prompt_tokens
    if prompt is not None and prompt < 1:
        raise RecipeError(f"--prompt-tokens {prompt}: must be at least 1; leave it away")
    if into is not None and not (into / "recipe.yaml").is_file():
        raise RecipeError(f"--into {into}: holds no run (no recipe.yaml); give the folder of a run")
    recipe, name = load(recipe_path, overrides), find_recipe(recipe_path).stem
    plan = plan_of(recipe, name, gpu=options.gpu, staged=not options.unstaged, prompt=prompt)
    print_plan(plan)
    if picture is not None:
        with writable(f"--picture {picture}"):
            draw_plan(plan, picture)
        print(f"picture: {picture}")
    if into is not None:
        with writable(f"--into {into}"):
            replace_text(into / "plan.json", json.dumps(plan.as_json(), indent=1) + "\n")
        hint = f"look at it beside what was measured: memsaver report {into}"
        print(f"written: {into / 'plan.json'}; {hint}")
    return 0 if plan.fits else DOES_NOT_FIT


def plan_of(
    recipe: Recipe, name: str, *, gpu: str | None, staged: bool = True, prompt: int | None = None
) -> Plan:
    """The plan of a recipe, with its own model and longest prompt.

    A model that is not on this machine yet has the shape that the recipe names beside it, and
    prompts are guessed.
    """
    rest: dict[str, Any] = {"gpu": gpu, "staged": staged}
    try:
        task = make_task(recipe.task, recipe.eval.also_digits)
        with described_model(recipe, task) as (directory, tokenizer):
            fields = json.loads((directory / "config.json").read_text())
            longest = prompt or longest_prompt(recipe, task, tokenizer)
    except RecipeError:
        if recipe.model.path is None or recipe.model.shape is None:
            raise
        return make_plan(recipe, name, prompt_tokens=prompt, **rest)
    return make_plan(recipe, name, fields=fields, prompt_tokens=longest, **rest)
