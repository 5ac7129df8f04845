"""The command `memsaver trace-mismatch`: which operation of an exact run has two results."""

import math
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from recipes.config.load import load
from recipes.errors import RecipeError, one_line
from recipes.logs.run_folder import RunFolder
from trainer_bridge.exact import Compared, Difference, MismatchTrace, OperationPlace, trace_mismatch

_OF_ENGINE = ("page_size", "max_prefill_tokens")  # keys that decide how a sequence is cut


def show_trace(run_dir: Path, sequence: int | None = None, device: str | None = None) -> int:
    """Trace and print the mismatch that a run recorded; return 1 if an operation differs, else 0.

    Args:
        run_dir: Folder of the run, or `TrainerConfig.mismatch_dir` of another loop.
        sequence: Number of the sequence in its step; None for the first on record.
        device: Device of both sides; None for the type of device of the run.

    Raises:
        RecipeError: The run recorded no mismatch, or the trace cannot run here.
    """
    folder = RunFolder(run_dir).mismatch_dir
    folder = folder if folder.is_dir() else run_dir
    options: dict[str, Any] = {}
    if (folder.parent / "recipe.yaml").is_file():
        settings = load(folder.parent / "recipe.yaml")
        options = {name: getattr(settings.engine, name) for name in _OF_ENGINE}
        torch.set_num_threads(settings.trainer.threads or torch.get_num_threads())
    try:
        trace = trace_mismatch(folder, sequence, device=device, **options)
    except FileNotFoundError:
        rule = "holds no mismatch; an exact run records the first one"
        raise RecipeError(f"trace-mismatch {run_dir}: {rule}") from None
    except ValueError as error:
        raise RecipeError(f"trace-mismatch {run_dir}: {one_line(error)}") from error
    _show(trace, Console(highlight=False, soft_wrap=True))
    return int(trace.first is not None)


def _show(trace: MismatchTrace, console: Console) -> None:
    record, sequence = trace.record, trace.sequence
    place = sequence.places[0]
    console.print(
        f"sequence {sequence.number} of the step after {record.updates} updates: "
        f"{len(sequence.prompt_ids)} + {len(sequence.response_ids)} tokens, {record.dtype}, "
        f"seed {record.seed}, temperature {record.temperature}"
    )
    console.print(
        f"in the run: {len(sequence.places)} tokens differ, first token {place}: "
        f"{sequence.rollout[place]!r} in the rollout, {sequence.trainer[place]!r} in the trainer"
    )
    sides = {
        "engine": (trace.engine, sequence.rollout),
        "trainer": (trace.trainer, sequence.trainer),
    }
    other = []
    for side, pair in sides.items():
        if any(now != then and not math.isnan(now) for now, then in zip(*pair, strict=True)):
            other.append(side)
    console.print(_table(trace.compared))
    console.print("\n".join(_where(trace, trace.first) if trace.first else _nowhere(other)))
    if trace.first and other:
        console.print(f"in the run, the log-probabilities of {' and '.join(other)} were others")


def _table(compared: Sequence[Compared]) -> Table:
    """Return a table of the layers; neighbors without a difference share a row."""
    table = Table(box=None, pad_edge=False)
    for column in ("layer", "first difference", "unequal rows", "unequal at the layer's end"):
        table.add_column(column, overflow="fold")
    last = compared[-1].place.layer
    layers = [list(layer) for _, layer in groupby(compared, lambda done: done.place.layer)]
    for differs, run in groupby(layers, lambda layer: any(done.unequal for done in layer)):
        group = list(run)
        for part in [[layer] for layer in group] if differs else [group]:
            first, end = (_layer(part[index][0].place, last) for index in (0, -1))
            name = first if first == end else f"{first} to {end}"
            table.add_row(name, *(_cells(part[0]) if differs else ("none", "0", "0")))
    return table


def _layer(place: OperationPlace, last: int) -> str:
    return {-1: "embedding", last: "head"}.get(place.layer, str(place.layer))


def _cells(layer: Sequence[Compared]) -> list[str]:
    first = next(done for done in layer if done.unequal)
    counts = [f"{len(done.unequal)} of {done.rows}" for done in (first, layer[-1])]
    return [first.place.operation, *counts]


def _where(trace: MismatchTrace, first: Difference) -> list[str]:
    """Describe the first difference."""
    layer = _layer(first.place, trace.compared[-1].place.layer)
    layer = f"layer {layer}" if layer.isdigit() else layer
    phase = "prefill" if first.position < len(trace.sequence.prompt_ids) else "decode"
    return [
        f"first difference: {layer}, {first.place.operation}, token {first.position} of the "
        f"sequence ({phase} in the engine)",
        f"element {first.element}: {first.engine!r} in the engine, {first.trainer!r} in the "
        f"trainer, {first.ulps} ulp apart; {first.elements} of {first.width} elements differ",
    ]


def _nowhere(other: Sequence[str]) -> list[str]:
    """Describe a trace without a difference; the sides in `other` had other bits in the run."""
    lines = ["no operation differs: both sides compute the same bits of this sequence alone"]
    causes = {
        "engine": "its batches, CUDA graphs, cached prefixes, synced weights",
        "trainer": "its micro batches, ranks, libraries",
    }
    lines += [f"the {side} had other bits in the run; look at {causes[side]}" for side in other]
    return lines
