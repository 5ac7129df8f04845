"""memsaver's sync between two Ray actors on one GPU: the trainer writes into the engine's pages.

Its imports stay inside: the other cases' processes import the script that imports this.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.benchmarks.common import Sampler, write_config
from tests.benchmarks.sync.base import Figure, Scale, Skipped, Source, medians

if TYPE_CHECKING:
    from trainer_bridge.actor import RemoteRollout, RemoteTrainer

ASLEEP = 0.5  # seconds, less than a training step; the driver still scrubs what a sleeping engine freed just before
WARMUP = 3


def one_gpu(scale: Scale) -> list[Figure]:
    if not scale.on_gpu or scale.tiny:
        raise Skipped("it has no tiny form, and needs a GPU")
    return [figure for source in scale.sources for figure in _measure(scale, source)]


def _measure(scale: Scale, source: Source) -> list[Figure]:
    """The write alone, and the same with mapping and unmapping the pages. The commit checks: it raises unless the
    engine reads back what the trainer says it wrote."""
    from trainer_bridge import TrainerConfig, open_ray

    with tempfile.TemporaryDirectory() as folder:
        path = write_config(Path(folder) / "model", "7b", num_hidden_layers=source.layers)
        config = TrainerConfig(
            model_path=str(path), random_init=True, dtype=source.dtype, param_dtype="bfloat16", device="cuda:0"
        )
        with open_ray(config, {"dtype": "bfloat16", "kv_tokens": 1024, "cuda_graphs": False}) as (trainer, rollout):
            every = [_one_sync(trainer, rollout, version) for version in range(1, scale.repeats + WARMUP + 1)]
    rows = every[WARMUP:]
    middle = medians(rows)
    assert middle["nbytes"] == source.params * 2
    rise = int(max(row["rise"] for row in rows))
    first = {"first sync's rise, MiB": every[0]["rise"] / 2**20}
    parts = {key: middle[key] for key in ("call", "commit")}
    return [
        Figure(what=f"{source}: memsaver, cast, copy and digest", ms=middle["copy"], copied=source.copied),
        Figure(
            what=f"{source}: memsaver, with mapping and unmapping",
            ms=middle["write"],
            copied=source.copied,
            rise=rise,
            parts={**parts, **first},
        ),
    ]


def _one_sync(trainer: RemoteTrainer, rollout: RemoteRollout, version: int) -> dict[str, float]:
    time.sleep(ASLEEP)
    rollout.wake_up(["weights"])
    offer = rollout.begin_update(version)
    with Sampler() as sampler:
        started = time.perf_counter()
        receipt = trainer.sync_weights(offer)
        call = time.perf_counter() - started
    committed = rollout.commit_update(receipt)
    rollout.sleep(level=2)
    return {
        "copy": receipt.copy_seconds * 1e3,
        "write": receipt.seconds * 1e3,
        "call": call * 1e3,
        "commit": committed.seconds * 1e3,
        "nbytes": float(receipt.nbytes),
        "rise": float(sampler.rise),
    }
