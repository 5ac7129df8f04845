"""A plan as a table in the terminal, and as a picture."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from memsaver.errors import format_bytes
from recipes.planner.gpus import GIB
from recipes.planner.plan import Plan, StagePlan

_BAR = 24  # characters for the whole GPU


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """One row a stage, then what holds of the whole."""
    console = console or Console()
    console.print(_table(plan))
    many = "" if plan.devices == 1 else f", each of {plan.devices} alike"
    console.print(f"GPU: {plan.gpu.name}, {format_bytes(plan.gpu.total)}{many}", highlight=False)
    console.print(f"host: {format_bytes(plan.host_bytes)} on each machine", highlight=False)
    console.print(
        f"KV cache: {plan.kv_tokens:,} tokens an engine; at most {plan.most_kv_tokens:,} fit at every stage",
        highlight=False,
    )
    for note in plan.notes:
        console.print(f"note: {note}", style="dim", highlight=False)
    for need in plan.needs:
        console.print(Text(f"does not fit: {need}", style="bold red"))
    if plan.fits:
        peak = plan.peak
        left = format_bytes(plan.gpu.total - peak.device_bytes)
        console.print(Text(f"fits: {peak.stage} takes the most and leaves {left}", style="bold green"))


def _table(plan: Plan) -> Table:
    table = Table(title=f"{plan.name}: GiB of the fullest GPU", title_justify="left", box=None, pad_edge=False)
    table.add_column("stage")
    table.add_column("")
    for name in ("GPU", *_owners(plan), "contexts", "host"):
        table.add_column(name, justify="right")
    table.add_column("tags")
    for stage in plan.stages:
        over = stage.device_bytes > plan.room
        table.add_row(
            stage.stage,
            _bar(stage, plan),
            Text(_gib(stage.device_bytes), style="bold red" if over else "bold"),
            *(_gib(stage.processes.get(owner, 0)) for owner in _owners(plan)),
            _gib(stage.contexts),
            _gib(stage.host),
            ", ".join(f"{tag} {_gib(nbytes)}" for tag, nbytes in stage.tags.items() if nbytes),
        )
    return table


def _owners(plan: Plan) -> list[str]:
    return list(dict.fromkeys(owner for stage in plan.stages for owner in stage.processes))


def _bar(stage: StagePlan, plan: Plan) -> Text:
    filled = min(_BAR, round(_BAR * stage.device_bytes / plan.gpu.total))
    colour = "red" if stage.device_bytes > plan.room else "cyan"
    return Text("█" * filled, style=colour) + Text("·" * (_BAR - filled), style="dim")


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f}"


def draw_plan(plan: Plan, file: Path) -> None:
    """One bar a stage: tags, torch's own and contexts stacked; the line is the GPU's end."""
    from recipes.plots import OTHER_COLOURS, TAG_COLOURS, pyplot, save, tidy

    parts = _parts(plan)
    figure, axes = pyplot.subplots(figsize=(11, 1.6 + 0.34 * len(plan.stages)))
    names = [stage.stage for stage in plan.stages]
    left = [0.0] * len(names)
    spare = iter(OTHER_COLOURS * (1 + len(parts)))
    for part, values in parts.items():
        axes.barh(names, values, left=left, height=0.72, label=part, color=TAG_COLOURS.get(part) or next(spare))
        left = [low + value for low, value in zip(left, values, strict=True)]
    axes.axvline(plan.gpu.total / GIB, color="#222222", linestyle="--", linewidth=1.1)
    axes.set(xlabel="GiB", title=f"{plan.name} on {plan.gpu.name}, planned")
    axes.invert_yaxis()
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9, frameon=False)
    tidy(axes)
    save(figure, file)


def _parts(plan: Plan) -> dict[str, list[float]]:
    tags = dict.fromkeys(tag for stage in plan.stages for tag, nbytes in stage.tags.items() if nbytes)
    parts = {tag: [stage.tags.get(tag, 0) / GIB for stage in plan.stages] for tag in tags}
    for owner in _owners(plan):
        parts[f"{owner}: torch"] = [stage.torch.get(owner, 0) / GIB for stage in plan.stages]
    parts["contexts"] = [stage.contexts / GIB for stage in plan.stages]
    return parts
