"""Train -> rollout -> train at the Qwen2.5-0.5B shape, stage by stage, in real GRPO steps.

`make bench-switch`. The packaged recipe (fp32 masters and Adam, bf16 forward and rollout, 8 prompts
x 8 samples of 512 tokens, two Ray actors) runs twice: once with everything resident, which 80 GB
allow, and once with everything offloaded.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from benchmarks.common import make_scale, parser, report
from recipes.run import start_run

SYNC = ("sync_weights",)
BEFORE_SYNC = ("empty_cache", "offload_optim", "wake_weights")
AFTER_SYNC = ("offload_params", "wake_kv_cache")
TO_ROLLOUT = (*BEFORE_SYNC, *SYNC, *AFTER_SYNC)
TO_TRAIN = ("sleep", "reload_params", "reload_optim")
WORK = ("generate_sequences", "update_actor")
CASES = {
    "everything stays": "[params,optim,weights,kv_cache,cuda_graph]",
    "everything is offloaded": "[]",
}


def stage_ms(recipe: str, settings: list[str], folder: Path) -> dict[str, float]:
    """Return the median milliseconds of every stage and of the step, after the first two steps."""
    start_run(recipe, settings, folder)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["kind"] == "train"][2:]
    names = {name for row in rows for name in row["stages"]}
    out = {
        name: statistics.median(row["stages"].get(name, 0.0) for row in rows) * 1e3
        for name in names
    }
    return {**out, "step": statistics.median(row["step_seconds"] for row in rows) * 1e3}


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=8)
    args = options.parse_args(arguments)
    make_scale(args)
    with tempfile.TemporaryDirectory() as folder:
        _measure(args, Path(folder))


def _measure(args: argparse.Namespace, folder: Path) -> None:
    recipe, settings = "qwen2.5-0.5b", [f"steps={args.steps}", "exact=false", "driver=ray"]
    if args.tiny:
        recipe = "tiny"
        settings = ["steps=3", "loop.prompts_per_step=2", "loop.samples_per_prompt=4"]
        settings.append("eval.every=0")
    runs = {
        name: stage_ms(recipe, [f"cycle.resident={keep}", *settings], folder / str(i))
        for i, (name, keep) in enumerate(CASES.items())
    }
    rows: list[list[object]] = []
    for stage in (*TO_ROLLOUT, *TO_TRAIN, *WORK, "step"):
        rows.append([stage, *(run.get(stage, 0.0) for run in runs.values())])

    def total(label: str, stages: tuple[str, ...], share: bool = False) -> None:
        sums = [sum(run.get(stage, 0.0) for stage in stages) for run in runs.values()]
        steps = [run["step"] for run in runs.values()]
        cells = (
            [f"{100 * part / step:.1f} %" for part, step in zip(sums, steps, strict=True)]
            if share
            else sums
        )
        rows.append([label, *cells])

    total("to_rollout, without the sync", BEFORE_SYNC + AFTER_SYNC)
    total("the sync", SYNC)
    total("to_train", TO_TRAIN)
    total("whole switch, share of the step", TO_ROLLOUT + TO_TRAIN, share=True)
    report("bench_switch", ["stage, ms", *runs], rows, runs, args.out)


if __name__ == "__main__":
    main()
