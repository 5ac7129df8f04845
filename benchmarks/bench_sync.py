"""The weight sync against floors of the same run and against other methods.

`make bench-sync`. On one GPU, which trainer and engine share: bf16 -> bf16 at the whole Qwen2.5-7B
shape, and fp32 -> bf16 at half of its layers, because a trainer's masters, gradients and moments in
fp32 do not fit otherwise. In "offloaded", the trainer's copy first comes from the host. On two
GPUs: FSDP2 over both, all layers; in "far node", the engine's GPU is reached by sockets only. Every
case checks the received weights. "one" and "two" select all cases for one and two GPUs.

    python -m benchmarks.bench_sync --shape qwen3-30b-a3b --layers 16
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.common import Figures, make_scale, parser, run_cases
from benchmarks.sync import far, floors, ours, rivals_ipc, rivals_two
from benchmarks.sync.base import SyncScale, sync_scale

Case = Callable[[SyncScale], Figures]
ONE: dict[str, Case] = {
    "memsaver": ours.one_gpu,
    "offloaded": ours.offloaded,
    "IPC tensors": rivals_ipc.per_tensor,
    "IPC buckets": rivals_ipc.buckets,
}
TWO: dict[str, Case] = {
    "memsaver 2": ours.two_gpus,
    "far node": far.far_node,
    "all-gather": rivals_two.all_gather,
    "replicas": rivals_two.replicas,
}
GROUPS = {"one": ONE, "two": TWO}
LAYERS: dict[str, dict[str, int | None]] = {
    "one": {"bfloat16": None, "float32": 14},
    "two": {"bfloat16": None, "float32": None},
}


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__, [*GROUPS, *ONE, *TWO])
    options.set_defaults(cases=["two"] if torch.cuda.device_count() > 1 else ["one"])
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--shape", default="qwen2.5-7b", help="as a recipe's model.shape")
    options.add_argument("--layers", type=int, help="number of layers, in bf16; fp32 is left out")
    args = options.parse_args(arguments)
    cases: dict[str, Callable[[], Figures]] = {}
    for group, members in GROUPS.items():
        chosen = {name: case for name, case in members.items() if {name, group} & {*args.cases}}
        if not chosen:
            continue
        gpus = 1 if group == "one" else 2
        if torch.cuda.device_count() == 1 < gpus:
            raise SystemExit("the cases of two GPUs need two")
        layers = LAYERS[group] if args.layers is None else {"bfloat16": args.layers}
        scale = sync_scale(make_scale(args), args.shape, layers, args.repeats)
        scale, rates = floors.with_rates(scale, gpus)
        if rates:
            cases["floors"] = lambda rates=rates: rates
        cases |= {name: partial(case, scale) for name, case in chosen.items()}
    run_cases("bench_sync", cases, args.out)


if __name__ == "__main__":
    main()
