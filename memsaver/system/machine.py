"""Tells of the machine what Python does not: how much of its memory this process may have (its
own, its container's, what Ray lets live), names of devices and processes, which kernels a device
runs; threads that are kept or warm something up, calls of the C library, files replaced whole.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import psutil
import torch

CGROUPS = Path("/sys/fs/cgroup")
CGROUP_OF_SELF = Path("/proc/self/cgroup")

_NO_LIMIT = 1 << 60  # cgroup v1 writes "no limit" as a number above this
RAY_KEEPS = 0.05  # of the memory: Ray's monitor kills workers when less is free
MAP_FAILED = ctypes.c_void_p(-1).value
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_LONGEST = 40


def available_memory() -> int:
    """Bytes that can be taken now, past no limit, and with Ray's memory monitor killing nobody."""
    memory = psutil.virtual_memory()
    total, free = memory.total, memory.available
    if (group := container_memory()) is not None:
        total, free = min(total, group.limit), min(free, group.free)
    return max(0, free - int(RAY_KEEPS * total))


class Group(NamedTuple):
    """A memory limit above this process, and what counts against it (no file cache)."""

    limit: int
    used: int

    @property
    def free(self) -> int:
        return self.limit - self.used


def container_memory() -> Group | None:
    """Return the control group (v2 or v1) above this process that has the least memory left."""
    groups = []
    for folder, limit_name, used_name in _memory_folders():
        text = _read(folder / limit_name)
        if text.isdigit() and int(text) < _NO_LIMIT:
            used = int(_read(folder / used_name) or 0)
            stat = dict(line.split()[:2] for line in _read(folder / "memory.stat").splitlines())
            cache = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
            groups.append(Group(int(text), max(0, used - cache)))
    return min(groups, key=lambda group: group.free, default=None)


def _memory_folders() -> list[tuple[Path, str, str]]:
    """The groups from this process's own to the root, as far as a container shows them."""
    folders = []
    for line in _read(CGROUP_OF_SELF).splitlines():
        _number, controllers, path = line.split(":", 2)
        parts = [part for part in path.split("/") if part not in ("", "..")]
        if not controllers:
            root, names = CGROUPS, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, names = CGROUPS / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folders += [(root.joinpath(*parts[:depth]), *names) for depth in range(len(parts), -1, -1)]
    return folders


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # not there, or not for us
        return ""


@cache
def libc() -> ctypes.CDLL:
    """Returns the C library; ``ctypes.get_errno()`` tells why one of these calls failed."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    library.renameat2.argtypes = [*(ctypes.c_int, ctypes.c_char_p) * 2, ctypes.c_uint]
    return library


def exchange_names(one: str, other: str) -> None:
    """Two files or folders of a file system swap names at once; OSError where none can (NFS)."""
    if libc().renameat2(
        _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE
    ):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), one, None, other)


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


def device_key(device: torch.device) -> str:
    """ "cpu", or a GPU's UUID."""
    if device.type != "cuda":
        return device.type
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def place_of(device: torch.device) -> str:
    """A device of any machine: "host/cpu", "host/GPU-..."."""
    return f"{socket.gethostname()}/{device_key(device)}"


@cache
def workers(purpose: str, most: int = 16) -> ThreadPoolExecutor:
    """The process's threads for one purpose; work that waits for other work needs another.

    They are kept: a new one each time would cost time, and another heap of its own.
    """
    return ThreadPoolExecutor(min(most, os.cpu_count() or 1), f"memsaver-{purpose}")


os.register_at_fork(after_in_child=workers.cache_clear)  # threads do not come along

_Lock = TypeVar("_Lock")
_forkable: weakref.WeakSet[Any] = weakref.WeakSet()


def forkable(lock: _Lock) -> _Lock:
    """Return the lock or condition, which will be free in a forked child: a thread that held it is
    not there to release it.
    """
    _forkable.add(lock)
    return lock


def _free_in_child() -> None:
    for lock in _forkable:
        lock._at_fork_reinit()  # as `logging` does


os.register_at_fork(after_in_child=_free_in_child)


Impl = Literal["auto", "torch", "triton"]


def use_triton(impl: Impl, device: torch.device) -> bool:
    """`auto` takes the Triton kernel on CUDA and the torch reference elsewhere."""
    if impl not in ("auto", "torch", "triton"):
        raise ValueError(f"unknown impl {impl!r}; use 'auto', 'torch' or 'triton'")
    return impl == "triton" or (impl == "auto" and device.type == "cuda")


@contextlib.contextmanager
def replaced(file: Path) -> Iterator[Path]:
    """Give a path to write to; it takes the place of ``file`` when the block ends.

    Whoever reads ``file`` finds what was there or all that was written, also after a power cut. A
    block that raises, or whose content does not get to the disk (``OSError``), leaves ``file`` as
    it was and nothing beside it.
    """
    partial = file.with_name(f".{file.name}.partial")
    try:
        partial.unlink(missing_ok=True)  # a link, perhaps, which writing would follow
        yield partial
        sync(partial)
        os.replace(partial, file)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    sync(file.parent)


def replace_text(file: Path, text: str) -> None:
    """``file`` holds ``text``, as UTF-8. See ``replaced``."""
    with replaced(file) as partial:
        partial.write_text(text, encoding="utf-8")


def sync(path: Path) -> None:
    """Puts on the disk what was written to a file, or which files a folder holds."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
