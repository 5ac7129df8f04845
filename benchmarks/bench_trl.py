"""GRPO beside TRL: learning curve, seconds of a step and memory, on one GPU.

Each side trains SmolLM2-135M on sums of two digits for every seed, alone on the GPU, in a process
of its own: recipe smollm2-135m-2digits with one micro batch, and TRL with vLLM in its process
(`trl_side`). Needs trl and vllm.

    python -m benchmarks.bench_trl --model DIR --out runs/trl
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from recipes.logs.pictures import STYLE, save_picture

RECIPE = "smollm2-135m-2digits"
SIDES = ("memsaver", "trl")
SMOOTH = 5  # steps of the mean that a curve shows


def main() -> None:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    for seed in args.seeds:
        for side in SIDES:
            if not (args.out / f"{side}_{seed}.json").exists():
                run(side, seed, args)
    draw(args.out, args.seeds)
    for side in SIDES:
        parts = [json.loads((args.out / f"{side}_{n}.json").read_text()) for n in args.seeds]
        seconds = statistics.median(second for part in parts for second in part["seconds"][2:])
        last = ", ".join(f"{statistics.fmean(part['rewards'][-10:]):.3f}" for part in parts)
        most = max(part["mib"] for part in parts)
        print(f"{side:9} {seconds:.3f} s a step, reward of the last 10 steps {last}, {most} MiB")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--out", type=Path, default=Path("runs/trl"))
    return parser.parse_args()


def run(side: str, seed: int, args: argparse.Namespace) -> None:
    """Run one side, and write its seconds, rewards and largest memory to SIDE_SEED.json."""
    own, folder = args.out / f"{side}_{seed}.json", args.out / f"run_{seed}"
    with largest_memory() as memory, (args.out / f"{side}_{seed}.log").open("w") as log:
        if side == "trl":
            words = ["benchmarks.trl_side", args.model, str(seed), str(args.steps), str(args.out)]
        else:
            words = ["recipes.cli", "run", RECIPE, f"model.path={args.model}", f"seed={seed}"]
            words += [f"steps={args.steps}", "trainer.micro_batch_size=1024", "driver=inprocess"]
            words += ["eval.every=0", "checkpoint.every=0", "checkpoint.export_every=null"]
            words += ["exact=false", "--run-dir", str(folder)]
        subprocess.run([sys.executable, "-m", *words], check=True, stdout=log, stderr=log)
    if side == "trl":
        figures = json.loads(own.read_text())
    else:
        rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        trained = [row for row in rows if row["kind"] == "train"]
        figures = {
            "seconds": [row["step_seconds"] for row in trained],
            "rewards": [row["reward"] for row in trained],
        }
    own.write_text(json.dumps(figures | {"mib": max(memory)}))


@contextmanager
def largest_memory() -> Iterator[list[int]]:
    """Collect the MiB in use on the GPU, about three times a second."""
    used, over = [0], threading.Event()
    card = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    query = ["nvidia-smi", "-i", card, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]

    def sample() -> None:
        while not over.wait(0.3):
            used.append(int(subprocess.run(query, capture_output=True, text=True).stdout))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield used
    finally:
        over.set()
        thread.join()


def draw(out: Path, seeds: Sequence[int]) -> None:
    """Draw the reward of both sides by step, one line for each seed."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5, 2.8), layout="constrained")
        axes = figure.subplots()
        for side, color in zip(SIDES, ("C0", "C1"), strict=True):
            for seed in seeds:
                rewards = json.loads((out / f"{side}_{seed}.json").read_text())["rewards"]
                label = {"memsaver": "memsaver", "trl": "TRL"}[side] if seed == seeds[0] else None
                axes.plot(*smoothed(rewards), color=color, label=label, linewidth=1.2)
        axes.set_xlabel("step")
        axes.set_ylabel(f"reward, mean of {SMOOTH} steps")
        axes.set_ylim(0, 1)
        axes.legend(frameon=False)
        save_picture(figure, out / "trl-curves.png")


def smoothed(rewards: Sequence[float]) -> tuple[list[int], list[float]]:
    """Return steps, and the mean reward of the last steps before each."""
    steps = list(range(SMOOTH, len(rewards) + 1))
    return steps, [statistics.fmean(rewards[step - SMOOTH : step]) for step in steps]


if __name__ == "__main__":
    main()
