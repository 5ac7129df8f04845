"""Finds who holds memory of a GPU, by process, as far as NVML tells.

Never raises: it serves messages about other errors.
"""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

from memsaver.system.machine import command_of, process_name

_SUCCESS, _NOT_SUPPORTED, _INSUFFICIENT_SIZE, _FUNCTION_NOT_FOUND = 0, 3, 7, 13
_NOT_AVAILABLE = (1 << 64) - 1
_LISTS = tuple(
    f"nvmlDeviceGet{kind}RunningProcesses_v3" for kind in ("Compute", "Graphics", "MPSCompute")
)
_ATTEMPTS = 5
_SPARE = 8  # processes that may start between asking for the count and reading the list

OWN = "contexts and libraries of this process"
HIDDEN = "unknown: driver, processes that NVML hides"
UNKNOWN = "unknown: context of this process, other processes"


class ProcessInfo(ctypes.Structure):
    """``nvmlProcessInfo_t`` of the ``_v3`` functions."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class Session:
    """NVML, loaded and initialised on first use, once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tried = False
        self._library: Any = None

    def library(self) -> Any:
        """The library, or None where it is absent or does not start."""
        with self._lock:
            if not self._tried:
                self._tried = True
                self._library = _started()
            return self._library


def _started() -> Any:
    try:
        library = load()
        return library if library.nvmlInit_v2() == _SUCCESS else None
    except (OSError, AttributeError):  # no driver here, or one older than these functions
        return None


def load() -> Any:
    return ctypes.CDLL("libnvidia-ml.so.1")


session = Session()


def renew() -> None:
    global session
    session = Session()


# a lock held by another thread, and NVML's own state, stay with the parent
os.register_at_fork(after_in_child=renew)


def processes(uuid: str) -> dict[int, int | None] | None:
    """Bytes used by every process on the GPU ``uuid`` (``"GPU-..."``), by process id.

    None for a process whose bytes NVML keeps to itself, and None as a whole where NVML is absent or
    refuses. In a container the ids may be those of the host.
    """
    library = session.library()
    if library is None:
        return None
    handle = ctypes.c_void_p()
    if library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)) != _SUCCESS:
        return None
    found: dict[int, int | None] = {}
    for name in _LISTS:
        listed = _read_list(getattr(library, name, None), handle)
        if listed is None:
            return None
        for pid, used in listed.items():
            known = found.get(pid)  # a process in two lists has its whole memory in both
            found[pid] = used if known is None else max(known, used or 0)
    return found


def _read_list(function: Any, handle: ctypes.c_void_p) -> dict[int, int | None] | None:
    """One of NVML's lists; empty where this GPU has none of the kind, None when NVML refuses."""
    if function is None:
        return {}
    count, size = ctypes.c_uint(0), 0
    for _ in range(_ATTEMPTS):
        infos = (ProcessInfo * size)() if size else None
        code = function(handle, ctypes.byref(count), infos)
        if code == _SUCCESS:
            return _by_pid(list(infos[: count.value]) if infos else [])
        if code in (_NOT_SUPPORTED, _FUNCTION_NOT_FOUND):
            return {}
        if code != _INSUFFICIENT_SIZE:
            return None
        size = max(size, count.value) + _SPARE
        count.value = size
    return None


def _by_pid(infos: list[ProcessInfo]) -> dict[int, int | None]:
    found: dict[int, int | None] = {}
    for info in infos:  # with MIG, a process has one entry for each instance
        known = found.get(info.pid, 0)
        found[info.pid] = (
            None if known is None or info.used == _NOT_AVAILABLE else known + info.used
        )
    return found


def holders(uuid: str, unaccounted: int, accounted: int) -> dict[str, int]:
    """Split ``unaccounted`` into names and bytes: other processes, the largest first, and the rest.

    unaccounted: bytes used on the GPU, less ``accounted``: what this process's savers and torch
    hold of them.

    The values add up to ``unaccounted``: NVML counts a leased tag in the peer's bytes too, so what
    is too much is cut from the largest process. Nobody is named where NVML does not list this very
    process: the ids are then those of another namespace, and not ours to look up.
    """
    if unaccounted <= 0:
        return {}
    listed, pid = processes(uuid) or {}, os.getpid()
    if pid not in listed:
        return {UNKNOWN: unaccounted}
    own, left = listed.pop(pid), unaccounted
    named: dict[str, int] = {}
    for used, other in sorted((used, other) for other, used in listed.items() if used):
        name = process_name(other, command_of(other))
        named[name] = min(used, left)
        left -= named[name]
    rest = {UNKNOWN: left} if own is None else _split(left, max(0, own - accounted))
    everyone = {**dict(reversed(named.items())), **rest}
    return {name: nbytes for name, nbytes in everyone.items() if nbytes}


def _split(nbytes: int, residue: int) -> dict[str, int]:
    return {OWN: min(nbytes, residue), HIDDEN: max(0, nbytes - residue)}
