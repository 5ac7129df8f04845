"""Train -> rollout -> train at the Qwen2.5-0.5B shape, stage by stage, inside real GRPO steps.
`make bench-switch`.

The packaged recipe (fp32 masters and Adam, bf16 forward and rollout, 8 prompts x 8 samples of 512
tokens, two Ray actors) is run twice: once with everything staying on the device, which 80 GB allow,
once with everything offloaded. Then, in one process and without an engine, what scores wait for
parameters that come back as a whole, and unit by unit as the forward needs them; this alone:

    python -m benchmarks.bench_switch --cases back --shape qwen2.5-7b
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from functools import partial
from pathlib import Path

import torch

from benchmarks.common import Scale, Times, fields_of, make_scale, parser, report, write_config
from memsaver import MemorySaver
from recipes.run import start_run
from trainer_bridge import SequenceBatch, Trainer, TrainerConfig
from trainer_bridge.offload import Wait

SYNC = ("sync_weights",)
TO_ROLLOUT = (
    "empty_cache",
    "offload_optim",
    "wake_weights",
    *SYNC,
    "offload_params",
    "wake_kv_cache",
)
TO_TRAIN = ("sleep", "reload_params", "reload_optim")
WORK = ("generate_sequences", "compute_log_prob", "update_actor")
CASES = {
    "everything stays": "[params,optim,weights,kv_cache,cuda_graph]",
    "everything is offloaded": "[]",
}

STEPS, BACK = "steps", "back"
WAYS: dict[str, Wait] = {"come as a whole": True, "come unit by unit": "memory"}


def stage_ms(recipe: str, settings: list[str], folder: Path) -> dict[str, float]:
    """Milliseconds of every stage, the median over all steps but the first two, and of the whole
    step.
    """
    start_run(recipe, settings, folder)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["kind"] == "train"][2:]
    names = {name for row in rows for name in row["stages"]}
    out = {
        name: statistics.median(row["stages"].get(name, 0.0) for row in rows) * 1e3
        for name in names
    }
    return {**out, "step": statistics.median(row["step_seconds"] for row in rows) * 1e3}


def make_batch(scale: Scale, words: int) -> SequenceBatch:
    """Return sequences of one length with random tokens and advantages."""
    count, prompt, answer = scale.choose(64, 9), 64, scale.choose(512, 5)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(words, (count, prompt + answer), generator=draw).tolist()
    return SequenceBatch(
        prompt_ids=[row[:prompt] for row in ids],
        response_ids=[row[prompt:] for row in ids],
        old_logprobs=[[-math.log(words)] * answer] * count,
        advantages=torch.randn(count, generator=draw).tolist(),
        temperature=1.0,
    )


def exposed_ms(scale: Scale, shape: str, folder: Path) -> dict[str, float]:
    """Milliseconds of scoring with the parameters there, and of the way back before or beside it;
    what each way takes longer than the first is exposed.
    """
    folder.mkdir()
    fields = fields_of(scale, shape)
    config = TrainerConfig(
        model_path=str(write_config(folder, fields)),
        random_init=True,
        device=str(scale.device),
        dtype="bfloat16",
        micro_batch_size=16,
    )
    saver = MemorySaver(config.device)
    trainer = Trainer(config, saver)
    batch = make_batch(scale, fields["vocab_size"])
    trainer.offload("optim")
    scores, times = trainer.compute_log_prob(batch), Times(*scale.choose((5, 2), (1, 0)))

    def back(wait: Wait) -> None:
        trainer.reload("params", wait=wait)
        assert trainer.compute_log_prob(batch) == scores

    for _ in times.rounds:
        times("params there", partial(trainer.compute_log_prob, batch))
        for name, wait in WAYS.items():
            trainer.offload("params")
            times(name, partial(back, wait))
    trainer.close()
    saver.close()
    return times.medians


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__, [STEPS, BACK])
    options.add_argument("--steps", type=int, default=8)
    options.add_argument("--shape", default="qwen2.5-0.5b", help="whose params come back")
    args = options.parse_args(arguments)
    scale = make_scale(args)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if STEPS in args.cases:
            _steps(args, folder)
        if BACK in args.cases:
            back = exposed_ms(scale, args.shape, folder / "back")
            there = back["params there"]
            rows: list[list[object]] = [[name, ms, ms - there] for name, ms in back.items()]
            report(
                "bench_switch_back", ["compute_log_prob, ms", "", "exposed"], rows, back, args.out
            )


def _steps(args: argparse.Namespace, folder: Path) -> None:
    recipe, settings = "qwen2.5-0.5b", [f"steps={args.steps}"]
    if args.tiny:
        recipe = "tiny"
        settings = [
            "steps=3",
            "grpo.prompts_per_step=2",
            "grpo.samples_per_prompt=4",
            "eval.every=0",
        ]
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

    total("to_rollout, without the sync", tuple(stage for stage in TO_ROLLOUT if stage not in SYNC))
    total("the sync", SYNC)
    total("to_train", TO_TRAIN)
    total("whole switch, share of the step", TO_ROLLOUT + TO_TRAIN, share=True)
    report("bench_switch", ["stage, ms", *runs], rows, runs, args.out)


if __name__ == "__main__":
    main()
