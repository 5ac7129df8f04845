"""The weight sync between two Ray actors on one GPU, against the bandwidth floor of the same run. `make bench-sync`.

bf16 -> bf16 at the whole Qwen2.5-7B shape, fp32 -> bf16 at half its layers: masters, gradients' room and moments of a
trainer in fp32 do not fit beside it otherwise. The device's used memory, all processes together, is sampled meanwhile.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.common import QWEN25, Sampler, conditions, copy_bandwidth, print_table, save, write_config
from trainer_bridge import TrainerConfig, open_ray
from trainer_bridge.actor import RemoteRollout, RemoteTrainer

CASES = {"7b": ("bfloat16", "7b", 28), "half-7b": ("float32", "7b", 14), "0.5b": ("float32", "0.5b", 24)}
ASLEEP = 0.5  # seconds, less than a training step; the driver still scrubs what a sleeping engine freed just before


def one_sync(trainer: RemoteTrainer, rollout: RemoteRollout, version: int) -> dict[str, float]:
    """Milliseconds of one sync. The commit raises unless the engine reads back what the trainer says it wrote."""
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
        "bytes": float(receipt.nbytes),
        "rise_mib": sampler.rise / 2**20,
        "samples": float(len(sampler.used)),
    }


def measure(dtype: str, size: str, layers: int, repeats: int, bandwidth: float, folder: Path) -> dict[str, Any]:
    shape = {**QWEN25[size], "num_hidden_layers": layers}
    path = write_config(folder / f"{size}-{layers}", size, num_hidden_layers=layers)
    config = TrainerConfig(model_path=str(path), random_init=True, dtype=dtype, param_dtype="bfloat16", device="cuda:0")
    with open_ray(config, {"dtype": "bfloat16", "kv_tokens": 1024, "cuda_graphs": False}) as (trainer, rollout):
        every = [one_sync(trainer, rollout, version) for version in range(1, repeats + 4)]
    rows = every[3:]
    middle = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    width = 4 if dtype == "float32" else 2
    params = middle["bytes"] / 2
    floor = params * (width + 2) / bandwidth * 1e3
    return {
        "case": f"Qwen2.5-{size} shape, {layers} of {QWEN25[size]['num_hidden_layers']} layers, {dtype} -> bfloat16",
        "shape": shape,
        "params": params,
        "floor": floor,
        "rise_mib_first": every[0]["rise_mib"],
        "rise_mib_max": max(row["rise_mib"] for row in rows),
        **middle,
        "rows": rows,
    }


def rest(result: dict[str, Any]) -> list[float]:
    return [
        result["write"] / result["floor"],
        *(result[key] for key in ("call", "commit", "rise_mib_max", "rise_mib_first")),
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    args = parser.parse_args()
    bandwidth = copy_bandwidth()
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as folder:
        results = []
        for name in args.cases:
            results.append(measure(*CASES[name], args.repeats, bandwidth, Path(folder)))
            print(f"{name}: {results[-1]['copy']:.2f} ms, floor {results[-1]['floor']:.2f} ms", flush=True)
    print(conditions())
    print(f"device-to-device copy of 4 GiB in the same run: {bandwidth / 1e12:.2f} TB/s, read and write counted")
    head = ["sync", "G params", "floor ms", "cast-copy + digest ms", "x floor", "whole write ms", "x floor"]
    head += ["actor call ms", "commit ms", "memory rise MiB", "first sync's"]
    print_table(
        head,
        [
            [r["case"], r["params"] / 1e9, r["floor"], r["copy"], r["copy"] / r["floor"], r["write"], *rest(r)]
            for r in results
        ],
    )
    save(args.out, "bench_sync", {"bandwidth": bandwidth, "results": results})


if __name__ == "__main__":
    main()
