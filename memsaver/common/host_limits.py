"""Tells how much memory of the machine this process may have: the machine's own, its container's,
and what Ray lets live.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

CGROUPS = Path("/sys/fs/cgroup")
CGROUP_OF_SELF = Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")

_NO_LIMIT = 1 << 60  # cgroup v1 writes "no limit" as a number above this
RAY_KEEPS = 0.05  # of the memory: Ray's monitor kills workers when less is free


def available_memory() -> int:
    """Bytes that can be taken now, past no limit, and with Ray's memory monitor killing nobody."""
    total, free = meminfo("MemTotal"), meminfo("MemAvailable")
    if (group := container_memory()) is not None and group.limit < total:
        total, free = group.limit, min(free, group.limit - group.used)
    return max(0, free - int(RAY_KEEPS * total))


class Group(NamedTuple):
    """The tightest memory limit above this process, and what counts against it (no file cache)."""

    limit: int
    used: int


def container_memory() -> Group | None:
    """The limit of the control groups (v2 or v1) that this process is in, if any."""
    groups = []
    for folder, limit_name, used_name in _memory_folders():
        text = _read(folder / limit_name)
        if text.isdigit() and int(text) < _NO_LIMIT:
            used = int(_read(folder / used_name) or 0)
            stat = dict(line.split()[:2] for line in _read(folder / "memory.stat").splitlines())
            cache = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
            groups.append(Group(int(text), max(0, used - cache)))
    return min(groups, default=None)


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


def meminfo(key: str) -> int:
    """Bytes of one line of /proc/meminfo."""
    for line in MEMINFO.read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(f"{MEMINFO} has no {key}")
