"""One run from recipe to pictures: in process or through Ray actors, new or resumed."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any

from recipes.errors import LostWorker, RecipeError, one_line
from recipes.grpo import GrpoLoop
from recipes.loop import Loop
from recipes.ppo import PpoLoop
from recipes.recipe import Recipe
from recipes.recipe.loading import find_recipe, load
from recipes.setup.preparation import Setup, prepare
from recipes.watch.live import make_view
from recipes.watch.monitor import Monitor
from recipes.watch.run_folder import RunFolder, claimed
from rollout import KVTiers
from rollout.serving import Preemption
from trainer_bridge import Cycle, LoraConfig, TrainerConfig, open_inprocess, open_ray
from trainer_bridge.remote import RemoteGroup

LOOPS: dict[str, type[Loop]] = {"grpo": GrpoLoop, "ppo": PpoLoop}
# Of a run that is continued:
MAY_CHANGE = ("steps", "status", "eval", "checkpoint", "cycle", "cluster", "driver", "device")


def start_run(recipe_path: str, overrides: Sequence[str] = (), run_dir: Path | None = None) -> Path:
    """Runs a recipe in a new folder and returns the folder. Raises RecipeError or RunError."""
    recipe = load(recipe_path, overrides)
    with ExitStack() as stack:
        if run_dir is None:
            run_dir = _claim_by_name(stack, find_recipe(recipe_path).stem)
        else:
            stack.enter_context(claimed(run_dir))
        RunFolder.refuse_used(run_dir)
        setup = prepare(recipe, run_dir.absolute())  # actors of a job may work in another directory
        _drive(setup, RunFolder.create(run_dir, recipe), resume=False)
    return run_dir


def _claim_by_name(stack: ExitStack, recipe: str) -> Path:
    """A new folder below runs/: named after the recipe and the time, and numbered where that is
    taken.
    """
    name = f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in itertools.count(1):
        path = Path("runs") / (name if number == 1 else f"{name}-{number}")
        with suppress(FileExistsError):
            stack.enter_context(claimed(path, new=True))
            return path
    raise AssertionError("numbers do not end")


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
    with claimed(run_dir):
        saved, recipe = load(saved_file), load(recipe_path or saved_file, overrides)
        if key := _first_difference(saved, recipe, MAY_CHANGE):
            rule = "differs from the run's own recipe.yaml; start a new run instead"
            raise RecipeError(f"{option}: {key}: {rule}")
        step = RunFolder(run_dir).last_checkpoint_step()
        if step >= recipe.steps:
            rule = f"{step} steps are already done; set steps={step + 10} to go on"
            raise RecipeError(f"{option}: steps={recipe.steps}: {rule}")
        setup = prepare(recipe, run_dir.absolute())
        _drive(setup, RunFolder.reopen(run_dir, recipe), resume=True)
    return run_dir


def _first_difference(was: Any, now: Any, apart_from: Sequence[str] = ()) -> str:
    """`key=value` of the first that is another now; empty where none is."""
    for name in [field.name for field in dataclasses.fields(was) if field.name not in apart_from]:
        before, after = getattr(was, name), getattr(now, name)
        if before != after:
            inside = dataclasses.is_dataclass(before)
            return f"{name}.{_first_difference(before, after)}" if inside else f"{name}={after}"
    return ""


def _drive(setup: Setup, folder: RunFolder, resume: bool) -> None:
    """The run itself; after the loss of a worker again from the last checkpoint, as often as the
    recipe allows.
    """
    recipe, allowed = setup.recipe, setup.recipe.checkpoint.max_restarts
    opening = (
        f"{folder.path}: {recipe.task.name}, {recipe.driver}, {setup.device}, {recipe.steps} steps"
    )
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
            where = f"step {folder.last_checkpoint_step()}" if resume else "the start"
            opening = f"restart {restarts} of {allowed} from {where}: {lost}"


def _attempt(setup: Setup, folder: RunFolder, resume: bool, opening: str) -> None:
    """Once through; whatever happens, trace and pictures of what was done are written."""
    recipe = setup.recipe
    view = make_view(f"memsaver  {folder.path}", recipe.steps)
    monitor = Monitor(folder, view)
    view.note(opening)
    try:
        with ExitStack() as stack:
            with monitor.stage("build"):
                trainer, rollout = stack.enter_context(open_pair(setup))
            for name, side in (*_owners("trainer", trainer), *_owners("rollout", rollout)):
                monitor.watch(name, side)
            first = 1
            if resume:
                with monitor.stage("load_checkpoint"):
                    trainer.load_checkpoint(str(folder.last_checkpoint().absolute()))
                first = folder.last_checkpoint_step() + 1
            cycle = Cycle(trainer, rollout, on_stage=monitor.passed, **cycle_arguments(recipe))
            loop = LOOPS[recipe.algorithm](
                setup=setup, trainer=trainer, rollout=rollout, cycle=cycle, monitor=monitor
            )
            loop.run(first, lambda step: _save(folder, trainer, step, recipe.checkpoint.keep))
    finally:
        view.stage("writing trace and pictures")
        problems = [
            text for write in (folder.write_trace, folder.write_pictures) if (text := _told(write))
        ]
        view.close()
        for problem in problems:
            view.note(problem)
    view.note(f"done: {folder.path}")


def _told(write: Callable[[], str | None]) -> str | None:
    """Says what could not be written and why; the run has perhaps failed of the same cause."""
    try:
        return write()
    except OSError as error:
        return f"no {write.__name__.removeprefix('write_')}: {one_line(error)}"


def _save(folder: RunFolder, trainer: Any, step: int, keep: int) -> None:
    folder.save_checkpoint(
        step, keep, lambda path: trainer.save_checkpoint(str(path), {"step": step})
    )


def _owners(name: str, side: Any) -> list[tuple[str, Any]]:
    """Lists who holds memory: the side itself, or each of its actors by name (`trainer[0]`, where
    there are several).
    """
    if isinstance(side, RemoteGroup):
        return [(each.name, each) for each in side.each()]
    return [(name, side)]


def open_pair(setup: Setup) -> AbstractContextManager[Any]:
    """Trainer and rollout of this recipe, alive inside the block."""
    config = trainer_config(setup)
    arguments = engine_arguments(setup)
    cluster = setup.recipe.cluster
    if setup.recipe.driver == "inprocess":
        return open_inprocess(config, arguments)
    # One machine's cluster can be started here, larger ones are there.
    address = "auto" if cluster.nnodes > 1 else None
    devices, nodes, timeout = cluster.n_gpus_per_node, cluster.nnodes, cluster.call_timeout
    return open_ray(
        config, arguments, devices=devices, nodes=nodes, address=address, timeout=timeout
    )


def cycle_arguments(recipe: Recipe) -> dict[str, Any]:
    """Returns what `Cycle` takes besides the two sides."""
    return {
        "sleep_level": recipe.engine.sleep_level,
        "keep": recipe.cycle.keep,
        "critic": recipe.algorithm == "ppo",
        "reference": recipe.loop.kl_coef > 0
        and not recipe.lora.rank,  # the base of adapters is there already
    }


def trainer_config(setup: Setup) -> TrainerConfig:
    section, loop, lora = setup.recipe.trainer, LOOPS[setup.recipe.algorithm], setup.recipe.lora
    return TrainerConfig(
        model_path=str(setup.model_dir),
        device=setup.device,
        random_init=setup.recipe.model.random_init,
        dtype=section.dtype,
        param_dtype=setup.recipe.model.dtype,
        learning_rate=section.learning_rate,
        weight_decay=section.weight_decay,
        betas=(section.beta1, section.beta2),
        max_grad_norm=section.max_grad_norm,
        micro_batch_size=section.micro_batch_size,
        activation_checkpointing=section.activation_checkpointing,
        threads=section.threads,
        seed=setup.recipe.seed,
        lora=LoraConfig(**dataclasses.asdict(lora)) if lora.rank else None,
        **loop.trainer_fields(setup.recipe),
    )


def engine_arguments(setup: Setup) -> dict[str, Any]:
    """Returns what `Engine.from_pretrained` takes besides the model and the device, which are the
    trainer's.
    """
    section = setup.recipe.engine
    tensor, ratio = section.tensor_parallel_size, section.host_to_device_ratio
    # Tensor-parallel ranks decide alike.
    preemption: Preemption = "cheapest" if tensor == 1 else "swap"
    return {
        "dtype": setup.recipe.model.dtype,
        "kv_tokens": setup.kv_tokens,
        "page_size": section.page_size,
        "max_running": section.max_running,
        "max_prefill_tokens": section.max_prefill_tokens,
        "prefix_states": section.prefix_states,
        "max_context_len": setup.max_request_tokens,
        "cuda_graphs": section.cuda_graphs,
        "kv_cache_dtype": section.kv_cache_dtype,
        "tiers": KVTiers(host_ratio=ratio, preemption=preemption) if ratio else None,
        "tensor_parallel_size": tensor,
        "seed": setup.recipe.seed,
    }
