"""The command `memsaver plan`: plan a recipe, print the plan, draw it and write it to a run."""

import contextlib
import json
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
from recipes.config.rules import checked
from recipes.errors import DOES_NOT_FIT, RecipeError, writable
from recipes.logs.run_folder import OUTSIDE, check_holds_run, read_json
from recipes.planner.memory_plan import MemoryPlan, PlanRequest, placed
from recipes.planner.remedies import plan_with_remedies
from recipes.planner.sizes import GIB, MIB
from recipes.setup.conversations import with_tools
from recipes.setup.model_decisions import first_decisions, with_adapters
from recipes.setup.model_files import describe_random_model, toy_tokenizer
from recipes.setup.preparation import described_model, encoded_tasks
from recipes.tasks import make_tasks
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
    outside = None if into is None else read_json(into / OUTSIDE).get("bytes")
    how = {"staged": not options.unstaged, "prompt_tokens": prompt, "outside": outside}
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


def plan_of(recipe: Recipe, name: str, *, gpu: str | None, **how: Any) -> MemoryPlan:
    """Plan a recipe with its own model and longest prompt, and try the remedies.

    If the model is not on this machine, the plan takes `model.shape` and guesses the prompt length.

    Args:
        recipe: The recipe.
        name: Title of the plan.
        gpu: GPU to plan for, as `placed` takes it; None: the recipe's device.
        **how: Further fields of `PlanRequest`; `prompt_tokens` are in place of the task's.

    Raises:
        RecipeError: The recipe cannot be planned.
    """
    recipe, card = placed(checked(recipe), gpu)
    with contextlib.ExitStack() as stack:
        try:
            tasks = make_tasks(recipe.task, recipe.eval.sets)
            directory, tokenizer = stack.enter_context(
                described_model(recipe, tasks, weights=False)
            )
            if how.get("prompt_tokens") is None:
                tasks, _ = with_tools(recipe, tasks)
                tasks, _ = encoded_tasks(recipe, tasks, tokenizer, datetime.now())
                how["prompt_tokens"] = max(len(problem.prompt_ids) for problem in tasks.problems())
        except RecipeError:
            if recipe.model.path is None or recipe.model.shape is None:
                raise
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            describe_random_model(recipe.model.random_fields(), toy_tokenizer([]), directory)
        request = PlanRequest(name=name, gpu=card, directory=directory, **how)
        recipe = with_adapters(recipe, directory)
        return plan_with_remedies(recipe, first_decisions(recipe, directory), request)


_SMALL = 10 * GIB  # bytes of a device below which a table is in MiB
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
    size = format_bytes(plan.gpu.total) + (" of host memory" if plan.gpu.on_host else "")
    show(f"planned for: {plan.gpu.name}, {size}{many}{on}")
    room = "" if plan.host_room is None else f"; at most {format_bytes(int(plan.host_room))} fit"
    if not plan.gpu.on_host:
        show(f"host: {format_bytes(plan.host_bytes)} on each machine{room}")
    most = f"at most {plan.most_kv_tokens:,} fit at every stage"
    show(f"KV cache: {plan.kv_tokens:,} tokens an engine; {most}")
    for line in plan.decisions.lines:
        show(line)
    for note in plan.notes:
        show(f"note: {note}", style="dim")
    for line in plan.unfit:
        show(line, style="bold red")
    if plan.fits:
        peak = max(reversed(plan.rows), key=lambda stage: stage.device_bytes)
        left = format_bytes(plan.gpu.total - peak.device_bytes)
        show(f"fits: {peak.stage} takes the most and leaves {left}", style="bold green")


def _width_of(table: Table) -> int:
    return Console(width=1000).measure(table).maximum


def _table(plan: MemoryPlan, parts: dict[str, list[int]], bars: bool = False) -> Table:
    """Build a table with a row for each stage and a column for each part (bytes by stage).

    A small plan is shown in MiB. With bars, headings stay on one line.
    """
    small = max(stage.device_bytes for stage in plan.rows) < _SMALL
    unit, digits = (MIB, 0) if small else (GIB, 2)
    device, saved = ("RAM", "saved") if plan.gpu.on_host else ("GPU", "host")
    memory = "host memory" if plan.gpu.on_host else "the fullest GPU"
    title = f"{escape(plan.name)}: {'MiB' if small else 'GiB'} of {memory}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)

    def cell(nbytes: int) -> str:
        return f"{nbytes / unit:.{digits}f}" if nbytes else "-"

    table.add_column("stage", no_wrap=True)
    if bars:
        table.add_column("", no_wrap=True)
    for name in (device, *parts, saved):
        table.add_column(name if bars else name.replace("_", "\n"), justify="right", no_wrap=True)
    for place, stage in enumerate(plan.rows):
        over = stage.device_bytes > plan.room
        color = "red" if over else "cyan"
        bar = Bar(plan.gpu.total, 0, stage.device_bytes, width=12, color=color)
        table.add_row(
            stage.stage,
            *([bar] if bars else []),
            Text(cell(stage.device_bytes), style="bold red" if over else "bold"),
            *(cell(values[place]) for values in parts.values()),
            cell(stage.host),
        )
    return table


def draw_plan(plan: MemoryPlan, file: Path) -> None:
    """Draw a stacked bar for each stage (tags, torch, contexts) and a line at the GPU's size."""
    from matplotlib.figure import Figure

    from recipes.logs.pictures import looks, save_picture

    parts = _parts(plan)
    if plan.gpu.on_host:
        parts["saved"] = [stage.host for stage in plan.rows]
    figure = Figure(figsize=(11, 1.6 + 0.34 * len(plan.rows)))
    axes = figure.subplots()
    names = [stage.stage for stage in plan.rows]
    left = [0.0] * len(names)
    for part, sizes in parts.items():
        values = [nbytes / GIB for nbytes in sizes]
        axes.barh(names, values, 0.72, left, label=part, **looks(parts)[part])
        left = [low + value for low, value in zip(left, values, strict=True)]
    axes.axvline(plan.gpu.total / GIB, color="#222222", linestyle="--", linewidth=1.1)
    axes.set(xlabel="GiB", title=f"{plan.name} on {plan.gpu.name}, planned")
    axes.invert_yaxis()
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    save_picture(figure, file, bbox_inches="tight")


def _parts(plan: MemoryPlan) -> dict[str, list[int]]:
    """Return bytes of each stage: of every tag, of torch in all processes, and of contexts.

    On a CPU, processes have no contexts, and their own memory counts.
    """
    parts: dict[str, list[int]] = {}
    tags = chain.from_iterable(stage.tags.items() for stage in plan.rows)
    for tag in dict.fromkeys(tag for tag, nbytes in tags if nbytes):
        parts[tag] = [stage.tags.get(tag, 0) for stage in plan.rows]
    parts["torch"] = [sum(stage.torch.values()) for stage in plan.rows]
    own = "process" if plan.gpu.on_host else "contexts"
    return {**parts, own: [stage.contexts for stage in plan.rows]}


def _sums(plan: MemoryPlan) -> dict[str, list[int]]:
    """Return `_parts` with one sum for the trainer's tags and one for the engine's."""
    parts = _parts(plan)
    sums = {"trainer": [0] * len(plan.rows), "engine": [0] * len(plan.rows)}
    for name in [*parts][:-2]:
        side = "engine" if name in ENGINE_TAGS else "trainer"
        sums[side] = [sum(pair) for pair in zip(sums[side], parts.pop(name), strict=True)]
    return {**sums, **parts}
