"""Says which versions of other projects' engines are known, and what ``memsaver doctor`` tells."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memsaver.doctor_gpu import Finding

IN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"
_OLDEST = {"vllm": (0, 24), "sglang": (0, 5, 16)}
_SECONDS = 120  # for an import


def require(package: str) -> str:
    """Returns the version; ``ValueError`` without the package, or with one older than was read."""
    if importlib.util.find_spec(package) is None:
        raise ValueError(
            f"engine.kind={package} needs the package {package}; run: pip install {package}"
        )
    version, oldest = importlib.metadata.version(package), _OLDEST[package]
    if tuple(map(int, re.findall(r"\d+", version)[: len(oldest)])) < oldest:
        least = ".".join(map(str, oldest))
        raise ValueError(
            f"{package} {version} is older than {least}; run: pip install '{package}>={least}'"
        )
    return version


def vllm() -> Finding:
    found = _imported("vllm")
    if found[0] == "ok" and (value := os.environ.get(IN_PROCESS, "0")) != "0":
        told = f"{IN_PROCESS}={value}: its engine would be a process of its own"
        return "warn", f"{found[1]}; {told}", f"unset {IN_PROCESS}, or set it to 0"
    return found


def sglang() -> Finding:
    return _imported("sglang")


def _imported(package: str) -> Finding:
    """Imports it in a process of its own: that may fail, and leaves threads and settings behind."""
    if importlib.util.find_spec(package) is None:
        return "skip", f"not installed; only engine.kind={package} needs it"
    try:
        version = require(package)
    except ValueError as error:
        found, _, remedy = str(error).partition("; ")
        return "warn", found, remedy
    done = subprocess.run(
        [sys.executable, "-c", f"import {package}"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=_SECONDS,
    )
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        remedy = f"install what it lacks, or {package} anew in an environment of its own"
        return "warn", f"{version}, does not import: {said}", remedy
    return "ok", version
