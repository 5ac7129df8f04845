"""The weight sync against floors of the same run and against what people use. `make bench-sync`.

On one GPU, trainer and engine share it: bf16 -> bf16 at the whole Qwen2.5-7B shape, fp32 -> bf16 at
half its layers, as a trainer's masters, gradients and moments in fp32 do not fit beside it
otherwise. "offloaded": the trainer's copy comes from the host before. On two, FSDP2 over both: all
layers. Every case checks what arrived. "one" and "two" stand for all cases of so many GPUs.

    python -m benchmarks.bench_sync --shape qwen3-30b-a3b --layers 16
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.common import Figures, make_scale, parser, run_cases
from benchmarks.sync import floors, ours, rivals_ipc, rivals_two
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
    options.add_argument("--layers", type=int, help="of the shape, in bf16; fp32 is left out")
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
        scale, found = floors.with_rates(scale, gpus)
        if found:
            cases["floors"] = lambda found=found: found
        cases |= {name: partial(case, scale) for name, case in chosen.items()}
    run_cases("bench_sync", cases, args.out)


if __name__ == "__main__":
    main()
