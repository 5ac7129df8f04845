"""The command `memsaver plan`: plan a recipe, print the plan, draw it and write it to a run."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from rich.bar import Bar
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from memsaver.errors import format_bytes
from memsaver.system.files import replace_text
from recipes.config.load import find_recipe, load
from recipes.config.recipe import Recipe
from recipes.errors import DOES_NOT_FIT, RecipeError, shown, writable
from recipes.logs.run_folder import RunFolder, check_holds_run
from recipes.planner.memory_plan import MemoryPlan, Switch, placed, remedied
from recipes.planner.micro_batch import UNPLANNED
from recipes.planner.sizes import GIB
from recipes.planner.switch_plan import plan_switch
from recipes.setup.model_files import describe_random_model, toy_tokenizer
from recipes.setup.preparation import (
    check_lora,
    check_optimizer,
    described_model,
    encoded_tasks,
    with_alias_decided,
    with_exact_decided,
)
from recipes.tasks import make_tasks
from rollout.model import load_hf_config, read_json
from rollout.tag_names import TAGS as ENGINE_TAGS


def plan_recipe(recipe_path: str, overrides: Sequence[str], options: Namespace) -> int:
    """Plan a recipe, print the plan, and return the exit status: 0 if it fits, else 3.

    The option `picture` names a PNG to draw, and `into` the folder of a run that gets plan.json.
    """
    picture, into, prompt = options.picture, options.into, options.prompt_tokens
    if prompt is not None and prompt < 1:
        raise RecipeError(f"--prompt-tokens {prompt}: must be at least 1; leave it out")
    if into is not None:
        check_holds_run("--into", into)
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
        hint = f"compare it with the measurements: memsaver report {into}"
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
) -> MemoryPlan:
    """Plan a recipe with its own model and longest prompt, and try the remedies.

    If the model is not on this machine, the plan takes `model.shape` and guesses the prompt length.

    Args:
        recipe: The recipe.
        name: Title of the plan.
        gpu: GPU to plan for, as `placed` takes it; None: that of the recipe's cluster.
        staged: Whether only the weights wake before the sync, and the rest of the engine after it.
        prompt: Tokens of the longest prompt, in place of the task's.
        outside: Bytes outside of tags, as in `planning`.

    Raises:
        RecipeError: The recipe cannot be planned.
    """
    recipe, card = placed(recipe, gpu)
    with contextlib.ExitStack() as stack:
        try:
            tasks = make_tasks(recipe.task, recipe.eval.sets)
            directory, tokenizer = stack.enter_context(
                described_model(recipe, tasks, weights=False)
            )
            if prompt is None:
                tasks, _ = encoded_tasks(recipe, tasks, tokenizer, datetime.now())
                prompt = max(len(problem.prompt_ids) for problem in tasks.problems())
        except RecipeError:
            if recipe.model.path is None or recipe.model.shape is None:
                raise
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            describe_random_model(recipe.model.random_fields(), toy_tokenizer([]), directory)
        tied = load_hf_config(directory).tie_word_embeddings  # as the files of the weights have it
        fields = read_json(directory / "config.json") | {"tie_word_embeddings": tied}
        how: dict[str, Any] = {"staged": staged, "prompt_tokens": prompt, "outside": outside}

        def planned(recipe: Recipe) -> MemoryPlan:
            check_lora(recipe.lora, directory)
            check_optimizer(recipe)
            recipe = with_alias_decided(recipe, directory)
            device = "cpu" if recipe.device == "cpu" else None
            recipe, _ = with_exact_decided(recipe, directory, device)
            return plan_switch(recipe, name, gpu=card, fields=fields, **how)

        return remedied(planned(recipe), recipe, planned)


def unplanned(recipe: Recipe, *lines: str) -> Switch:
    """Return the switch that the recipe's keys name; auto keeps and hands over nothing."""
    cycle, keeps = recipe.cycle, recipe.trainer.keep_unsharded is True
    overlap = [] if cycle.overlap == "auto" else cycle.overlap
    if recipe.trainer.micro_batch_size == "auto":
        lines = (*lines, UNPLANNED)
    decided = cycle.named, overlap, cycle.hand_over == "always", 0.0, keeps
    return Switch(*decided, recipe.micro_batch_size, lines)


PATIENCE = 300.0  # seconds that a run waits for its plan; the largest plans take about 30


def plan_apart(
    run_dir: Path, total: int, recipe: Recipe, prompt_tokens: int, patience: float = PATIENCE
) -> Switch:
    """Plan a run in a separate process and return its switch.

    The process reads recipe.yaml in the run's folder and writes plan.json there. `total` is the
    bytes of the GPU, and `prompt_tokens` the length of the longest prompt. In `recipe`,
    `cycle.alias` and `exact` are decided, and so is the micro batch of a resumed run. The lines of
    the switch name every shortage. If no plan can be made within `patience` seconds, auto decides
    nothing, and a line gives the reason.
    """
    decided = [f"cycle.alias={recipe.cycle.alias}", f"exact={shown(recipe.exact)}"]
    decided.append(f"trainer.micro_batch_size={recipe.trainer.micro_batch_size}")
    words = [str(run_dir / "recipe.yaml"), *decided, "--gpu", str(total)]
    words += ["--prompt-tokens", str(prompt_tokens)]
    try:
        # -P: do not import a package `recipes` from the working directory.
        done = subprocess.run(
            [sys.executable, "-P", "-m", "recipes.cli", "plan", *words, "--into", str(run_dir)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=patience,
        )
    except subprocess.TimeoutExpired:
        return _without_plan(recipe, f"it took more than {patience:g} s")
    if done.returncode not in (0, DOES_NOT_FIT):
        lines = done.stderr.strip().splitlines()
        return _without_plan(recipe, lines[-1] if lines else f"exit status {done.returncode}")
    plan = json.loads((run_dir / "plan.json").read_text())
    switch = Switch(**plan["switch"])
    return switch._replace(lines=[*switch.lines, *map(unfit, plan["needs"])])


def _without_plan(recipe: Recipe, why: str) -> Switch:
    stays = ", ".join(recipe.cycle.named) or "nothing"
    return unplanned(recipe, f"stays: {stays}; there is no plan: {why}")


def unfit(need: str) -> str:
    """Return the line that reports a shortage."""
    return f"does not fit: {need}"


_WIDTH = 132  # columns of output that goes to no terminal


def print_plan(plan: MemoryPlan, console: Console | None = None) -> None:
    """Print a table with a row for each stage, then the lines that hold for the whole step."""
    console = console or Console(width=None if sys.stdout.isatty() else _WIDTH)
    tables = (
        _table(plan, _parts(plan), bars=True),
        _table(plan, _parts(plan)),
        _table(plan, _sums(plan)),
    )
    table = next((table for table in tables if _width_of(table) <= console.width), tables[-1])
    table.width = _width_of(table)  # A narrower terminal wraps the table; no number is cut.
    console.print(table, crop=False)
    # A file's name or a setting may have square brackets, which rich would take for markup.
    show = partial(console.print, markup=False, highlight=False)
    if table is tables[-1]:
        tags = f"; {_width_of(tables[1])} columns show every tag"
        show(f"trainer, engine: sums over their tags{tags}", style="dim")
    many = "" if plan.devices == 1 else f", each of {plan.devices} alike"
    if plan.rollout_devices:
        many = f", {plan.devices} with a trainer and {plan.rollout_devices} with an engine only"
    on = f"; {plan.machines} machines" if plan.machines > 1 else ""
    show(f"GPU: {plan.gpu.name}, {format_bytes(plan.gpu.total)}{many}{on}")
    room = "" if plan.host_room is None else f"; at most {format_bytes(int(plan.host_room))} fit"
    show(f"host: {format_bytes(plan.host_bytes)} on each machine{room}")
    most = f"at most {plan.most_kv_tokens:,} fit at every stage"
    show(f"KV cache: {plan.kv_tokens:,} tokens an engine; {most}")
    for line in plan.switch.lines if plan.switch else ():
        show(line)
    for note in plan.notes:
        show(f"note: {note}", style="dim")
    for need in plan.needs:
        show(unfit(need), style="bold red")
    if plan.fits:
        peak = max(reversed(plan.rows), key=lambda stage: stage.device_bytes)
        left = format_bytes(plan.gpu.total - peak.device_bytes)
        show(f"fits: {peak.stage} takes the most and leaves {left}", style="bold green")


def _width_of(table: Table) -> int:
    return Console(width=1000).measure(table).maximum


def _table(plan: MemoryPlan, parts: dict[str, list[float]], bars: bool = False) -> Table:
    """Build a table with a row for each stage and a column for each part (GiB by stage).

    With bars, headings stay on one line.
    """
    title = f"{escape(plan.name)}: GiB of the fullest GPU"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("stage", no_wrap=True)
    if bars:
        table.add_column("", no_wrap=True)
    for name in ("GPU", *parts, "host"):
        heading = name if bars else name.replace("_", "\n")
        table.add_column(heading, justify="right", no_wrap=True)
    for place, stage in enumerate(plan.rows):
        over = stage.device_bytes > plan.room
        color = "red" if over else "cyan"
        bar = Bar(plan.gpu.total, 0, stage.device_bytes, width=12, color=color)
        table.add_row(
            stage.stage,
            *([bar] if bars else []),
            Text(f"{stage.device_bytes / GIB:.2f}", style="bold red" if over else "bold"),
            *(f"{values[place]:.2f}" if values[place] else "-" for values in parts.values()),
            f"{stage.host / GIB:.2f}" if stage.host else "-",
        )
    return table


def draw_plan(plan: MemoryPlan, file: Path) -> None:
    """Draw a stacked bar for each stage (tags, torch, contexts) and a line at the GPU's size."""
    from matplotlib.figure import Figure

    from recipes.logs.pictures import looks, save_picture

    parts = _parts(plan)
    figure = Figure(figsize=(11, 1.6 + 0.34 * len(plan.rows)))
    axes = figure.subplots()
    names = [stage.stage for stage in plan.rows]
    left = [0.0] * len(names)
    for part, values in parts.items():
        axes.barh(names, values, 0.72, left, label=part, **looks(parts)[part])
        left = [low + value for low, value in zip(left, values, strict=True)]
    axes.axvline(plan.gpu.total / GIB, color="#222222", linestyle="--", linewidth=1.1)
    axes.set(xlabel="GiB", title=f"{plan.name} on {plan.gpu.name}, planned")
    axes.invert_yaxis()
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    save_picture(figure, file, bbox_inches="tight")


def _parts(plan: MemoryPlan) -> dict[str, list[float]]:
    """Return GiB of each stage: of every tag, of torch in all processes, and of contexts."""
    parts: dict[str, list[float]] = {}
    tags = chain.from_iterable(stage.tags.items() for stage in plan.rows)
    for tag in dict.fromkeys(tag for tag, nbytes in tags if nbytes):
        parts[tag] = [stage.tags.get(tag, 0) / GIB for stage in plan.rows]
    parts["torch"] = [sum(stage.torch.values()) / GIB for stage in plan.rows]
    parts["contexts"] = [stage.contexts / GIB for stage in plan.rows]
    return parts


def _sums(plan: MemoryPlan) -> dict[str, list[float]]:
    """Return `_parts` with one sum for the trainer's tags and one for the engine's."""
    parts = _parts(plan)
    sums = {"trainer": [0.0] * len(plan.rows), "engine": [0.0] * len(plan.rows)}
    for name in [*parts][:-2]:
        side = "engine" if name in ENGINE_TAGS else "trainer"
        sums[side] = [sum(pair) for pair in zip(sums[side], parts[name], strict=True)]
    return {**sums, "torch": parts["torch"], "contexts": parts["contexts"]}
