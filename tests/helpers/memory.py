"""Oracles for physical memory: what the kernel or the driver says is in use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch


def _kib(path: str, key: str) -> int:
    for line in Path(path).read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def process_bytes(device: str) -> int:
    """Shared-memory pages of this process (host), or the device's used memory (GPU)."""
    if device == "cpu":
        return _kib("/proc/self/status", "RssShmem")
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def machine_bytes(device: str) -> int:
    """Shared memory of the whole machine (host), or the device's used memory (GPU)."""
    return _kib("/proc/meminfo", "Shmem") if device == "cpu" else process_bytes(device)


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def memory_maps() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


def scribble(nbytes: int, device: str) -> None:
    """Another process takes ``nbytes``, fills them with 0xFF and ends: freed pages cannot keep their old content."""
    code = f"import torch; x = torch.full(({nbytes},), 255, dtype=torch.uint8, device={device!r}); print(int(x[-1]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "255"
