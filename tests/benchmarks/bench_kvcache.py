"""Allocators, pools and tiers of the KV cache against copy rates, torch and the driver. `make
bench-kvcache`.

Every case checks its results in the same run. Without a GPU only the host's bookkeeping is
measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from tests.benchmarks.common import (
    Case,
    Figure,
    Figures,
    Scale,
    measured_copy_rate,
    parser,
    run_cases,
)
from tests.benchmarks.kvcache import (
    blocks,
    engines,
    expand,
    overlap,
    radix,
    reads,
    resize,
    rows,
    sharing,
    staging,
    tiers,
)
from tests.benchmarks.kvcache.transfer import transfer

GPU_CASES: dict[str, Case] = {
    "pages to tokens, extend": expand.extend,
    "pages to tokens, decode": expand.decode,
    "write": rows.write,
    "move": rows.move,
    "fp8 and FP4": rows.quantised,
    "attention reads": reads.read,
    "resize": resize.resize,
    "group prefill": engines.prefill,
    "host tier": tiers.host,
    "load overlap": overlap.overlap,
    "staging": staging.staging,
    "split transfer": transfer,
}
# on the host, and on the GPU too where there is one; first, as a lent host takes twice as long
# after work on the GPU
HOST_CASES: dict[str, Case] = {"decode bookkeeping": blocks.decode_bookkeeping}
# no device is involved
CPU_CASES: dict[str, Case] = {"radix": radix.radix, "disk tier": tiers.disk, **sharing.CASES}
CASES = {**HOST_CASES, **GPU_CASES, **CPU_CASES}
DRAWN = {  # units that are a share of a copy's rate
    "% of copy": "bytes read and written, % of the rate of one large copy",
    "% of pinned copy": "% of the rate of one copy of as many bytes from or to pinned memory",
}


def bound(names: list[str], cpu: Scale, gpu: Scale | None) -> dict[str, Callable[[], Figures]]:
    """The cases that this machine has devices for.

    Without a GPU its cases run on the CPU if all is tiny.
    """
    chosen: dict[str, Callable[[], Figures]] = {}
    for name in names:
        if gpu is not None and name not in CPU_CASES:
            chosen[name] = partial(CASES[name], gpu)
        if name not in GPU_CASES or (cpu.tiny and gpu is None):
            chosen[f"{name}, CPU"] = partial(CASES[name], cpu)
    return chosen


def bar(name: str, figure: Figure) -> tuple[str, str] | None:
    """Everything that moves bytes, beside a copy."""
    return (f"{name}: {figure.what}", DRAWN[figure.unit]) if figure.unit in DRAWN else None


def main(arguments: list[str] | None = None) -> None:
    args = parser(__doc__, CASES).parse_args(arguments)
    cpu, gpu = Scale(device=torch.device("cpu"), tiny=args.tiny, out=args.out), None
    if torch.cuda.is_available():
        gpu = replace(cpu, device=torch.device("cuda:0"))
        gpu = replace(gpu, copy_rate=measured_copy_rate(gpu))
        print(
            "% of copy: of the rate of a 4 GiB device-to-device copy in the same run, "
            "bytes read and written counted"
        )
        print("% of pinned copy: of one of as many bytes in the same direction, by turns with it")
    cases = bound(args.cases, cpu, gpu)
    print(
        "skipped, they need a GPU:",
        [name for name in args.cases if not {name, f"{name}, CPU"} & cases.keys()],
    )
    run_cases("bench_kvcache", cases, args.out, bar)


if __name__ == "__main__":
    main()
