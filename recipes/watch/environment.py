"""Where a run runs, for its folder: environment.json, read by `memsaver report`."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import time
from typing import Any

PACKAGES = ("memsaver", "torch", "triton", "ray", "transformers")
QUERY = ("name", "memory.total", "driver_version")


def describe_environment() -> dict[str, Any]:
    """Date, host and software of this process, and the GPUs that nvidia-smi lists; no CUDA context is made.

    `gpus`: name, memory (MiB) and driver of each; `packages`: version by name, of those installed."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "host": platform.node(),
        "cpus": len(os.sched_getaffinity(0)),
        "gpus": _gpus(),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpus() -> list[dict[str, str]]:
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []  # no driver here, or one that does not answer: a run goes on without
    lines = [line.split(", ") for line in listed.splitlines()]
    return [dict(zip(("name", "memory", "driver"), words, strict=True)) for words in lines if len(words) == len(QUERY)]
