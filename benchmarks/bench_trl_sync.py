"""TRL's weight sync against ours, in TRL's GRPO with vLLM in its process, on one GPU.

Each case trains a Qwen2.5 shape with random weights for a few steps in a process of its own, once
with TRL's own sync and allocator of vLLM, once with `trainer_bridge.adoption.trl.use`. The table
has seconds of a sync, the device memory that it needs at its peak beyond vLLM's weights, and
rewards. Needs trl, peft and vllm.

    python -m benchmarks.bench_trl_sync --out runs/trl_sync
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import MIB, make_scale, parser, report

SIDES = ("TRL", "memsaver")


class Case(NamedTuple):
    """A model that TRL trains; `rank` is that of its adapters, 0 trains all weights."""

    shape: str
    rank: int


CASES = {
    "7b-lora": Case("qwen2.5-7b", 32),
    "1.5b": Case("qwen2.5-1.5b", 0),
}
HEAD = ["case", "sync", "first, s", "later, s (median)", "peak beyond the weights, MiB", "rewards"]


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__, CASES)
    options.add_argument("--steps", type=int, default=6, help="at least 2")
    options.set_defaults(out=Path("runs/trl_sync"))
    args = options.parse_args(arguments)
    make_scale(args)  # refuses sizes that this machine cannot run
    args.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    for name in args.cases:
        for side in SIDES:
            results[f"{name}, {side}"] = measured(name, side, args.steps, args.tiny, args.out)
    rows = [[*key.split(", "), *row(result)] for key, result in results.items()]
    report("bench_trl_sync", HEAD, rows, results, args.out)


def measured(name: str, side: str, steps: int, tiny: bool, out: Path) -> dict[str, list[float]]:
    """Run one side of a case in a process; its output goes to NAME_SIDE.log."""
    saved, log = out / f"{name}_{side}.json", out / f"{name}_{side}.log"
    saved.unlink(missing_ok=True)
    print(f"{name}, {side} ...", flush=True)
    run_side([name, side, str(steps), str(saved), *(["tiny"] if tiny else [])], log)
    if not saved.exists():
        raise SystemExit(f"{name}, {side} failed; the end of {log}:\n{log.read_text()[-3000:]}")
    result: dict[str, list[float]] = json.loads(saved.read_text())
    return result


def run_side(words: Sequence[str], log: Path) -> None:
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **os.environ}
    command = [sys.executable, "-m", "benchmarks.trl_sync_side", *words]
    with log.open("w") as file:
        subprocess.run(command, stdout=file, stderr=file, env=variables)


def row(result: dict[str, list[float]]) -> list[object]:
    first, *later = result["seconds"]
    rewards = ", ".join(f"{reward:.4f}" for reward in result["rewards"])
    return [first, sorted(later)[len(later) // 2], max(result["beyond"]) / MIB, rewards]


if __name__ == "__main__":
    main()
