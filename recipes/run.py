"""A run from its recipe to its pictures: in process or through Ray actors, new or resumed."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from recipes.arguments import LOOPS, cycle_arguments, open_pair
from recipes.config.decisions import Decisions
from recipes.config.load import find_recipe, load
from recipes.config.recipe import Recipe
from recipes.errors import LostWorker, RecipeError, counted, one_line, shown
from recipes.logs.delivery import Trackers
from recipes.logs.metric_rows import BULKY, of_kind
from recipes.logs.monitor import Monitor
from recipes.logs.run_folder import OUTSIDE, RunFolder, at_work, check_holds_run, new_folder
from recipes.logs.view import ProgressView, View
from recipes.loops import corrections
from recipes.loops.evaluation import check_best, standing
from recipes.loops.loop import Loop
from recipes.planner.decide import decide
from recipes.setup.preparation import Setup, prepare
from recipes.tasks.scoring import open_rewards
from trainer_bridge import Cycle
from trainer_bridge.errors import OtherWeights
from trainer_bridge.remote import RemoteGroup
from trainer_bridge.tag_names import REFERENCE

# Keys and sections that a resumed run may change.
MAY_CHANGE = (
    *("steps", "eval", "checkpoint", "cycle", "cluster", "driver", "device"),
    *("trackers", "samples"),
)


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
    with (
        new_folder(run_dir, find_recipe(recipe_path).stem) as path,
        Trackers(recipe.trackers) as trackers,
    ):
        setup = prepare(recipe, path.absolute())  # Actors may have another working directory.
        check_best(setup)
        trackers.start(path.absolute(), dataclasses.asdict(recipe))
        _drive(setup, RunFolder.create(path, recipe), trackers, resume=False)
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
    check_holds_run("--resume", run_dir)
    folder, option = RunFolder(run_dir), f"--resume {run_dir}"
    with at_work(run_dir), ExitStack() as stack:
        with _standing_noted(folder):
            saved = load(run_dir / "recipe.yaml")
            recipe = load(recipe_path or run_dir / "recipe.yaml", overrides)
            if key := _first_difference(saved.loop_now(), recipe.loop_now(), MAY_CHANGE):
                rule = "differs from the run's own recipe.yaml; start a new run instead"
                raise RecipeError(f"{option}: {key}: {rule}")
            values = folder.checkpoints.values()
            if ended := _ended(folder, recipe):
                raise RecipeError(f"{option}: {ended}")
            # Chat templates that write a date keep that of the run's start.
            started = datetime.fromisoformat(values["started"]) if "started" in values else None
            setup = prepare(recipe, run_dir.absolute(), started, Decisions.lasting(values))
            check_best(setup)
            if difference := setup.other_prompts(values.get("prompts", {})):
                rule = "than the run began with; restore them, or start a new run"
                raise RecipeError(f"{option}: {difference} {rule}; nothing was changed")
            trackers = stack.enter_context(Trackers(recipe.trackers))
            trackers.start(run_dir.absolute(), dataclasses.asdict(recipe))
            folder = RunFolder.reopen(run_dir, recipe)
        note, before = "", values.get("steps", saved.steps)
        if recipe.trainer.schedule != "constant" and before != recipe.steps:
            note = f"; steps was {before}: without a jump, the fall of the learning rate now ends "
            note += f"after step {recipe.steps}"
        _drive(setup, folder, trackers, resume=True, note=note)
    return run_dir


@contextlib.contextmanager
def _standing_noted(folder: RunFolder) -> Iterator[None]:
    """Note the run's standing in an error; it is shown when an interrupt ends the command."""
    try:
        yield
    except RecipeError:  # A refusal says itself what to do.
        raise
    except BaseException as error:
        error.add_note(folder.standing())
        raise


def _ended(folder: RunFolder, recipe: Recipe) -> str:
    """Return why the run ended and how to continue it nevertheless; empty if it did not end."""
    step, section = folder.checkpoints.done, recipe.eval
    evaluations = of_kind(folder.rows(until=step), "eval")
    evaluated = not section.every or any(row["step"] == step for row in evaluations)
    exported = recipe.checkpoint.export_every is None or folder.checkpoints.export_of(step).is_dir()
    if step > recipe.steps or (step == recipe.steps and evaluated and exported):
        rule = f"the run is done after {counted(step, 'step')}; set steps={step + 10} to continue"
        return f"steps={recipe.steps}: {rule}"
    best = standing(evaluations, section.best)
    if section.patience and best and best.since >= section.patience:
        rule = f"none of {counted(best.since, 'evaluation')} was better than that after "
        rule += counted(best.step, "update")
        return f"eval.patience={section.patience}: {rule}; set eval.patience=0 to continue"
    return ""


def _first_difference(was: Any, now: Any, apart_from: Sequence[str] = ()) -> str:
    """Return `key=value` of the first key that differs; empty if no key does."""
    for name in [field.name for field in dataclasses.fields(was) if field.name not in apart_from]:
        before, after = getattr(was, name), getattr(now, name)
        if before != after:
            if dataclasses.is_dataclass(before):
                return f"{name}.{_first_difference(before, after)}"
            if isinstance(before, list) and len(before) == len(after):
                index = next(i for i, item in enumerate(before) if item != after[i])
                if dataclasses.is_dataclass(before[index]):
                    return f"{name}[{index}].{_first_difference(before[index], after[index])}"
            return f"{name}={shown(after)}"
    return ""


def _drive(
    setup: Setup, folder: RunFolder, trackers: Trackers, resume: bool, note: str = ""
) -> None:
    """Run a prepared recipe; restart it from the last checkpoint when a worker is lost.

    `note` ends the first line of the view.
    """
    recipe = setup.recipe
    allowed = recipe.checkpoint.max_restarts
    opening = (
        f"{folder.path}: {setup.decisions.driver}, {setup.device}, {counted(recipe.steps, 'step')}"
    )
    opening += "".join(f"; {task.summary()}" for task in setup.tasks.all)
    opening += corrections.summary(recipe) + note
    if setup.template is None and recipe.task.template is None:
        opening += "\nprompts: plain text, because the model's tokenizer has no chat template; "
        opening += "task.template=FILE names one"
    restarts = 0
    while True:
        try:
            with _standing_noted(folder):
                return _attempt(setup, folder, trackers, resume, opening)
        except LostWorker as lost:
            if restarts == allowed:
                remedy = folder.checkpoints.how_to_continue()
                raise LostWorker(lost.stage, lost.cause, remedy) from lost
            restarts += 1
            trackers.record()
            folder = RunFolder.reopen(folder.path, recipe)
            resume = folder.checkpoints.exist
            if resume:
                kept = Decisions.lasting(folder.checkpoints.values())
                setup = replace(setup, decisions=setup.decisions.taking(kept))
            folder.add_restart(restart=restarts, cause=str(lost))
            where = f"step {folder.checkpoints.done}" if resume else "the start"
            opening = f"restart {restarts} of {allowed} from {where}: {lost}"


def _attempt(
    setup: Setup, folder: RunFolder, trackers: Trackers, resume: bool, opening: str
) -> None:
    """Run once; trace and pictures are written even if the run fails."""
    view = ProgressView(setup.recipe.steps)
    monitor = Monitor(folder, view, setup.recipe.samples, trackers.add)
    try:
        view.note(opening)
        with ExitStack() as stack:
            # First, because worker processes start while the two sides are built.
            rewards = open_rewards(setup.tasks, setup.recipe.task, note=view.note)
            stack.enter_context(contextlib.closing(rewards))
            setup = stack.enter_context(setup.opened())
            recipe = setup.recipe
            if not recipe.engine.hosted:
                setup = _with_decisions(setup, folder, monitor)
            with monitor.stage("build"):
                pair = open_pair(setup, monitor.stage, monitor.replaced, folder.mismatch_dir)
                trainer, rollout = stack.enter_context(pair)
            _show_nodes(trainer, rollout, folder, view)
            if setup.decisions.exact and (found := rollout.product_report()):
                view.note(found)
            for name, side in (*_owners("trainer", trainer), *_owners("rollout", rollout)):
                monitor.watch(name, side)
            # The evaluation of the initial weights stays in a run that restarts from the start.
            before: dict[str, Any] = {"evaluations": of_kind(folder.rows(), "eval")}
            if resume:
                with monitor.stage("load_checkpoint"):
                    _load(folder, trainer, recipe)
                before["updates"] = folder.checkpoints.done
                before["drawn"] = folder.checkpoints.values()["prompts_drawn"]
            # The plan needs the bytes that a hosted engine holds outside of its tags.
            if recipe.engine.hosted:
                setup = _with_decisions(setup, folder, monitor)
            loop = LOOPS[recipe.algorithm](
                setup=setup,
                trainer=trainer,
                rollout=rollout,
                cycle=Cycle(trainer, rollout, on_stage=monitor.passed, **cycle_arguments(setup)),
                rewards=rewards,
                sink=monitor,
                save=partial(_save, folder, trainer, recipe, _state(setup)),
                complete=folder.checkpoints.complete,
                mark_best=partial(folder.checkpoints.mark_best, keep=recipe.checkpoint.keep),
                export=partial(_export, folder, trainer, setup),
                **before,
            )
            with _completed(folder, recipe):
                loop.run()
    finally:
        monitor.close()
    _note_outcome(folder, loop, view)


def _note_outcome(folder: RunFolder, loop: Loop, view: View) -> None:
    """Show the best evaluation, and how the run ended."""
    section, updates = loop.setup.recipe.eval, loop.updates
    if best := loop.standing:
        kept = folder.checkpoints.best()
        when = f"after {counted(best.step, 'update')}" if best.step else "before the first update"
        where = f" (checkpoints/{kept.name})" if kept else ""
        view.note(f"best: {section.best} {best.value:.3f} {when}{where}")
    outcome = "done"
    if updates < loop.setup.recipe.steps and best:
        outcome = f"ended early after {counted(updates, 'update')}: "
        outcome += f"{counted(best.since, 'evaluation')} without a better {section.best}"
        outcome += f" (eval.patience={section.patience})"
    if lost := sum(row.get("faults", 0) for row in of_kind(folder.rows(apart_from=BULKY), "train")):
        outcome += f", with {counted(lost, 'answer')} lost to failures of reward functions"
    export = folder.checkpoints.export_of(updates)
    view.note(f"{outcome}: {folder.path}" + (f"; the model: {export}" if export.is_dir() else ""))


def _with_decisions(setup: Setup, folder: RunFolder, monitor: Monitor) -> Setup:
    """Return the setup with all decisions made; show their reasons, and what does not fit."""
    outside = None
    with monitor.stage("plan"):
        total = device_bytes(setup.device)
        if total is not None and setup.recipe.engine.hosted and setup.decisions.open:
            outside = monitor.outside()
            folder.write_json(OUTSIDE, {"bytes": outside})
        decisions, plan = decide(setup, total, outside)
    folder.write_json("decisions.json", decisions.as_json())
    for line in decisions.lines:
        monitor.view.note(line)
    if plan is not None:
        folder.write_json("plan.json", plan.as_json())
        for line in plan.unfit:
            monitor.view.note(line)
    return replace(setup, decisions=decisions)


def device_bytes(device: str) -> int | None:
    """Return the bytes of a GPU; None for a CPU, which needs no plan."""
    if device == "cpu":
        return None
    import torch

    total: int = torch.cuda.get_device_properties(device).total_memory
    return total


def _state(setup: Setup) -> dict[str, Any]:
    """Return what a resume and an export need of a run's prompts and decisions."""
    state = {"prompts": setup.prompt_digests(), "started": setup.started.isoformat()}
    return {**state, "template": setup.template or "", "decisions": setup.decisions.as_json()}


@contextlib.contextmanager
def _completed(folder: RunFolder, recipe: Recipe) -> Iterator[None]:
    """Complete the last checkpoint if the block fails, but not if it is interrupted.

    The ranks of a larger trainer may not be there to agree on it.
    """
    try:
        yield
    except Exception:
        if recipe.cluster.size == 1:
            with contextlib.suppress(Exception):
                folder.checkpoints.complete()
        raise


def _save(
    folder: RunFolder, trainer: Any, recipe: Recipe, state: dict[str, Any], step: int, drawn: int
) -> None:
    extra = {"step": step, "steps": recipe.steps, "prompts_drawn": drawn, **state}

    def write(path: Path) -> None:
        trainer.save_checkpoint(str(path), extra, wait=False)

    folder.checkpoints.begin(step, recipe.checkpoint.keep, write, trainer.finish_checkpoint)


def _export(folder: RunFolder, trainer: Any, setup: Setup, step: int) -> None:
    # Without its base, which is random, an adapter is of no use.
    merge = bool(setup.recipe.lora.rank) and setup.recipe.model.random_init
    how = {"merge_adapters": merge, "chat_template": setup.template or ""}
    folder.checkpoints.save_export(step, lambda path: trainer.save_pretrained(str(path), **how))


def _load(folder: RunFolder, trainer: Any, recipe: Recipe) -> None:
    try:
        if recipe.reference_every:
            trainer.reload(REFERENCE)
        trainer.load_checkpoint(str(folder.checkpoints.newest().absolute()))
        if recipe.reference_every:
            trainer.offload(REFERENCE)
    except OtherWeights as error:
        path = recipe.model.path
        key = f"model.path={path}" if path else f"model: random weights, device={recipe.device}"
        raise RecipeError(f"--resume {folder.path}: {key}: {one_line(error)}") from error


def _show_nodes(trainer: Any, rollout: Any, folder: RunFolder, view: View) -> None:
    """Show and record the actors on each Ray node, if there are several nodes."""
    nodes: dict[str, str] = {}
    for side in (trainer, rollout):
        for actor in side.ranks if isinstance(side, RemoteGroup) else ():
            names = f"{nodes[actor.node]}, " if actor.node in nodes else ""
            nodes[actor.node] = names + actor.name
    if len(nodes) > 1:
        folder.add_nodes(nodes)
        view.note("; ".join(f"node {node}: {names}" for node, names in nodes.items()))


def _owners(name: str, side: Any) -> list[tuple[str, Any]]:
    """Return the holders of memory by name: the side itself, or its actors (`trainer[0]`)."""
    if isinstance(side, RemoteGroup):
        return [(actor.name, actor) for actor in side.each()]
    return [(name, side)]
