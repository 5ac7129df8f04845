"""torch_memory_saver in its own process, because it aborts at exit in torch mode.

The process prints milliseconds as JSON.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import torch

from benchmarks.common import REPEATS, Scale, Skipped, Times, others_write


def main(count: int, nbytes: int, repeats: int, written: str, backup: bool, retain: bool) -> None:
    """Measure pause and resume, print the figures, and exit.

    `written` is the memory that is written in between: "nothing", "freed" (as much as was freed) or
    "all" that is free.
    """
    from torch_memory_saver import torch_memory_saver as tms

    tms.hook_mode = "torch"
    if retain:
        tms.retain_cpu_backup = True
    with tms.region(tag="kv", enable_cpu_backup=backup):
        tensors = [torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(count)]
    times, scale = Times(repeats), Scale(device=torch.device("cuda"))
    for _ in times.rounds:
        times("pause", lambda: tms.pause("kv"))
        others_write(scale, {"nothing": 0, "freed": count * nbytes, "all": None}[written])
        times("resume", lambda: tms.resume("kv"))
    for tensor in tensors:
        tensor.fill_(1)
    torch.cuda.synchronize()
    print(json.dumps({"first pause": times.rows["pause"][0], **times.medians}), flush=True)
    os._exit(0)


def in_its_process(
    scale: Scale, count: int, nbytes: int, written: str, *flags: str, repeats: int = REPEATS
) -> dict[str, float]:
    """Run `main` in its own process and return the figures; flags: "backup" and "retain"."""
    if scale.tiny or importlib.util.find_spec("torch_memory_saver") is None:
        raise Skipped("it has no tiny form" if scale.tiny else "torch_memory_saver is absent")
    sizes = map(str, (count, nbytes, repeats))
    command = [sys.executable, "-m", __name__, *sizes, written, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(f"torch_memory_saver failed: {done.stderr[-500:]}")
    result: dict[str, float] = json.loads(lines[-1])
    return result


if __name__ == "__main__":
    main(
        *(int(argument) for argument in sys.argv[1:4]),
        sys.argv[4],
        "backup" in sys.argv,
        "retain" in sys.argv,
    )
