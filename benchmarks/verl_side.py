"""Clocks around the weight syncs of verl, and a reward function, for `bench_verl`.

verl imports the module in each of its processes (`VERL_USE_EXTERNAL_MODULES`).
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import watched
from memsaver.compat import verl_plugin  # noqa: F401  registers the rollouts if a variable says so

FILE = "BENCH_VERL_FILE"
WATCHED = 2  # the first sync connects both sides
CLASSES = {
    "vllm": ("verl.workers.rollout.vllm_rollout", "ServerAdapter"),
    "memsaver_vllm": ("trainer_bridge.adoption.verl.in_place_rollout", "InPlaceRollout"),
    "memsaver": ("trainer_bridge.adoption.verl.engine_rollout", "EngineRollout"),
}


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> float:
    """Return the share of characters that are the wanted one."""
    return solution_str.count(ground_truth) / max(1, len(solution_str))


def timed(rollout: Any) -> Any:
    """Return a subclass of a rollout that writes seconds and bytes of its syncs to a file.

    Of several ranks, the first one writes. Bytes in use are sampled during the first `WATCHED`
    syncs only, because the sampling thread shares Python's lock and the driver with the sync.
    """

    class Timed(rollout):  # type: ignore[misc]
        _syncs = 0

        async def update_weights(self, *args: Any, **kwargs: Any) -> None:
            device = torch.device("cuda", torch.cuda.current_device())
            torch.cuda.synchronize()
            self._syncs += 1
            sampled = self._syncs <= WATCHED
            with watched(device) if sampled else contextlib.nullcontext([0]) as used:
                begun = time.perf_counter()
                await super().update_weights(*args, **kwargs)
                torch.cuda.synchronize()
                seconds = time.perf_counter() - begun
            row: dict[str, Any] = {"seconds": seconds}
            if sampled:
                row["rise"] = max(used) - used[0]
            if (receipt := getattr(self, "receipt", None)) is not None:
                row |= {"nbytes": receipt.nbytes, "stages": stages_of(self, seconds)}
            if dist.get_rank() == 0:
                with Path(os.environ[FILE]).open("a") as file:
                    file.write(json.dumps(row) + "\n")

    return Timed


def stages_of(rollout: Any, seconds: float) -> dict[str, float]:
    """Return the milliseconds of each stage of a sync, and of the rest of `seconds`."""
    stages = {**rollout.stages, "rest": seconds - sum(rollout.stages.values())}
    return {stage: spent * 1e3 for stage, spent in stages.items()}


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
