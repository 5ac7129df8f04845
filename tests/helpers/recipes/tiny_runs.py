"""Small runs of the tiny recipes, and readers of their folders."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from recipes.logs.monitor import Monitor
from recipes.run import start_run

PNG = b"\x89PNG\r\n\x1a\n"
ONE_LAYER = "model.config.num_hidden_layers=1"
SMALL = ("loop.prompts_per_step=8", "loop.samples_per_prompt=4", "eval.every=2", ONE_LAYER)
SMALL_PPO = ("loop.prompts_per_step=8", "loop.samples_per_prompt=4", "eval.every=2", ONE_LAYER)
CLOCK_FIGURES = (  # these differ between runs of one recipe, as their times do
    "step_seconds",
    "tokens_per_second",
    "update_tflops",
    "stages",
    "sync",
    "memory",
    "peaks",
    "hidden_seconds",
    "device_waited_seconds",
    "environment_seconds",
    "recomputed_tokens",
)

EXACT_SMOLLM2 = (  # random weights
    *("model.shape=smollm2-135m", "driver=inprocess", "exact=true", "task.workers=0"),
    "task.rewards=[tests.helpers.recipes.reward_functions:by_place]",
    *("loop.prompts_per_step=32", "loop.samples_per_prompt=8", "sampling.max_tokens=128"),
    *("trainer.micro_batch_size=64", "trainer.learning_rate=0.0001"),
    *("checkpoint.every=25", "checkpoint.export_every=0", "eval.every=0", "steps=50"),
)

Row = dict[str, Any]
MakeRun = Callable[..., Path]
"""(recipe, *overrides) -> the run's folder; equal calls share it, so tests must not change it."""


def rows(folder: Path, kind: str | None = None, until: int | None = None) -> list[Row]:
    """Return the rows of metrics.jsonl, only of one kind or up to a step if these are given."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [
        row
        for row in lines
        if kind in (None, row["kind"]) and (until is None or row["step"] <= until)
    ]


def without_clock(measured: Iterable[Row]) -> list[Row]:
    """Return the rows with only the figures that every run of a recipe repeats."""
    return [
        {key: value for key, value in row.items() if key not in CLOCK_FIGURES} for row in measured
    ]


def same_rows(first: Path, second: Path, until: int | None = None) -> bool:
    return without_clock(rows(first, until=until)) == without_clock(rows(second, until=until))


def exported(folder: Path) -> dict[str, Tensor]:
    """Return the weights that a run exported after its last step."""
    last = rows(folder, "train")[-1]["step"]
    (file,) = (folder / "exports" / f"step_{last}").glob("*.safetensors")
    return load_file(file)


def trace(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "trace.json").read_text())["traceEvents"]


def has_pictures(folder: Path) -> bool:
    pictures = [(folder / name).read_bytes() for name in ("reward.png", "memory.png")]
    return all(data.startswith(PNG) and len(data) > 20_000 for data in pictures)


@contextmanager
def without_pictures() -> Iterator[None]:
    """Skip pictures, which take three times as long as a small run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Monitor, "write_pictures", lambda monitor: None)
        yield


def run_maker(factory: pytest.TempPathFactory) -> MakeRun:
    folders: dict[tuple[str, ...], Path] = {}

    def make(*words: str) -> Path:
        if words not in folders:
            folders[words] = factory.mktemp("runs") / "run"
            with without_pictures():
                start_run(words[0], words[1:], folders[words])
        return folders[words]

    return make
