"""The command `memsaver trace-mismatch`: which operation of an exact run has two results."""

import math
import re
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
from trainer_bridge.exact import Compared, MismatchTrace, trace_mismatch

_OF_ENGINE = ("page_size", "max_prefill_tokens")  # keys that decide how a sequence is cut
_IN_ENGINE = "the engine had other bits in the run; look at its batches, graphs, caches, weights"
_IN_TRAINER = "the trainer had other bits in the run; look at its micro batches, ranks, libraries"


def show_trace(run_dir: Path, device: str | None = None) -> int:
    """Trace and print the mismatch that a run recorded; return 1 if an operation differs, else 0.

    Args:
        run_dir: Folder of the run, or `TrainerConfig.mismatch_dir` of another loop.
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
        trace = trace_mismatch(folder, device=device, **options)
    except FileNotFoundError:
        rule = "holds no mismatch; an exact run records the first one"
        raise RecipeError(f"trace-mismatch {run_dir}: {rule}") from None
    except ValueError as error:
        raise RecipeError(f"trace-mismatch {run_dir}: {one_line(error)}") from error
    _show(trace, Console(highlight=False, soft_wrap=True))
    return int(trace.first is not None)


def _show(trace: MismatchTrace, console: Console) -> None:
    record, first = trace.record, trace.first
    place = record.places[0]
    console.print(
        f"sequence {record.sequence} of the step after {record.updates} updates: "
        f"{len(record.prompt_ids)} + {len(record.response_ids)} tokens, {record.dtype}, "
        f"seed {record.seed}, temperature {record.temperature}"
    )
    console.print(
        f"in the run: {len(record.places)} tokens differ, first token {place}: "
        f"{record.rollout[place]!r} in the rollout, {record.trainer[place]!r} in the trainer"
    )
    if first is None:
        console.print(
            "no operation differs: both sides compute the same bits of this sequence alone"
        )
    else:
        token, (engine, trainer) = next(iter(first.unequal.items()))
        phase = "prefill" if token < len(record.prompt_ids) else "decode"
        console.print(_table(trace.compared))
        console.print(
            f"first difference: {first.operation}, token {token} of the sequence ({phase} in the "
            f"engine)\nsum of its elements: {engine!r} in the engine, {trainer!r} in the trainer"
        )
    for now, then, where in (
        (trace.engine, record.rollout, _IN_ENGINE),
        (trace.trainer, record.trainer, _IN_TRAINER),
    ):
        if any(a != b and not math.isnan(a) for a, b in zip(now, then, strict=True)):
            console.print(where)


def _table(compared: Sequence[Compared]) -> Table:
    """Return a table of the layers with a difference."""
    table = Table("layer", "first difference", "unequal rows", box=None, pad_edge=False)
    for layer, unequal in groupby((done for done in compared if done.unequal), _layer):
        first = next(unequal)
        table.add_row(layer, first.operation, f"{len(first.unequal)} of {first.rows}")
    return table


def _layer(done: Compared) -> str:
    found = re.search(r"\blayers\.(\d+)", done.operation)
    return found[1] if found else "head"
