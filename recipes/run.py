"""One run from recipe to pictures: in process or through Ray actors, new or resumed."""

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from recipes.arguments import LOOPS, cycle_arguments, open_pair
from recipes.config.load import find_recipe, load
from recipes.config.recipe import Recipe, switching
from recipes.errors import LostWorker, RecipeError, one_line
from recipes.logs.monitor import Monitor, ProgressView
from recipes.logs.run_folder import RunFolder, at_work, new_folder
from recipes.planner.command import plan_apart, unplanned
from recipes.planner.memory_plan import Switch
from recipes.setup.preparation import Setup, prepare
from rollout.tag_names import CUDA_GRAPH
from trainer_bridge import Cycle
from trainer_bridge.errors import OtherWeights
from trainer_bridge.remote import RemoteGroup

# Of a run that is continued:
MAY_CHANGE = ("steps", "status", "eval", "checkpoint", "cycle", "cluster", "driver", "device")


def start_run(recipe_path: str, overrides: Sequence[str] = (), run_dir: Path | None = None) -> Path:
    """Runs a recipe in a new folder and returns the folder. Raises RecipeError or RunError."""
    recipe = load(recipe_path, overrides)
    with new_folder(run_dir, find_recipe(recipe_path).stem) as path:
        setup = prepare(recipe, path.absolute())  # actors of a job may work in another directory
        _drive(setup, recipe, RunFolder.create(path, recipe), resume=False)
    return path


def continue_run(
    run_dir: Path, recipe_path: str | None = None, overrides: Sequence[str] = ()
) -> Path:
    """Goes on from the last checkpoint in `run_dir`, with the recipe saved there unless one is
    given.

    What decides the numbers (model, task, sampling, ...) must be as it was; RecipeError names the
    first difference.
    """
    saved_file, option = run_dir / "recipe.yaml", f"--resume {run_dir}"
    if not saved_file.is_file():
        rule = "holds no run (no recipe.yaml); give the folder of an earlier run"
        raise RecipeError(f"{option}: {rule}")
    with at_work(run_dir):
        saved, recipe = load(saved_file), load(recipe_path or saved_file, overrides)
        if key := _first_difference(saved, recipe, MAY_CHANGE):
            rule = "differs from the run's own recipe.yaml; start a new run instead"
            raise RecipeError(f"{option}: {key}: {rule}")
        folder = RunFolder(run_dir)
        values, step = folder.checkpoint_values(), folder.done
        evaluated = not recipe.eval.every or folder.evaluated(step)
        if step > recipe.steps or (step == recipe.steps and evaluated):
            rule = f"{step} steps are already done; set steps={step + 10} to go on"
            raise RecipeError(f"{option}: steps={recipe.steps}: {rule}")
        setup = prepare(recipe, run_dir.absolute())
        if other := setup.other_prompts(values.get("prompts", {})):
            rule = "than the run began with; put those back, or start a new run"
            raise RecipeError(f"{option}: {other} {rule}; nothing was changed")
        said, before = "", values.get("steps", saved.steps)
        if recipe.trainer.lr_decay and before != recipe.steps:
            said = f"; steps was {before}: from the last update's the learning rate now falls to 0 "
            said += f"after step {recipe.steps}"
        _drive(setup, recipe, RunFolder.reopen(run_dir, recipe), resume=True, said=said)
    return run_dir


def _first_difference(was: Any, now: Any, apart_from: Sequence[str] = ()) -> str:
    """`key=value` of the first that is another now; empty where none is."""
    for name in [field.name for field in dataclasses.fields(was) if field.name not in apart_from]:
        before, after = getattr(was, name), getattr(now, name)
        if before != after:
            inside = dataclasses.is_dataclass(before)
            return f"{name}.{_first_difference(before, after)}" if inside else f"{name}={after}"
    return ""


def _drive(setup: Setup, recipe: Recipe, folder: RunFolder, resume: bool, said: str = "") -> None:
    """The run itself; after the loss of a worker again from the last checkpoint, as often as the
    recipe allows.

    recipe: as it was asked for; the setup's has more decided. said: ends the first line.
    """
    allowed = recipe.checkpoint.max_restarts
    opening = (
        f"{folder.path}: {recipe.task.name}, {recipe.driver}, {setup.device}, {recipe.steps} steps"
    )
    if setup.left_out:
        limit = recipe.task.max_prompt_tokens
        opening += f"; {setup.left_out} problems left out by task.max_prompt_tokens={limit}"
    opening += said
    if recipe.status == "planned":
        opening += "; status=planned: this recipe was worked out, nobody has run it yet"
    restarts = 0
    while True:
        try:
            return _attempt(setup, folder, resume, opening)
        except LostWorker as lost:
            if restarts == allowed:
                raise LostWorker(lost.stage, lost.cause, folder.how_to_go_on()) from lost
            restarts += 1
            folder, resume = RunFolder.reopen(folder.path, recipe), folder.has_checkpoint()
            folder.add_restart(restarts, str(lost))
            where = f"step {folder.done}" if resume else "the start"
            opening = f"restart {restarts} of {allowed} from {where}: {lost}"
        except BaseException as error:
            error.add_note(folder.standing())  # said where an interrupt ends the command
            raise


def _attempt(setup: Setup, folder: RunFolder, resume: bool, opening: str) -> None:
    """Once through; whatever happens, trace and pictures of what was done are written."""
    view = ProgressView(setup.recipe.steps)
    monitor = Monitor(folder, view)
    view.note(opening)
    try:
        with ExitStack() as stack:
            hosted = setup.recipe.engine.hosted
            setup = setup if hosted else _with_switch_decided(setup, folder, monitor)
            with monitor.stage("build"):
                trainer, rollout = stack.enter_context(open_pair(setup))
            for name, side in (*_owners("trainer", trainer), *_owners("rollout", rollout)):
                monitor.watch(name, side)
            first = 1
            if resume:
                with monitor.stage("load_checkpoint"):
                    _load(folder, trainer, setup.recipe)
                first = folder.done + 1
            # what another project's engine holds outside of its tags is measured when it is there
            setup = _with_switch_decided(setup, folder, monitor) if hosted else setup
            recipe = setup.recipe
            cycle = Cycle(trainer, rollout, on_stage=monitor.passed, **cycle_arguments(recipe))
            loop = LOOPS[recipe.algorithm](
                setup=setup, trainer=trainer, rollout=rollout, cycle=cycle, monitor=monitor
            )
            prompts = setup.prompt_digests()
            loop.run(first, lambda step: _save(folder, trainer, step, recipe, prompts))
    finally:
        monitor.close()
    view.note(f"done: {folder.path}")


def _with_switch_decided(setup: Setup, folder: RunFolder, monitor: Monitor) -> Setup:
    """Return the setup with the recipe's switch decided, of which the view is told."""
    with monitor.stage("plan"):
        decided = decide_switch(setup, folder, monitor)
    for line in decided.lines:
        monitor.view.note(line)
    recipe = switching(setup.recipe, decided.resident, decided.overlap, decided.hand_over)
    return dataclasses.replace(setup, recipe=recipe)


def decide_switch(setup: Setup, folder: RunFolder, monitor: Monitor) -> Switch:
    """Decide `cycle.resident`, `cycle.overlap` and `cycle.hand_over`: by a plan where one of them
    is auto and the device is no CPU.

    With another project's engine `monitor` says what it holds outside of its tags.
    """
    recipe, cycle, auto = setup.recipe, setup.recipe.cycle, setup.recipe.cycle.resident == "auto"
    said = unplanned(cycle)
    beside = cycle.overlap == "auto" and not recipe.engine.hosted
    way = cycle.hand_over == "auto" and not said.overlap
    if setup.device == "cpu" and auto:
        stays = recipe.resident_tags()
        line = f"stays: {', '.join(stays)}; a CPU's memory is the host's, and none is gained"
        return said._replace(resident=stays, lines=[line])
    if setup.device == "cpu" or not (auto or beside or way):
        return said
    import torch

    total = torch.cuda.get_device_properties(setup.device).total_memory
    if not (recipe.engine.hosted and auto):
        return plan_apart(folder.path, total, cycle)
    folder.write_outside(monitor.outside())
    found = plan_apart(folder.path, total, cycle)
    # graphs are among what was measured, as if they always stayed
    return found._replace(resident=[*found.resident, CUDA_GRAPH]) if found.resident else found


def _save(
    folder: RunFolder, trainer: Any, step: int, recipe: Recipe, prompts: dict[str, int]
) -> None:
    extra = {"step": step, "steps": recipe.steps, "prompts": prompts}
    folder.save_checkpoint(
        step, recipe.checkpoint.keep, lambda path: trainer.save_checkpoint(str(path), extra)
    )


def _load(folder: RunFolder, trainer: Any, recipe: Recipe) -> None:
    try:
        trainer.load_checkpoint(str(folder.last_checkpoint().absolute()))
    except OtherWeights as error:
        path = recipe.model.path
        key = f"model.path={path}" if path else f"model: random weights, device={recipe.device}"
        raise RecipeError(f"--resume {folder.path}: {key}: {one_line(error)}") from error


def _owners(name: str, side: Any) -> list[tuple[str, Any]]:
    """Lists who holds memory: the side itself, or each of its actors by name (`trainer[0]`)."""
    if isinstance(side, RemoteGroup):
        return [(each.name, each) for each in side.each()]
    return [(name, side)]
