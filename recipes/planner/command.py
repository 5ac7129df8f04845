"""`memsaver plan`: prints a plan, and writes it where it is wanted."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from memsaver.common.files import replace_text
from recipes.errors import DOES_NOT_FIT, RecipeError, writable
from recipes.planner.plan import Plan, placed
from recipes.planner.show import draw_plan, print_plan
from recipes.planner.switch import plan_switch
from recipes.recipe import CycleSection, Recipe
from recipes.recipe.loading import find_recipe, load
from recipes.setup.models import describe_random_model, toy_tokenizer
from recipes.setup.preparation import described_model, longest_prompt, with_alias_decided
from recipes.tasks import make_task
from recipes.watch.run_folder import RunFolder


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
    outside = None if into is None else RunFolder(into).outside()
    how = {"staged": not options.unstaged, "prompt": prompt, "outside": outside}
    plan = plan_of(recipe, name, gpu=options.gpu, **how)
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
    recipe: Recipe,
    name: str,
    *,
    gpu: str | None,
    staged: bool = True,
    prompt: int | None = None,
    outside: int | None = None,
) -> Plan:
    """The plan of a recipe, with its own model and longest prompt.

    A model that is not on this machine yet has the shape that the recipe names beside it, and
    prompts are guessed. outside: as of `make_plan`.
    """
    recipe, card = placed(recipe, gpu)
    fields: dict[str, Any]
    try:
        task = make_task(recipe.task, recipe.eval.also_digits)
        with described_model(recipe, task) as (directory, tokenizer):
            fields = json.loads((directory / "config.json").read_text())
            prompt = prompt or longest_prompt(recipe, task, tokenizer)
            recipe = with_alias_decided(recipe, directory)
    except RecipeError:
        if recipe.model.path is None or recipe.model.shape is None:
            raise
        fields = recipe.model.random_fields()
        with tempfile.TemporaryDirectory() as folder:
            describe_random_model(fields, toy_tokenizer([]), Path(folder))
            recipe = with_alias_decided(recipe, Path(folder))
    how: dict[str, Any] = {"staged": staged, "prompt_tokens": prompt, "outside": outside}
    return plan_switch(recipe, name, gpu=card, fields=fields, **how)


class Decided(NamedTuple):
    """keep, overlap, hand_over: as of `Switch`. lines: say what was decided and why."""

    keep: list[str]
    overlap: list[str]
    hand_over: bool
    lines: list[str]


def unplanned(cycle: CycleSection, lines: list[str]) -> Decided:
    """Returns what the keys say by themselves: nothing stays or is handed over by auto."""
    overlap = [] if cycle.overlap == "auto" else cycle.overlap
    return Decided(cycle.named, overlap, cycle.hand_over == "always", lines)


@contextlib.contextmanager
def plan_beside(run_dir: Path, total: int, cycle: CycleSection) -> Iterator[Callable[[], Decided]]:
    """Plans the run in `run_dir` in a process beside this one, and gives what waits for its switch.

    total: bytes of its GPU. cycle: of the recipe, with alias decided. plan.json stays in the
    folder; without a plan nothing is decided by auto, and the line says why.
    """
    words = [str(run_dir / "recipe.yaml"), f"cycle.alias={cycle.alias}", "--gpu", str(total)]
    process = subprocess.Popen(
        [sys.executable, "-m", "recipes.cli", "plan", *words, "--into", str(run_dir)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )

    def decided() -> Decided:
        said = process.communicate()[1].strip().splitlines()
        if process.returncode not in (0, DOES_NOT_FIT):
            why = said[-1] if said else f"exit status {process.returncode}"
            stays = ", ".join(cycle.named) or "nothing"
            return unplanned(cycle, [f"cycle: {stays} stays, there is no plan: {why}"])
        switch = json.loads((run_dir / "plan.json").read_text())["switch"]
        return Decided(**{name: switch[name] for name in Decided._fields})

    with process:
        try:
            yield decided
        finally:
            process.kill()
