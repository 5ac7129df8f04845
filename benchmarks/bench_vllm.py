"""vLLM or SGLang on our tags against the unchanged engine: sleep, wake-up, weights, throughput.

`make bench-vllm`, with vllm installed; `--engine sglang` for SGLang. Each side runs in its own
process, one after the other in the order of `--cases`, with the same random weights of a Qwen2.5
shape. The driver's floor comes last: it unmaps and maps as many bytes as a sleep freed.

`--throughput` measures nothing else, and supports our own engine and larger models, too:

    python -m benchmarks.bench_vllm --throughput short --shape qwen3-30b-a3b --cases native
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks.common import (
    GIB,
    Figure,
    Figures,
    Skipped,
    extent_by_driver,
    fields_of,
    make_scale,
    parser,
    run_cases,
    write_config,
)
from benchmarks.vllm_side import WORKLOADS

KINDS = {"memsaver": "ours", "its own": "rival", "native": "native"}
FLOOR = "driver's floor"
KV_TOKENS, CONTEXT = 196608, 1024
KV_TOKENS_OF_WORKLOADS, CONTEXT_OF_WORKLOADS = 655360, 8448


class Sides:
    """The processes of the sides, in the order in which they are measured."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._log = args.out or folder
        self._log.mkdir(parents=True, exist_ok=True)
        self._answers: object = None
        self._freed = 0.0  # GiB, by the first engine's sleep
        self._engine = args.engine
        fields = fields_of(make_scale(args), args.shape, args.layers)
        model = write_config(folder / "model", fields)
        size = (KV_TOKENS, CONTEXT)
        if args.throughput:
            size = (KV_TOKENS_OF_WORKLOADS, CONTEXT_OF_WORKLOADS)
        self._words = [str(model), *map(str, size), "quick" if args.quick else "whole"]
        self._words += [str(args.adapters), str(args.cycles), *args.throughput]
        self._started: list[subprocess.Popen[str]] = []

    def _start(self, kind: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", f"benchmarks.{self._engine}_side", kind, *self._words]
        pipe = subprocess.PIPE
        with (self._log / f"{self._engine}_{kind}.log").open("w") as log:
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True)
        self._started.append(process)
        return process

    def measured(self, kind: str) -> Figures:
        process, measured = self._start(kind), []
        assert process.stdin is not None and process.stdout is not None
        for line in process.stdout:
            if line.strip() == "ready":
                process.stdin.write("go\n")
                process.stdin.flush()
            elif line.startswith('{"what"'):
                figure = Figure(**json.loads(line))
                if figure.what.endswith("freed"):
                    self._freed = self._freed or figure.value
                measured.append(figure)
                print(f"  {figure.what}: {figure.value:.1f} {figure.unit}", flush=True)
            elif line.startswith('{"answers"'):
                measured += self._compared(json.loads(line)["answers"])
        if process.wait():
            text = (self._log / f"{self._engine}_{kind}.log").read_text()
            raise RuntimeError(text[-3000:])
        return measured

    def driver_floor(self, device: torch.device) -> Figures:
        """Time the driver alone with the bytes that a sleep at level 2 freed, as one extent.

        Raises:
            Skipped: No engine was measured before.
        """
        if not self._freed:
            raise Skipped("it takes the bytes that an engine's sleep freed, measured before it")
        nbytes = int(self._freed * GIB)
        wait = partial(time.sleep, 0.5)  # as between the engines' sleep and wake-up
        times = extent_by_driver(device, nbytes, "map", "unmap", wait)
        return [Figure(what=what, value=value) for what, value in times.items()]

    def _compared(self, answers: list[list[int]]) -> Figures:
        before, self._answers = self._answers, answers
        if not isinstance(before, list):
            return []
        same = sum(map(list.__eq__, before, answers))
        return [Figure(what="greedy answers of 64 equal to the other's", value=same, unit="")]

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()


def skipped() -> Figures:
    raise Skipped("it has no tiny form, and needs a GPU and the engine")


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__, [*KINDS, FLOOR])
    options.add_argument("--engine", choices=("vllm", "sglang"), default="vllm")
    options.add_argument("--shape", default="qwen2.5-7b", help="as a recipe's model.shape")
    options.add_argument("--layers", type=int, help="number of layers; by default all of the shape")
    options.add_argument(
        "--throughput", nargs="+", choices=WORKLOADS, default=[], help="measure these only"
    )
    options.add_argument(
        "--adapters", type=int, default=0, help="requests take these in turn, of rank 32 or 16"
    )
    options.add_argument("--cycles", type=int, default=20)
    options.add_argument(
        "--quick", action="store_true", help="few CUDA graphs, and no torch.compile"
    )
    options.set_defaults(cases=["memsaver", "its own", FLOOR])
    args = options.parse_args(arguments)
    if "native" in args.cases and not args.throughput:
        raise SystemExit("native: our own engine is measured only with --throughput")
    scale = make_scale(args)
    absent = importlib.util.find_spec(args.engine) is None and args.cases != ["native"]
    if scale.tiny or absent:
        return run_cases(f"bench_{args.engine}", dict.fromkeys(args.cases, skipped), args.out)
    with tempfile.TemporaryDirectory() as folder:
        sides = Sides(args, Path(folder))
        try:
            cases: dict[str, Callable[[], Figures]] = {
                name: partial(sides.measured, KINDS[name]) for name in args.cases if name in KINDS
            }
            if FLOOR in args.cases and not args.throughput:
                cases[FLOOR] = partial(sides.driver_floor, scale.device)
            run_cases(f"bench_{args.engine}", cases, args.out)
        finally:
            sides.close()
    return None


if __name__ == "__main__":
    main()
