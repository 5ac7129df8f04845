"""A run from its recipe to its pictures: in process or through Ray actors, new or resumed."""

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

# Keys and sections that a resumed run may change.
MAY_CHANGE = ("steps", "eval", "checkpoint", "cycle", "cluster", "driver", "device")


def start_run(recipe_path: str, overrides: Sequence[str] = (), run_dir: Path | None = None) -> Path:
    """Run a recipe in a new folder.

    Args:
        recipe_path: The recipe, as `find_recipe` takes it.
        overrides: `key=value` settings.
        run_dir: Folder of the run; None: a new one under runs/.

    Returns:
        The folder of the run.

    Raises:
        RecipeError: The recipe cannot run here.
        RunError: The run failed.
    """
    recipe = load(recipe_path, overrides)
    with new_folder(run_dir, find_recipe(recipe_path).stem) as path:
        setup = prepare(recipe, path.absolute())  # Actors may have another working directory.
        _drive(setup, recipe, RunFolder.create(path, recipe), resume=False)
    return path


def continue_run(
    run_dir: Path, recipe_path: str | None = None, overrides: Sequence[str] = ()
) -> Path:
    """Continue a run from its last checkpoint.

    Only the keys in `MAY_CHANGE` may differ from the run's recipe.

    Args:
        run_dir: Folder of the run.
        recipe_path: A recipe in place of the run's own.
        overrides: `key=value` settings.

    Returns:
        The folder of the run.

    Raises:
        RecipeError: There is nothing to continue, the recipe cannot run here, or another key, the
            prompts or the initial weights differ from those of the run.
        RunError: The run failed.
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
            rule = f"{step} steps are already done; set steps={step + 10} to continue"
            raise RecipeError(f"{option}: steps={recipe.steps}: {rule}")
        setup = prepare(recipe, run_dir.absolute())
        if difference := setup.other_prompts(values.get("prompts", {})):
            rule = "than the run began with; restore them, or start a new run"
            raise RecipeError(f"{option}: {difference} {rule}; nothing was changed")
        note, before = "", values.get("steps", saved.steps)
        if recipe.trainer.lr_decay and before != recipe.steps:
            note = f"; steps was {before}: from its last value the learning rate now falls to 0 "
            note += f"after step {recipe.steps}"
        _drive(setup, recipe, RunFolder.reopen(run_dir, recipe), resume=True, note=note)
    return run_dir


def _first_difference(was: Any, now: Any, apart_from: Sequence[str] = ()) -> str:
    """Return `key=value` of the first key that differs; empty if no key does."""
    for name in [field.name for field in dataclasses.fields(was) if field.name not in apart_from]:
        before, after = getattr(was, name), getattr(now, name)
        if before != after:
            inside = dataclasses.is_dataclass(before)
            return f"{name}.{_first_difference(before, after)}" if inside else f"{name}={after}"
    return ""


def _drive(setup: Setup, recipe: Recipe, folder: RunFolder, resume: bool, note: str = "") -> None:
    """Run a prepared recipe; restart it from the last checkpoint when a worker is lost.

    `recipe` is the user's recipe; that of `setup` has more keys decided. `note` ends the first line
    of the view.
    """
    allowed = recipe.checkpoint.max_restarts
    opening = (
        f"{folder.path}: {recipe.task.name}, {recipe.driver}, {setup.device}, {recipe.steps} steps"
    )
    if setup.left_out:
        limit = recipe.task.max_prompt_tokens
        opening += f"; {setup.left_out} problems left out by task.max_prompt_tokens={limit}"
    opening += note
    restarts = 0
    while True:
        try:
            return _attempt(setup, folder, resume, opening)
        except LostWorker as lost:
            if restarts == allowed:
                raise LostWorker(lost.stage, lost.cause, folder.how_to_continue()) from lost
            restarts += 1
            folder, resume = RunFolder.reopen(folder.path, recipe), folder.has_checkpoint()
            folder.add_restart(restarts, str(lost))
            where = f"step {folder.done}" if resume else "the start"
            opening = f"restart {restarts} of {allowed} from {where}: {lost}"
        except BaseException as error:
            error.add_note(folder.standing())  # shown when an interrupt ends the command
            raise


def _attempt(setup: Setup, folder: RunFolder, resume: bool, opening: str) -> None:
    """Run once; trace and pictures are written even if the run fails."""
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
            # The plan needs the bytes that a hosted engine holds outside of its tags.
            setup = _with_switch_decided(setup, folder, monitor) if hosted else setup
            recipe = setup.recipe
            cycle = Cycle(trainer, rollout, on_stage=monitor.passed, **cycle_arguments(recipe))
            loop = LOOPS[recipe.algorithm](
                setup=setup, trainer=trainer, rollout=rollout, cycle=cycle, monitor=monitor
            )
            prompts = setup.prompt_digests()
            loop.run(
                first,
                lambda step: _save(folder, trainer, step, recipe, prompts),
                lambda step: _export(folder, trainer, step, recipe),
            )
    finally:
        monitor.close()
    export = folder.export_of(recipe.steps)
    view.note(f"done: {folder.path}" + (f"; the model: {export}" if export.is_dir() else ""))


def _with_switch_decided(setup: Setup, folder: RunFolder, monitor: Monitor) -> Setup:
    """Return the setup with the recipe's switch decided; note the decision in the view."""
    with monitor.stage("plan"):
        decided = decide_switch(setup, folder, monitor)
    for line in decided.lines:
        monitor.view.note(line)
    recipe = switching(setup.recipe, decided.resident, decided.overlap, decided.hand_over)
    return dataclasses.replace(setup, recipe=recipe)


def decide_switch(setup: Setup, folder: RunFolder, monitor: Monitor) -> Switch:
    """Decide `cycle.resident`, `cycle.overlap` and `cycle.hand_over`.

    On a GPU, a plan decides keys that are auto. For a hosted engine, the plan takes the bytes
    outside of its tags as `monitor` measures them.
    """
    recipe, cycle, auto = setup.recipe, setup.recipe.cycle, setup.recipe.cycle.resident == "auto"
    switch = unplanned(cycle)
    overlap = cycle.overlap == "auto" and not recipe.engine.hosted
    hand_over = cycle.hand_over == "auto" and not switch.overlap
    if setup.device == "cpu" and auto:
        stays = recipe.resident_tags()
        line = f"stays: {', '.join(stays)}; a CPU uses host memory, so moving tags gains nothing"
        return switch._replace(resident=stays, lines=[line])
    if setup.device == "cpu" or not (auto or overlap or hand_over):
        return switch
    import torch

    total = torch.cuda.get_device_properties(setup.device).total_memory
    if not (recipe.engine.hosted and auto):
        return plan_apart(folder.path, total, cycle)
    folder.write_outside(monitor.outside())
    switch = plan_apart(folder.path, total, cycle)
    # The measured bytes include CUDA graphs, so graphs must stay.
    return switch._replace(resident=[*switch.resident, CUDA_GRAPH]) if switch.resident else switch


def _save(
    folder: RunFolder, trainer: Any, step: int, recipe: Recipe, prompts: dict[str, int]
) -> None:
    extra = {"step": step, "steps": recipe.steps, "prompts": prompts}
    folder.save_checkpoint(
        step, recipe.checkpoint.keep, lambda path: trainer.save_checkpoint(str(path), extra)
    )


def _export(folder: RunFolder, trainer: Any, step: int, recipe: Recipe) -> None:
    # Without its base, which is random, an adapter is of no use.
    merge = bool(recipe.lora.rank) and recipe.model.random_init
    folder.save_export(step, lambda path: trainer.save_pretrained(str(path), merge_adapters=merge))


def _load(folder: RunFolder, trainer: Any, recipe: Recipe) -> None:
    try:
        trainer.load_checkpoint(str(folder.last_checkpoint().absolute()))
    except OtherWeights as error:
        path = recipe.model.path
        key = f"model.path={path}" if path else f"model: random weights, device={recipe.device}"
        raise RecipeError(f"--resume {folder.path}: {key}: {one_line(error)}") from error


def _owners(name: str, side: Any) -> list[tuple[str, Any]]:
    """Return the holders of memory by name: the side itself, or its actors (`trainer[0]`)."""
    if isinstance(side, RemoteGroup):
        return [(actor.name, actor) for actor in side.each()]
    return [(name, side)]
