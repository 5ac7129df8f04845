"""Available host memory by the machine, the container, and Ray's reserve."""

from __future__ import annotations

from pathlib import Path

import pytest

from memsaver.system import host_memory

GIB = 1 << 30


def write_group(folder: Path, limit: str, used: int, cache: int, v1: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(f"{limit}\n")
    (folder / ("memory.usage_in_bytes" if v1 else "memory.current")).write_text(f"{used}\n")
    key = "total_inactive_file" if v1 else "inactive_file"
    (folder / "memory.stat").write_text(
        f"anon 5\ninactive_file {cache if key == 'inactive_file' else 1}\n{key} {cache}\n"
    )


@pytest.mark.parametrize("v1", [False, True])
@pytest.mark.parametrize("path_of", ["own", "outside"])
def test_available_memory_respects_tightest_group(
    v1: bool, path_of: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With "outside", the path is the host's: a container sees its own group as the root.

    def available() -> int:
        """Return the available bytes, including Ray's reserve."""
        group = host_memory.container_memory()
        total = 16 * GIB if group is None else min(16 * GIB, group.limit)
        return host_memory.available_memory() + int(host_memory.RAY_KEEPS * total)

    path = "/../pods/one" if path_of == "outside" else "/pods/one"
    (tmp_path / "self").write_text(
        f"5:cpu,cpuacct:/x\n4:hugetlb,memory:{path}\n0::/\n" if v1 else f"0::{path}\n"
    )
    kib = 1 << 20
    (tmp_path / "meminfo").write_text(
        f"MemTotal: {16 * kib} kB\nMemFree: 5 kB\nMemAvailable: {8 * kib} kB\nHugePages_Total: 0\n"
    )
    monkeypatch.setattr(host_memory, "MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(host_memory, "CGROUPS", tmp_path / "groups")
    monkeypatch.setattr(host_memory, "CGROUP_OF_SELF", tmp_path / "self")
    assert host_memory.container_memory() is None and available() == 8 * GIB  # no files
    root = tmp_path / "groups" / ("memory" if v1 else "")
    write_group(root, "9223372036854771712" if v1 else "max", 0, 0, v1)
    assert host_memory.container_memory() is None
    if path_of == "own":
        write_group(root / "pods" / "one", str(32 * GIB), 0, 0, v1)
        assert available() == 8 * GIB
    limited = root / "pods" if path_of == "own" else root
    write_group(limited, str(4 * GIB), 3 * GIB, 2 * GIB, v1)
    assert host_memory.container_memory() == (4 * GIB, GIB) and available() == 3 * GIB
    write_group(limited, str(4 * GIB), 3 * GIB, 0, v1)
    assert available() == GIB
    if path_of == "own":  # other groups have filled the parent group
        write_group(root / "pods" / "one", str(2 * GIB), 1 << 20, 0, v1)
        assert available() == GIB
