"""The weight sync against floors of the same run and against what people use. `make bench-sync`.

On one GPU, trainer and engine share it: bf16 -> bf16 at the whole Qwen2.5-7B shape, fp32 -> bf16 at
half its layers, as a trainer's masters, gradients and moments in fp32 do not fit beside it
otherwise. On two, FSDP2 over both: all layers. Every case checks what arrived. "one" and "two"
stand for all cases of so many GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from tests.benchmarks.common import Figures, make_scale, parser, run_cases
from tests.benchmarks.sync import (
    floors,
    ours,
    rival_checkpoint_engine,
    rivals_ipc,
    rivals_one,
    rivals_two,
)
from tests.benchmarks.sync.base import SyncScale, sync_scale

Case = Callable[[SyncScale], Figures]
ONE: dict[str, Case] = {
    "memsaver": ours.one_gpu,
    "copies": rivals_one.copies,
    "IPC tensors": rivals_ipc.per_tensor,
    "IPC buckets": rivals_ipc.buckets,
    "checkpoint-engine": rival_checkpoint_engine.one_gpu,
}
TWO: dict[str, Case] = {
    "memsaver 2": ours.two_gpus,
    "all-gather": rivals_two.all_gather,
    "replicas": rivals_two.replicas,
}
GROUPS = {"one": ONE, "two": TWO}
LAYERS = {"one": (28, 14), "two": (28, 28)}  # of the bf16 and of the fp32 source


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__, [*GROUPS, *ONE, *TWO])
    options.set_defaults(cases=["two"] if torch.cuda.device_count() > 1 else ["one"])
    options.add_argument("--repeats", type=int, default=5)
    args = options.parse_args(arguments)
    cases: dict[str, Callable[[], Figures]] = {}
    for group, members in GROUPS.items():
        chosen = {name: case for name, case in members.items() if {name, group} & {*args.cases}}
        if not chosen:
            continue
        gpus = 1 if group == "one" else 2
        if torch.cuda.device_count() == 1 < gpus:
            raise SystemExit("the cases of two GPUs need two")
        scale, found = floors.with_rates(
            sync_scale(make_scale(args), LAYERS[group], args.repeats), gpus
        )
        if found:
            cases["floors"] = lambda found=found: found
        cases |= {name: partial(case, scale) for name, case in chosen.items()}
    run_cases("bench_sync", cases, args.out)


if __name__ == "__main__":
    main()
