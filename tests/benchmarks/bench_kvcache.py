"""Allocators and pools of the KV cache against the device's copy rate, torch and the driver. `make bench-kvcache`.

Every case checks its results in the same run. Without a GPU only the host's bookkeeping is measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from tests.benchmarks.common import conditions, print_table, save
from tests.benchmarks.kvcache import blocks, expand, groups, radix, reads, resize, rows, sharing, staging, transfer
from tests.benchmarks.kvcache.base import Figure, Scale, make_scale

Case = Callable[[Scale], list[Figure]]
GPU_CASES: dict[str, Case] = {
    "pages to tokens, extend": expand.extend,
    "pages to tokens, decode": expand.decode,
    "write": rows.write,
    "move": rows.move,
    "fp8 and FP4": rows.quantised,
    "attention reads": reads.read,
    "resize": resize.resize,
    "group prefill": groups.prefill,
    "staging": staging.staging,
    "split transfer": transfer.transfer,
}
# on the host, and on the GPU too where there is one; first, as a lent host takes twice as long after work on the GPU
HOST_CASES: dict[str, Case] = {"decode bookkeeping": blocks.decode_bookkeeping}
CPU_CASES: dict[str, Case] = {"radix": radix.radix, **sharing.CASES}  # no device is involved
CASES = {**HOST_CASES, **GPU_CASES, **CPU_CASES}


def measure(names: list[str], tiny: bool) -> dict[str, list[Figure]]:
    """Figures by case and device. Without a GPU its cases are skipped, unless all is tiny."""
    cpu = make_scale("cpu", tiny)
    gpu = make_scale("cuda:0", tiny) if torch.cuda.is_available() else None
    results: dict[str, list[Figure]] = {}
    for name in names:
        scales = [gpu] if gpu is not None and name not in CPU_CASES else []
        if name in HOST_CASES or name in CPU_CASES or (tiny and gpu is None):
            scales.append(cpu)
        if not scales:
            print(f"{name}: skipped, it needs a GPU", flush=True)
        for scale in scales:
            where = name if scale.on_gpu else f"{name}, CPU"
            results[where] = CASES[name](scale)
            print(where, {f"{f.what}, {f.unit}": round(f.value, 2) for f in results[where]}, flush=True)
            if scale.on_gpu:
                torch.cuda.empty_cache()
    return results


def draw(path: Path, results: dict[str, list[Figure]]) -> None:
    """Everything that moves bytes, beside the device's copy."""
    from tests.benchmarks.plots import stacked_bars

    part = "bytes read and written, % of the rate of one large copy"
    figures = [(name, figure) for name, case in results.items() for figure in case]
    rows = {f"{name}: {figure.what}": {part: figure.value} for name, figure in figures if figure.unit == "% of copy"}
    if rows:
        stacked_bars(path, "KV cache pools", rows, unit="%")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--tiny", action="store_true", help="sizes for a test of this script; times mean nothing")
    args = parser.parse_args(arguments)
    results = measure(args.cases, args.tiny)
    print(conditions())
    if torch.cuda.is_available():
        print("% of copy: of the rate of a 4 GiB device-to-device copy in the same run, bytes read and written counted")
    head = ["case", "what", "value", "unit", "target"]
    print_table(head, [[name, f.what, f.value, f.unit, f.target] for name, case in results.items() for f in case])
    save(args.out, "bench_kvcache", {name: [asdict(figure) for figure in case] for name, case in results.items()})
    if args.out is not None:
        draw(args.out / "bench_kvcache.png", results)


if __name__ == "__main__":
    main()
