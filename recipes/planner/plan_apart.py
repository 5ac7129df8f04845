"""The plan of a prepared run, made in a process of its own.

As a script, this file makes a plan; it reads and writes pickles.
"""

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from recipes.config.decisions import Decisions
from recipes.config.recipe import Recipe
from recipes.planner.memory_plan import MemoryPlan, remedied
from recipes.planner.sizes import Gpu, of_device
from recipes.planner.switch_plan import plan_switch
from recipes.setup.model_decisions import first_decisions
from recipes.setup.preparation import Setup, check_functions, check_lora, check_optimizer
from rollout.model import load_hf_config, read_json

PATIENCE = 300.0
"""Seconds that a run waits for its plan; the largest plans take about 30."""


class NoPlan(Exception):
    """There is no plan; the text is the reason."""


def plan_apart(setup: Setup, total: int, outside: int | None = None) -> MemoryPlan:
    """Plan a prepared run for a GPU of `total` bytes in a separate process.

    `outside` are bytes as in `planning`. A plan replaces parts of torch, which the process of a run
    needs.

    Raises:
        NoPlan: The plan failed, or took longer than `PATIENCE`.
    """
    how = {"prompt_tokens": setup.longest_prompt, "outside": outside}
    asked = setup.recipe, setup.decisions, "run", setup.model_dir, of_device(total), how
    try:
        # -P: do not import a package `recipes` from the working directory.
        done = subprocess.run(
            [sys.executable, "-P", "-m", __name__],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""},
            input=pickle.dumps(asked),
            capture_output=True,
            timeout=PATIENCE,
        )
    except subprocess.TimeoutExpired:
        raise NoPlan(f"it took more than {PATIENCE:g} s") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise NoPlan(lines[-1] if lines else f"exit status {done.returncode}")
    plan: MemoryPlan = pickle.loads(done.stdout)
    return plan


def plan_with_remedies(
    recipe: Recipe, decisions: Decisions, name: str, directory: Path, card: Gpu, how: dict[str, Any]
) -> MemoryPlan:
    """Plan a recipe, make its open decisions, and try remedies of a shortage.

    Args:
        recipe: The recipe.
        decisions: Decisions, of which `exact` and `alias` are made.
        name: Title of the plan.
        directory: Folder of the model.
        card: The GPU.
        how: Options of `planning`.
    """
    tied = load_hf_config(directory).tie_word_embeddings  # as the files of the weights have it
    fields = read_json(directory / "config.json") | {"tie_word_embeddings": tied}

    def planned(recipe: Recipe, decisions: Decisions) -> MemoryPlan:
        check_lora(recipe.lora, directory)
        check_optimizer(recipe)
        check_functions(recipe)
        return plan_switch(recipe, decisions, name, gpu=card, fields=fields, **how)

    def replanned(recipe: Recipe, made: Decisions) -> MemoryPlan:
        present = [tag for tag in made.resident if tag in recipe.present_tags()]
        overlap = [tag for tag in made.overlap if tag in recipe.present_tags()]
        again = frozenset({"exact", "alias", "hand_over"})
        made = replace(made, resident=tuple(present), overlap=tuple(overlap), open=again)
        return planned(recipe, first_decisions(recipe, directory, planned_device(recipe), made))

    return remedied(planned(recipe, decisions), recipe, replanned)


def planned_device(recipe: Recipe) -> str | None:
    """Return the device of a planned run, as `first_decisions` takes it."""
    return "cpu" if recipe.device == "cpu" else None


if __name__ == "__main__":
    answer = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # A library may print while it is imported.
    try:
        pickle.dump(plan_with_remedies(*pickle.load(sys.stdin.buffer)), answer)
    except ValueError as error:  # RecipeError among them
        sys.exit(str(error))
    answer.flush()
