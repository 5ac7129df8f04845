"""A plan as a table in the terminal, and as a picture."""

from __future__ import annotations

import sys
from itertools import chain
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from memsaver.errors import format_bytes
from recipes.planner.gpus import GIB
from recipes.planner.plan import Plan, StagePlan

_BAR = 12  # characters for the whole GPU
_WIDTH = 132  # of a table that goes to no terminal


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """One row a stage, then what holds of the whole."""
    console = console or Console(width=None if sys.stdout.isatty() else _WIDTH)
    console.print(_table(plan))
    many = "" if plan.devices == 1 else f", each of {plan.devices} alike"
    console.print(f"GPU: {plan.gpu.name}, {format_bytes(plan.gpu.total)}{many}", highlight=False)
    room = "" if plan.host_room is None else f", of {format_bytes(int(plan.host_room))} it may be"
    console.print(f"host: {format_bytes(plan.host_bytes)} on each machine{room}", highlight=False)
    most = f"at most {plan.most_kv_tokens:,} fit at every stage"
    console.print(f"KV cache: {plan.kv_tokens:,} tokens an engine; {most}", highlight=False)
    for line in plan.switch.lines if plan.switch else ():
        console.print(line, highlight=False)
    for note in plan.notes:
        console.print(f"note: {note}", style="dim", highlight=False)
    for need in plan.needs:
        console.print(Text(f"does not fit: {need}", style="bold red"))
    if plan.fits:
        peak = plan.peak
        left = format_bytes(plan.gpu.total - peak.device_bytes)
        console.print(
            Text(f"fits: {peak.stage} takes the most and leaves {left}", style="bold green")
        )


def _table(plan: Plan) -> Table:
    """A column a tag; torch's own of all processes together."""
    table = Table(
        title=f"{plan.name}: GiB of the fullest GPU", title_justify="left", box=None, pad_edge=False
    )
    parts = _parts(plan)
    table.add_column("stage", no_wrap=True)
    table.add_column("", no_wrap=True)
    for name in ("GPU", *parts, "host"):
        table.add_column(name, justify="right", no_wrap=True)
    for place, stage in enumerate(plan.stages):
        over = stage.device_bytes > plan.room
        table.add_row(
            stage.stage,
            _bar(stage, plan),
            Text(f"{stage.device_bytes / GIB:.2f}", style="bold red" if over else "bold"),
            *(f"{values[place]:.2f}" if values[place] else "-" for values in parts.values()),
            f"{stage.host / GIB:.2f}" if stage.host else "-",
        )
    return table


def _bar(stage: StagePlan, plan: Plan) -> Text:
    filled = min(_BAR, round(_BAR * stage.device_bytes / plan.gpu.total))
    colour = "red" if stage.device_bytes > plan.room else "cyan"
    return Text("█" * filled, style=colour) + Text("·" * (_BAR - filled), style="dim")


def draw_plan(plan: Plan, file: Path) -> None:
    """One bar a stage: tags, torch's own and contexts stacked; the line is the GPU's end."""
    from recipes.watch.plots import colours_of, pyplot, save_picture, tidy

    parts = _parts(plan)
    figure, axes = pyplot.subplots(figsize=(11, 1.6 + 0.34 * len(plan.stages)))
    names = [stage.stage for stage in plan.stages]
    left = [0.0] * len(names)
    for (part, values), colour in zip(parts.items(), colours_of(parts), strict=True):
        axes.barh(names, values, 0.72, left, label=part, color=colour)
        left = [low + value for low, value in zip(left, values, strict=True)]
    axes.axvline(plan.gpu.total / GIB, color="#222222", linestyle="--", linewidth=1.1)
    axes.set(xlabel="GiB", title=f"{plan.name} on {plan.gpu.name}, planned")
    axes.invert_yaxis()
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9, frameon=False)
    tidy(axes)
    axes.grid(False)
    save_picture(figure, file, bbox_inches="tight")


def _parts(plan: Plan) -> dict[str, list[float]]:
    """GiB of each stage: every tag, what torch holds besides, and contexts."""
    parts: dict[str, list[float]] = {}
    tags = chain.from_iterable(stage.tags.items() for stage in plan.stages)
    for tag in dict.fromkeys(tag for tag, nbytes in tags if nbytes):
        parts[tag] = [stage.tags.get(tag, 0) / GIB for stage in plan.stages]
    parts["torch"] = [sum(stage.torch.values()) / GIB for stage in plan.stages]
    parts["contexts"] = [stage.contexts / GIB for stage in plan.stages]
    return parts
