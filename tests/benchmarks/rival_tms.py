"""torch_memory_saver in a process of its own (it aborts at exit in torch mode). Prints milliseconds as JSON."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time

import torch

from tests.benchmarks.common import free_bytes, others_write


def main(count: int, mib: int, repeats: int, written: str, backup: bool, retain: bool) -> None:
    """written: between pause and resume, "nothing", "freed" (as much as was freed) or "all" that is free."""
    from torch_memory_saver import torch_memory_saver as tms

    tms.hook_mode = "torch"
    if retain:
        tms.retain_cpu_backup = True
    with tms.region(tag="kv", enable_cpu_backup=backup):
        tensors = [torch.empty(mib << 20, dtype=torch.uint8, device="cuda") for _ in range(count)]
    rows: dict[str, list[float]] = {"pause": [], "resume": []}
    for _ in range(repeats + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        tms.pause("kv")
        torch.cuda.synchronize()
        middle = time.perf_counter()
        others_write({"nothing": 0, "freed": count * mib << 20, "all": free_bytes()}[written])
        again = time.perf_counter()
        tms.resume("kv")
        torch.cuda.synchronize()
        rows["pause"].append((middle - start) * 1e3)
        rows["resume"].append((time.perf_counter() - again) * 1e3)
    for tensor in tensors:
        tensor.fill_(1)
    torch.cuda.synchronize()
    medians = {key: statistics.median(values[2:]) for key, values in rows.items()}
    print(json.dumps({"first pause": rows["pause"][0], **medians}), flush=True)
    os._exit(0)


def in_its_process(count: int, mib: int, repeats: int, written: str, *flags: str) -> dict[str, float]:
    """What it prints. flags: "backup", "retain"; the rest as in ``main``."""
    command = [sys.executable, "-m", __name__, str(count), str(mib), str(repeats), written, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(f"torch_memory_saver failed: {done.stderr[-500:]}")
    result: dict[str, float] = json.loads(lines[-1])
    return result


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:4]), sys.argv[4], "backup" in sys.argv, "retain" in sys.argv)
