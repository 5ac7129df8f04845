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
from recipes.errors import RecipeError, counted, one_line
from recipes.logs.run_folder import RunFolder
from trainer_bridge.exact import Compared, MismatchTrace, trace_mismatch

_OF_ENGINE = ("page_size", "max_prefill_tokens")  # keys that decide how a sequence is cut
_EQUAL = "no operation differs: both sides compute the same bits of this sequence alone"
_CAUSES = (
    "the engine had other bits in the run; look at its batches, graphs, caches, weights",
    "the trainer had other bits in the run; look at its micro batches, ranks, libraries",
)


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
        options["sample_all_ids"] = settings.model.random_init
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
    place, (prompt, response) = record.places[0], (record.prompt_ids, record.response_ids)
    updates, tokens = counted(record.updates, "update"), counted(len(record.places), "token")
    console.print(
        f"sequence {record.sequence} of the step after {updates}: {len(prompt)} + "
        f"{len(response)} tokens, {record.dtype}, seed {record.seed}, temperature "
        f"{record.temperature}\nin the run: mismatch of {tokens}, first token "
        f"{place}: {record.rollout[place]!r} in the rollout, {record.trainer[place]!r} in the "
        "trainer"
    )
    if first is None:
        console.print(_EQUAL)
    else:
        token, (engine, trainer) = next(iter(first.unequal.items()))
        phase = "prefill" if token < len(prompt) else "decode"
        console.print(_table(trace.compared))
        console.print(
            f"first difference: {first.operation}, token {token} of the sequence ({phase} in the "
            f"engine)\nsum of its elements: {engine!r} in the engine, {trainer!r} in the trainer"
        )
    sides = (trace.engine, trace.trainer), (record.rollout, record.trainer), _CAUSES
    for now, then, causes in zip(*sides, strict=True):
        pairs = zip(now, then, record.mask, strict=True)
        if any(a != b and learned and not math.isnan(a) for a, b, learned in pairs):
            console.print(causes)


def _table(compared: Sequence[Compared]) -> Table:
    """Return a table of the layers with a difference."""
    table = Table("first difference of a layer", "unequal rows", box=None, pad_edge=False)
    unequal = (done for done in compared if done.unequal)
    for _, layer in groupby(unequal, lambda done: re.findall(r"\d+", done.operation)):
        first = next(layer)
        table.add_row(first.operation, f"{len(first.unequal)} of {first.rows}")
    return table
