"""Large models: plans of examples/plans through their first steps, with random weights.

Each case runs the command `memsaver run` and reads the run's folder. "one-stage" is a run whose
engine wakes up whole before the weight sync (`one_stage`). "killed" kills a trainer rank in the
second step. Plans for eight GPUs are cut to the GPUs here by the settings that `CASES` shows.

    python -m benchmarks.bench_large --out runs/large --cases 32b-lora
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.common import GIB, Figure, Figures, Skipped, figures, median_ms, parser, run_cases
from recipes.logs.metric_rows import switch_seconds
from recipes.logs.report_page import DEVICE, measured_peaks

PLANS = Path("examples/plans")
STEPS = ("steps=3", "exact=false", "loop.prompts_per_step=16", "loop.samples_per_prompt=8")
TASK = ("task.name=benchmarks.coin_task:coin",)
LORA = ("lora.rank=32", "trainer.learning_rate=1e-5", "trainer.micro_batch_size=2")
HALVED = ("cluster.n_gpus_per_node=4", "trainer.optimizer=adamw_8bit", "trainer.dtype=bfloat16")
HALVED += ("trainer.micro_batch_size=1",)


@dataclass(frozen=True)
class Large:
    """A plan, the settings that fit it to `gpus` GPUs, and how it is run."""

    plan: str
    gpus: int
    settings: Sequence[str]
    how: str = "recipes.cli"  # module that is run


_32B_LORA = Large("qwen2.5-32b-8xh100", 2, (*LORA, "cluster.n_gpus_per_node=2"))
_32B = Large("qwen2.5-32b-8xh100", 4, HALVED)
_30B = Large("qwen3-30b-a3b-8xh100", 4, (*HALVED, "sampling.max_tokens=512"))
APART = ("cluster.n_gpus_per_node=1", "cluster.rollout_gpus=1", "cluster.colocate=false")
APART += ("trainer.micro_batch_size=4",)
CASES = {
    "7b-apart": Large("qwen2.5-7b-8xh100", 2, (*HALVED, *APART, "sampling.max_tokens=512")),
    "32b-lora": _32B_LORA,
    "32b-lora-one-stage": replace(_32B_LORA, how="benchmarks.one_stage"),
    "32b": _32B,
    "32b-one-stage": replace(_32B, how="benchmarks.one_stage"),
    "30b-a3b": _30B,
    "30b-a3b-killed": _30B,
    "70b-lora": Large(
        "llama-3.1-70b-lora-8xh100",
        4,
        (
            "cluster.n_gpus_per_node=4",
            "engine.tensor_parallel_size=4",
            "sampling.max_tokens=512",
            "trainer.micro_batch_size=2",
        ),
    ),
}


def main() -> None:
    args = parser(__doc__, [*CASES, "link"]).parse_args()
    out = args.out or Path("runs/large")
    out.mkdir(parents=True, exist_ok=True)
    todo = {name: partial(run, name, out) for name in args.cases if name != "link"}
    if "link" in args.cases:
        # In a process of its own: contexts of this one would count in later cases.
        todo["link"] = partial(multiprocessing.get_context("spawn").Pool(1).apply, link)
    run_cases("large", todo, args.out)


def run(name: str, out: Path) -> Figures:
    """Run a case; its folder is `out`/NAME, and its log `out`/NAME.log."""
    case = CASES[name]
    if torch.cuda.device_count() < case.gpus:
        raise Skipped(f"it takes {case.gpus} GPUs")
    plan = str(PLANS / f"{case.plan}.yaml")
    words = [sys.executable, "-m", case.how, *(["run"] if case.how == "recipes.cli" else [])]
    words += [plan, *STEPS, *TASK, *case.settings, "--run-dir", str(out / name)]
    log = out / f"{name}.log"
    with log.open("w") as output:
        process = subprocess.Popen(words, stdout=output, stderr=output)
        killed = kill_trainer(process, log) if name.endswith("killed") else None
        process.wait()
    print(log.read_text(), flush=True)
    if killed is not None:
        return [Figure(what="ended after", value=time.time() - killed, unit="s"), *left()]
    if case.how != "recipes.cli" or process.returncode:
        return [Figure(what="exit status", value=process.returncode, unit="")]
    return of_run(out / name)


def kill_trainer(process: subprocess.Popen[bytes], log: Path) -> float:
    """Kill the last trainer rank some seconds after the first step; return when."""
    while "step 1/" not in log.read_text() and process.poll() is None:
        time.sleep(1.0)
    time.sleep(5.0)
    workers = psutil.Process(process.pid).children(recursive=True)
    ranks = [worker for worker in workers if "ray::TrainerActor" in " ".join(worker.cmdline())]
    ranks[-1].kill()
    return time.time()


def left() -> Figures:
    """Return the bytes that are still in use on the fullest GPU."""
    words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    used = map(int, subprocess.check_output(words, text=True).split())
    return [Figure(what="left on the fullest GPU", value=max(used), unit="MiB")]


def of_run(folder: Path) -> Figures:
    """Return the figures of a finished run: medians of the steps after the first."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["kind"] == "train"]
    plan = json.loads((folder / "plan.json").read_text())
    later = rows[1:] or rows
    gpus, sync = plan["devices"], [row["sync"] for row in later]
    seconds = {
        "step": statistics.median(row["step_seconds"] for row in later),
        "switch": statistics.median(switch_seconds(row) for row in later),
        "sync": statistics.median(each["seconds"] for each in sync),
        "copies of the sync": statistics.median(each["copy_seconds"] for each in sync),
    }
    sizes = {
        "written a GPU": sync[-1]["nbytes"] / gpus / GIB,
        "over the link a GPU": sync[-1]["link_bytes"] / gpus / GIB,
        **peaks(rows, plan),
    }
    rates = {"generation": statistics.median(row["tokens_per_second"] for row in later)}
    return [*figures(seconds, "s"), *figures(sizes, "GiB"), *figures(rates, "tokens/s")]


def peaks(rows: Sequence[Mapping[str, Any]], plan: Mapping[str, Any]) -> dict[str, float]:
    """Return the largest peak planned and measured, and the largest differences of a stage."""
    measured = {stage: sizes[DEVICE] for stage, sizes in measured_peaks(rows).items()}
    planned = {entry["stage"]: entry["used_bytes"] for entry in plan["stages"]}
    both = planned.keys() & measured.keys()
    off = [planned[stage] - measured[stage] for stage in both]
    sizes = {"planned": max(planned.values()), "measured": max(measured[stage] for stage in both)}
    sizes |= {"most above the measured": max(off), "most below the measured": -min(off)}
    return {name: nbytes / GIB for name, nbytes in sizes.items()}


def link() -> Figures:
    """Measure the link: one GPU writes to another."""
    if torch.cuda.device_count() < 2:
        raise Skipped("it takes two GPUs")
    source = torch.ones(GIB, dtype=torch.uint8, device="cuda:0")
    target = torch.zeros_like(source, device="cuda:1")

    def write() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(0)

    rate = GIB / median_ms(write) / 1e6
    assert bool(target.all())
    return [Figure(what="link", value=rate, unit="GB/s")]


if __name__ == "__main__":
    main()
