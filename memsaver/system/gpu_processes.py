"""Find who holds memory of a GPU, by process, as far as NVML tells.

Nothing here raises: it serves messages about other errors.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import psutil

_LISTS = ("compute", "graphics", "mps_compute")
_NOT_AVAILABLE = (1 << 64) - 1
OWN = "contexts and libraries of this process"
HIDDEN = "unknown: driver, processes that NVML hides"
UNKNOWN = "unknown: context of this process, other processes"
_LONGEST = 40


@cache
def session() -> Any:
    """Return NVIDIA's binding of NVML, started; None where the binding or a driver is missing."""
    try:
        from cuda.bindings import nvml

        nvml.init_v2()
    except Exception:  # the binding has a class for each cause, and others where it finds no driver
        return None
    return nvml


os.register_at_fork(after_in_child=session.cache_clear)  # NVML's state stays with the parent


def processes(uuid: str) -> dict[int, int | None] | None:
    """Return the bytes that every process uses on the GPU ``uuid`` (``"GPU-..."``), by process id.

    Bytes that NVML keeps to itself are None. All of it is None where NVML is absent or refuses. In
    a container the ids may be those of the host.
    """
    if (nvml := session()) is None:
        return None
    found: dict[int, int | None] = {}
    try:
        handle = nvml.device_get_handle_by_uuid(uuid)
        for kind in _LISTS:
            for pid, used in _listed(nvml, kind, handle).items():
                known = found.get(pid)  # a process in two lists has its whole memory in both
                found[pid] = used if known is None else max(known, used or 0)
    except nvml.NvmlError:
        return None
    return found


def _listed(nvml: Any, kind: str, handle: int) -> dict[int, int | None]:
    """Return one of NVML's lists; empty where this GPU has none of the kind."""
    try:
        processes = getattr(nvml, f"device_get_{kind}_running_processes_v3")(handle)
    except nvml.NotSupportedError:
        return {}
    found: dict[int, int | None] = {}
    for process in processes:  # under MIG a process has one entry for each instance
        known, used = found.get(process.pid, 0), int(process.used_gpu_memory)
        found[process.pid] = None if known is None or used == _NOT_AVAILABLE else known + used
    return found


def holders(uuid: str, unaccounted: int, accounted: int) -> dict[str, int]:
    """Split ``unaccounted`` into names and bytes: other processes, the largest first, and the rest.

    The values add up to ``unaccounted``: NVML counts a leased tag in the peer's bytes too, so the
    excess is cut from the largest process. Nobody is named where NVML does not list this very
    process: the ids are then those of another namespace.

    Args:
        uuid: The GPU's.
        unaccounted: Bytes used on the GPU, less ``accounted``.
        accounted: Bytes that this process's savers and torch hold.
    """
    if unaccounted <= 0:
        return {}
    listed, pid = processes(uuid) or {}, os.getpid()
    if pid not in listed:
        return {UNKNOWN: unaccounted}
    own, left = listed.pop(pid), unaccounted
    named: dict[str, int] = {}
    for used, other in sorted((used, other) for other, used in listed.items() if used):
        name = process_name(other)
        named[name] = min(used, left)
        left -= named[name]
    rest = {UNKNOWN: left} if own is None else _split(left, max(0, own - accounted))
    everyone = {**dict(reversed(named.items())), **rest}
    return {name: nbytes for name, nbytes in everyone.items() if nbytes}


def _split(nbytes: int, residue: int) -> dict[str, int]:
    return {OWN: min(nbytes, residue), HIDDEN: max(0, nbytes - residue)}


def process_name(pid: int) -> str:
    """Return ``"process 1234 (python train.py)"``; without a command line that may not be read."""
    try:
        words = psutil.Process(pid).cmdline()
    except (psutil.Error, ValueError):
        words = []
    names = (os.path.basename(word) if word.startswith("/") else word for word in words)
    text = " ".join(" ".join(names).split())
    # a terminal may read the message
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    command = text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
    return f"process {pid} ({command})" if command else f"process {pid}"
