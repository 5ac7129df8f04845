"""Find the processes that hold memory of a GPU, as far as NVML reports them.

No function here raises, because the results go into messages about other errors.
"""

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
    """Return NVIDIA's NVML binding, initialized; None if the binding or the driver is missing."""
    try:
        from cuda.bindings import nvml

        nvml.init_v2()
    except Exception:  # the binding raises many classes, others if it finds no driver
        return None
    return nvml


os.register_at_fork(after_in_child=session.cache_clear)  # NVML's state is the parent's


def processes(uuid: str) -> dict[int, int | None] | None:
    """Return the bytes that each process uses on the GPU ``uuid`` (``"GPU-..."``), by process id.

    The value is None for a process whose bytes NVML hides. The result is None if NVML is absent or
    refuses. In a container the process ids may be those of the host.
    """
    if (nvml := session()) is None:
        return None
    usage: dict[int, int | None] = {}
    try:
        handle = nvml.device_get_handle_by_uuid(uuid)
        for kind in _LISTS:
            for pid, used in _listed(nvml, kind, handle).items():
                known = usage.get(pid)  # a process in two lists has its whole memory in both
                usage[pid] = used if known is None else max(known, used or 0)
    except nvml.NvmlError:
        return None
    return usage


def _listed(nvml: Any, kind: str, handle: int) -> dict[int, int | None]:
    """Return one of NVML's process lists, empty if this GPU does not have that kind."""
    try:
        processes = getattr(nvml, f"device_get_{kind}_running_processes_v3")(handle)
    except nvml.NotSupportedError:
        return {}
    usage: dict[int, int | None] = {}
    for process in processes:  # under MIG a process has one entry for each instance
        known, used = usage.get(process.pid, 0), int(process.used_gpu_memory)
        usage[process.pid] = None if known is None or used == _NOT_AVAILABLE else known + used
    return usage


def holders(uuid: str, unaccounted: int, accounted: int) -> dict[str, int]:
    """Attribute unaccounted bytes to other processes, by name, the largest first, and a rest.

    ``accounted`` are the bytes that this process's savers and torch hold; ``unaccounted`` are all
    others in use on the GPU. NVML counts a leased tag in the peer's bytes, too, so the largest
    process is cut to make the values add up to ``unaccounted``. If NVML does not list this process,
    its process ids belong to another namespace, and no process is named.
    """
    if unaccounted <= 0:
        return {}
    listed, pid = processes(uuid) or {}, os.getpid()
    if pid not in listed:
        return {UNKNOWN: unaccounted}
    own, left = listed.pop(pid), unaccounted
    named: dict[str, int] = {}
    for used, holder in sorted((used, holder) for holder, used in listed.items() if used):
        name = process_name(holder)
        named[name] = min(used, left)
        left -= named[name]
    rest = {UNKNOWN: left} if own is None else _split(left, max(0, own - accounted))
    split = {**dict(reversed(named.items())), **rest}
    return {name: nbytes for name, nbytes in split.items() if nbytes}


def _split(nbytes: int, residue: int) -> dict[str, int]:
    return {OWN: min(nbytes, residue), HIDDEN: max(0, nbytes - residue)}


def process_name(pid: int) -> str:
    """Return ``"process 1234 (python train.py)"``, without a command line that is unreadable."""
    try:
        words = psutil.Process(pid).cmdline()
    except (psutil.Error, ValueError):
        words = []
    names = (os.path.basename(word) if word.startswith("/") else word for word in words)
    text = " ".join(" ".join(names).split())
    # a terminal may interpret the message
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    command = text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
    return f"process {pid} ({command})" if command else f"process {pid}"
