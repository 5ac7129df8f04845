"""Compute how much host memory the machine, containers and Ray leave to this process."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import psutil

CGROUPS = Path("/sys/fs/cgroup")
CGROUP_OF_SELF = Path("/proc/self/cgroup")
_NO_LIMIT = 1 << 60  # cgroup v1 writes "no limit" as a number above this
RAY_KEEPS = 0.05  # share of the memory; Ray's monitor kills workers when less is free


def available_memory() -> int:
    """Return the bytes that can be taken now within every limit, including Ray's monitor's."""
    memory = psutil.virtual_memory()
    total, free = memory.total, memory.available
    if (group := container_memory()) is not None:
        total, free = min(total, group.limit), min(free, group.free)
    return max(0, free - int(RAY_KEEPS * total))


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
    try:
        return path.read_text().strip()
    except OSError:  # missing, or not readable
        return ""
