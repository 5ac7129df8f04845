"""vLLM on our tags beside vLLM as it comes: sleeps, wake-ups, new weights, throughput. `make
bench-vllm`, with vllm installed.

Each in a process of its own, of the same run; both with random weights of a Qwen2.5 shape.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from tests.benchmarks.common import (
    Case,
    Figure,
    Figures,
    Scale,
    Skipped,
    make_scale,
    parser,
    run_cases,
    write_config,
)

SIZES = ("0.5b", "7b")


def measured(scale: Scale, kind: str, size: str, cycles: int, eager: bool) -> Figures:
    if scale.tiny or not scale.on_gpu or importlib.util.find_spec("vllm") is None:
        raise Skipped("it takes a GPU" if not scale.on_gpu else "vllm is absent")
    with tempfile.TemporaryDirectory() as folder:
        path = write_config(Path(folder), size)
        command = [sys.executable, "-m", "tests.benchmarks.vllm_side", kind, str(path)]
        command += ["262144", str(cycles), *(["eager"] if eager else [])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"what"')]
    if done.returncode or not lines:
        raise RuntimeError(f"{done.stdout[-1500:]}\n{done.stderr[-3000:]}")
    return [Figure(**json.loads(line)) for line in lines]


def main(arguments: list[str] | None = None) -> None:
    names = {"vLLM's own": "rival", "memsaver": "ours"}
    options = parser(__doc__, list(names))
    options.add_argument("--size", choices=SIZES, default="7b")
    options.add_argument("--cycles", type=int, default=20)
    options.add_argument("--eager", action="store_true")
    args = options.parse_args(arguments)
    scale = make_scale(args)
    cases: dict[str, Case] = {
        name: partial(measured, kind=kind, size=args.size, cycles=args.cycles, eager=args.eager)
        for name, kind in names.items()
        if name in (args.cases or names)
    }
    run_cases("bench_vllm", {name: partial(case, scale) for name, case in cases.items()}, args.out)


if __name__ == "__main__":
    main()
