"""Compute how much host memory the machine, containers and Ray leave to this process."""

import os
from pathlib import Path
from typing import NamedTuple

MEMORY = Path("/proc/meminfo")
CGROUPS = Path("/sys/fs/cgroup")
CGROUP_OF_SELF = Path("/proc/self/cgroup")
_NO_LIMIT = 1 << 60  # cgroup v1 writes "no limit" as a number above this
_open: dict[Path, int] = {}  # descriptors
RAY_KEEPS = 0.05  # share of the memory; Ray's monitor kills workers when less is free


def available_memory() -> int:
    """Return the bytes that can be taken now within every limit, including Ray's monitor's."""
    total, free = _machine_memory()
    if (group := container_memory()) is not None:
        total, free = min(total, group.limit), min(free, group.free)
    return max(0, free - int(RAY_KEEPS * total))


def total_memory() -> int:
    """Return the bytes of the machine, or of the container if it may have fewer."""
    total, group = _machine_memory()[0], container_memory()
    return total if group is None else min(total, group.limit)


def _machine_memory() -> tuple[int, int]:
    """Return the bytes of the machine, and those that are available."""
    lines = (line.split() for line in _read(MEMORY).splitlines())
    sizes = {line[0]: int(line[1]) << 10 for line in lines}
    return sizes["MemTotal:"], sizes["MemAvailable:"]


class Group(NamedTuple):
    """Memory limit of a control group, and its use without file cache, in bytes."""

    limit: int
    used: int

    @property
    def free(self) -> int:
        return self.limit - self.used


def container_memory() -> Group | None:
    """Return the control group (v2 or v1) of this process that has the least memory left."""
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
    """Return (folder, limit file, usage file) of this process's group and of all above it."""
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
    """Read a file that stays open: a pause must succeed where no descriptor is left."""
    try:
        if path not in _open:
            _open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return os.pread(_open[path], 1 << 16, 0).decode().strip()
    except OSError:  # missing, or not readable
        return ""


def _close_in_child() -> None:
    for descriptor in _open.values():  # the files of /proc/self are the parent's
        os.close(descriptor)
    _open.clear()


os.register_at_fork(after_in_child=_close_in_child)
