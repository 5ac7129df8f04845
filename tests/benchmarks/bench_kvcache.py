"""Allocators, pools and tiers of the KV cache against copy rates, torch and the driver. `make bench-kvcache`.

Every case checks its results in the same run. Without a GPU only the host's bookkeeping is measured.
"""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from tests.benchmarks.common import conditions, print_table, save
from tests.benchmarks.kvcache import (
    blocks,
    expand,
    groups,
    overlap,
    radix,
    reads,
    resize,
    rows,
    sharing,
    staging,
    tiers,
    transfer,
)
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
    "host tier": tiers.host,
    "load overlap": overlap.overlap,
    "staging": staging.staging,
    "split transfer": transfer.transfer,
}
# on the host, and on the GPU too where there is one; first, as a lent host takes twice as long after work on the GPU
HOST_CASES: dict[str, Case] = {"decode bookkeeping": blocks.decode_bookkeeping}
CPU_CASES: dict[str, Case] = {"radix": radix.radix, "disk tier": tiers.disk, **sharing.CASES}  # no device is involved
CASES = {**HOST_CASES, **GPU_CASES, **CPU_CASES}
DRAWN = {  # units that are a share of a copy's rate
    "% of copy": "bytes read and written, % of the rate of one large copy",
    "% of pinned copy": "% of the rate of one copy of as many bytes from or to pinned memory",
}


def measure(names: list[str], tiny: bool, out: Path | None = None) -> dict[str, list[Figure]]:
    """Figures by case and device, none where a case failed. Without a GPU its cases are skipped, unless all is tiny."""
    cpu = make_scale("cpu", tiny, out)
    gpu = make_scale("cuda:0", tiny, out) if torch.cuda.is_available() else None
    results: dict[str, list[Figure]] = {}
    for name in names:
        scales = [gpu] if gpu is not None and name not in CPU_CASES else []
        if name in HOST_CASES or name in CPU_CASES or (tiny and gpu is None):
            scales.append(cpu)
        if not scales:
            print(f"{name}: skipped, it needs a GPU", flush=True)
        for scale in scales:
            where = name if scale.on_gpu else f"{name}, CPU"
            results[where] = _figures(name, scale)
            print(where, {f"{f.what}, {f.unit}": round(f.value, 2) for f in results[where]}, flush=True)
    return results


def _figures(name: str, scale: Scale) -> list[Figure]:
    """None of a case that fails, which must not cost the others theirs."""
    try:
        if scale.on_gpu:
            torch.cuda.empty_cache()
        return CASES[name](scale)
    except Exception:
        traceback.print_exc()
        return []


def draw(path: Path, results: dict[str, list[Figure]]) -> None:
    """Everything that moves bytes, beside a copy."""
    from tests.benchmarks.plots import stacked_bars

    figures = [(f"{name}: {each.what}", each) for name, case in results.items() for each in case]
    rows = {what: {DRAWN[each.unit]: each.value} for what, each in figures if each.unit in DRAWN}
    if rows:
        stacked_bars(path, "KV cache pools", rows, unit="%")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--tiny", action="store_true", help="sizes for a test of this script; times mean nothing")
    args = parser.parse_args(arguments)
    results = measure(args.cases, args.tiny, args.out)
    print(conditions())
    if torch.cuda.is_available():
        print("% of copy: of the rate of a 4 GiB device-to-device copy in the same run, bytes read and written counted")
        print("% of pinned copy: of one of as many bytes in the same direction, by turns with it")
    head = ["case", "what", "value", "unit", "target"]
    print_table(head, [[name, f.what, f.value, f.unit, f.target] for name, case in results.items() for f in case])
    save(args.out, "bench_kvcache", {name: [asdict(figure) for figure in case] for name, case in results.items()})
    if args.out is not None:
        draw(args.out / "bench_kvcache.png", results)
    if failed := [name for name, case in results.items() if not case]:
        raise SystemExit(f"failed, see above: {', '.join(failed)}")


if __name__ == "__main__":
    main()
