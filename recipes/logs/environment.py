"""Environment of a run: date, host, GPUs and versions, in environment.json."""

import contextlib
import importlib.metadata
import os
import platform
import subprocess
import time
from typing import Any

PACKAGES = ("memsaver", "torch", "triton", "ray", "transformers")


def describe_environment() -> dict[str, Any]:
    """Return date, host, GPUs and package versions without creating a CUDA context."""
    packages = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "host": platform.node(),
        "cpus": len(os.sched_getaffinity(0)),
        "gpus": _gpus(),
        "python": platform.python_version(),
        "packages": packages,
    }


def _gpus() -> list[str]:
    """Return name, memory and driver of each GPU that CUDA_VISIBLE_DEVICES shows.

    MIG devices, which nvidia-smi cannot select, are listed as the variable names them.
    """
    query = "--query-gpu=name,memory.total,driver_version"
    command = ["nvidia-smi", query, "--format=csv,noheader"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        command += ["-i", visible.replace(" ", "")]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):  # no driver answers, or no such device
        return [name for name in (visible or "").split(",") if name.startswith("MIG-")]
    return listed.stdout.splitlines()
