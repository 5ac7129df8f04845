"""Clocks around the weight syncs of verl, and a reward function, for `bench_verl`.

verl imports the module in each of its processes (`VERL_USE_EXTERNAL_MODULES`).
"""

from __future__ import annotations

import importlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import watched
from memsaver.compat import verl_plugin  # noqa: F401  registers the rollouts if a variable says so

FILE = "BENCH_VERL_FILE"
CLASSES = {
    "vllm": ("verl.workers.rollout.vllm_rollout", "ServerAdapter"),
    "memsaver_vllm": ("trainer_bridge.verl.in_place_rollout", "InPlaceRollout"),
    "memsaver": ("trainer_bridge.verl.engine_rollout", "EngineRollout"),
}


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> float:
    """Return the share of characters that are the wanted one."""
    return solution_str.count(ground_truth) / max(1, len(solution_str))


def timed(rollout: Any) -> Any:
    """Return a subclass of a rollout that writes seconds and bytes of its syncs to a file."""

    class Timed(rollout):  # type: ignore[misc]
        async def update_weights(self, *args: Any, **kwargs: Any) -> None:
            device = torch.device("cuda", torch.cuda.current_device())
            torch.cuda.synchronize()
            with watched(device) as used:
                begun = time.perf_counter()
                await super().update_weights(*args, **kwargs)
                torch.cuda.synchronize()
                seconds = time.perf_counter() - begun
            row = {"seconds": seconds, "rise": max(used) - used[0]}
            if (receipt := getattr(self, "receipt", None)) is not None:
                row |= {"sync_seconds": receipt.seconds, "nbytes": receipt.nbytes}
            with Path(os.environ[FILE]).open("a") as file:
                file.write(json.dumps(row) + "\n")

    return Timed


def __getattr__(name: str) -> Any:
    """Return the timed class of a rollout, whose module must not be imported earlier."""
    if name not in CLASSES:
        raise AttributeError(name)
    module, kind = CLASSES[name]
    return timed(getattr(importlib.import_module(module), kind))


if FILE in os.environ:
    registry = importlib.import_module("verl.workers.rollout.base")
    for _name in CLASSES:
        vars(registry)["_ROLLOUT_REGISTRY"][_name, "async"] = f"benchmarks.verl_side.{_name}"
