"""The weight sync against floors of the same run and against what people use. `make bench-sync`.

On one GPU, trainer and engine share it: bf16 -> bf16 at the whole Qwen2.5-7B shape, fp32 -> bf16 at half its layers, as
a trainer's masters, gradients and moments in fp32 do not fit beside it otherwise. On two, FSDP2 over both: all layers.
Every case checks what arrived. "one" and "two" stand for all cases of so many GPUs.
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.common import conditions, print_table, save
from tests.benchmarks.sync import floors, ours, rival_checkpoint_engine, rivals_ipc, rivals_one, rivals_two
from tests.benchmarks.sync.base import Figure, Rates, Scale, Skipped, make_scale

Case = Callable[[Scale], list[Figure]]
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
    "checkpoint-engine 2": rival_checkpoint_engine.two_gpus,
}
GROUPS = {"one": ONE, "two": TWO}
LAYERS = {"one": (28, 14), "two": (28, 28)}  # of the bf16 and of the fp32 source
RATE = "device-to-device copy of 4 GiB in the same run: {:.2f} TB/s, read and write counted; link: {:.0f} GB/s each way"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Figures by case; a case that was skipped is not there, one that failed is in `failed`."""

    rates: Rates
    results: dict[str, list[Figure]]
    failed: list[str]


def measure(group: str, names: Sequence[str], scale: Scale) -> Measured:
    """Floors and the named cases. One that fails costs no other its figures."""
    print("floors ...", flush=True)
    rates, figures = floors.rates(scale, gpus=1 if group == "one" else 2)
    done = Measured(rates=rates, results={"floors": figures}, failed=[])
    _show("floors", rates, figures)
    for name in names:
        print(f"{name} ...", flush=True)
        started = time.perf_counter()
        try:
            done.results[name] = GROUPS[group][name](scale)
        except Skipped as why:
            print(f"{name}: skipped, {why}", flush=True)
            continue
        except Exception:
            traceback.print_exc()
            done.failed.append(name)
            continue
        _show(name, rates, done.results[name])
        print(f"{name}: {time.perf_counter() - started:.1f} s in all", flush=True)
    return done


def _show(name: str, rates: Rates, figures: Sequence[Figure]) -> None:
    for each in figures:
        print(f"{name}: {each.what}: {each.ms:.2f} ms, floor {each.floor_ms(rates):.2f}", flush=True)


def _row(case: str, figure: Figure, rates: Rates) -> list[object]:
    floor = figure.floor_ms(rates)
    rise = "-" if figure.rise is None else f"{figure.rise / 2**20:,.0f}"
    parts = ", ".join(f"{name} {value:,.1f}" for name, value in figure.parts.items())
    return [case, figure.what, figure.ms, floor, figure.ms / floor if floor else "-", rise, parts]


def report(measured: Measured) -> None:
    rates = measured.rates
    print(RATE.format(rates.copy / 1e12, rates.link / 1e9))
    head = ["case", "sync", "ms", "floor ms", "x floor", "memory rise MiB", "of it, ms"]
    print_table(head, [_row(name, f, rates) for name, figures in measured.results.items() for f in figures])


def plain(measured: Measured) -> dict[str, Any]:
    """For JSON."""
    results = {
        name: [{**asdict(figure), "floor_ms": figure.floor_ms(measured.rates)} for figure in figures]
        for name, figures in measured.results.items()
    }
    return {"rates": asdict(measured.rates), "results": results}


def _chosen(group: str, wanted: Sequence[str]) -> list[str]:
    return [name for name in GROUPS[group] if name in wanted or group in wanted]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cases", nargs="+", choices=[*GROUPS, *ONE, *TWO], help="default: all that the GPUs allow")
    parser.add_argument("--layers", nargs=2, type=int, metavar=("BF16", "FP32"), help="of 28")
    parser.add_argument("--tiny", action="store_true", help="sizes for a test of this script; times mean nothing")
    args = parser.parse_args(arguments)
    gpus = torch.cuda.device_count()
    if not gpus and not args.tiny:
        raise SystemExit("no GPU; --tiny runs the scripts on the CPU")
    wanted = args.cases or (["two"] if gpus > 1 else ["one"])
    saved: dict[str, Any] = {}
    failed: list[str] = []
    for group in GROUPS:
        if not (names := _chosen(group, wanted)):
            continue
        if group == "two" and gpus == 1:
            raise SystemExit("the cases of two GPUs need two")
        measured = measure(group, names, make_scale(gpus > 0, args.tiny, args.layers or LAYERS[group], args.repeats))
        report(measured)
        saved[group] = plain(measured)
        failed += measured.failed
    print(conditions())
    save(args.out, "bench_sync", saved)
    if failed:
        raise SystemExit(f"failed, see above: {', '.join(failed)}")


if __name__ == "__main__":
    main()
