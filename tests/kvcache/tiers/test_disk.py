"""The disk tier: what comes back is what was stored under this version, or nothing."""

from __future__ import annotations

import errno
import gc
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcache.tiers import DiskTier, page_hashes
from memsaver import BackendError
from memsaver.backup import disk_file
from tests.helpers.memory import open_files_in
from tests.helpers.peers import Peer

PAGE = 5000  # bytes: a file of three blocks
FILE = 3 * 4096
KEYS = page_hashes(range(80), 4)


def tier(directory: Path, pages: int = 100, **fields: Any) -> DiskTier:
    fields = {"page_bytes": PAGE, "format": ("bf16", 2), "owner": "run 1", "version": 0} | fields
    return DiskTier(directory, pages * FILE, **fields)


def page(seed: int, nbytes: int = PAGE) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def got(disk: DiskTier, key: bytes) -> torch.Tensor | None:
    into = torch.zeros(disk.page_bytes, dtype=torch.uint8)
    if disk.get(key, into):
        return into
    assert not into.any(), "a miss wrote something"
    return None


def is_stored(disk: DiskTier, seed: int) -> bool:
    """Page `seed` is there and what it was, or it is not there."""
    found = got(disk, KEYS[seed])
    assert found is None or torch.equal(found, page(seed))
    return found is not None


def filled(directory: Path, count: int, **fields: Any) -> DiskTier:
    disk = tier(directory, **fields)
    for seed in range(count):
        disk.put(KEYS[seed], page(seed))
    return disk


def file_of(directory: Path, key: bytes) -> Path:
    return next(path for path in directory.iterdir() if key.hex() in path.name)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("nbytes", [1, 4095, 4096, PAGE, 3 << 20])
def test_round_trip(nbytes: int, direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not direct:
        monkeypatch.setattr(disk_file, "try_direct", lambda fd: False)
    disk = DiskTier(tmp_path, 10 << 20, page_bytes=nbytes, format="f", owner="o")
    disk.put(KEYS[0], page(0, nbytes))
    disk.put(KEYS[1], page(1, nbytes))
    assert KEYS[0] in disk and KEYS[2] not in disk and len(disk) == 2
    for seed in (1, 0):
        found = got(disk, KEYS[seed])
        assert found is not None and torch.equal(found, page(seed, nbytes))
    assert got(disk, KEYS[2]) is None
    assert disk.nbytes == sum(path.stat().st_size for path in tmp_path.iterdir()) == 2 * disk.file_bytes


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    disk = filled(tmp_path, 3, pages=3)
    assert is_stored(disk, 0)
    disk.put(KEYS[1], page(1))  # there already: used, not stored again
    disk.put(KEYS[3], page(3))
    assert [is_stored(disk, seed) for seed in range(4)] == [True, True, False, True]
    assert disk.nbytes == 3 * FILE and len(list(tmp_path.iterdir())) == 3
    with pytest.raises(ValueError, match="holds no page"):
        DiskTier(tmp_path / "b", FILE - 1, page_bytes=PAGE, format="f", owner="o")


def test_a_raised_version_makes_everything_a_miss(tmp_path: Path) -> None:
    disk = filled(tmp_path, 3, pages=4)
    disk.raise_version(2)
    assert len(disk) == 0 and disk.nbytes == 3 * FILE
    assert not any(is_stored(disk, seed) for seed in range(3))
    with pytest.raises(ValueError, match="only grow"):
        disk.raise_version(2)
    disk.put(KEYS[5], page(5))
    disk.put(KEYS[6], page(6))  # what is old makes room, not page 5
    assert is_stored(disk, 5) and is_stored(disk, 6) and disk.nbytes == 4 * FILE
    disk.put(KEYS[0], page(0))
    assert [is_stored(disk, seed) for seed in (0, 5, 6)] == [True] * 3
    assert len(list(tmp_path.iterdir())) == 4


def test_raising_the_version_touches_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = filled(tmp_path, 3)

    def refuse(*arguments: object, **others: object) -> None:
        raise AssertionError("a file was touched")

    for name in ("unlink", "open", "replace", "rename"):
        monkeypatch.setattr(os, name, refuse)
    disk.raise_version(1)


def test_the_next_process_goes_on_in_order_of_use(tmp_path: Path) -> None:
    disk = filled(tmp_path, 3)
    for seed, seconds in ((1, 1), (0, 2), (2, 3)):
        os.utime(file_of(tmp_path, KEYS[seed]), (seconds, seconds))
    assert is_stored(disk, 1)
    disk.close()
    disk = tier(tmp_path, pages=2)
    assert [is_stored(disk, seed) for seed in range(3)] == [False, True, True] and disk.nbytes == 2 * FILE


@pytest.mark.parametrize(
    "changed", [{"owner": "run 2"}, {"format": ("fp8", 2)}, {"version": 1}, {"page_bytes": PAGE - 1}]
)
def test_another_owner_format_or_version_is_never_served(changed: dict[str, Any], tmp_path: Path) -> None:
    filled(tmp_path, 2, version=3 if "version" in changed else 0).close()
    disk = tier(tmp_path, **changed)
    assert len(disk) == disk.nbytes == 0 and list(tmp_path.iterdir()) == []
    if "version" in changed:
        disk.raise_version(3)  # the other run's version 3 was of other weights
    assert got(disk, KEYS[0]) is None


def flip(at: int) -> Callable[[Path], None]:
    def flipped(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[at] ^= 16
        path.write_bytes(content)

    return flipped


def cut(length: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, length)


@pytest.mark.parametrize(
    "damage",
    [
        *(cut(length) for length in (0, 100, 4096, FILE - 4096, FILE - 1)),
        *(flip(at) for at in (0, 9, 24, 30, 48, 60, 4096, 4096 + PAGE - 1)),
    ],
)
def test_a_damaged_file_is_a_miss(damage: Callable[[Path], None], tmp_path: Path) -> None:
    disk = filled(tmp_path, 3)
    damage(file_of(tmp_path, KEYS[1]))
    assert [is_stored(disk, seed) for seed in range(3)] == [True, False, True]
    assert len(list(tmp_path.iterdir())) == 2 and disk.nbytes == 2 * FILE, "it was not removed"
    disk.put(KEYS[1], page(1))
    assert is_stored(disk, 1)
    damage(file_of(tmp_path, KEYS[1]))
    disk.close()
    disk = tier(tmp_path)
    assert [is_stored(disk, seed) for seed in range(3)] == [True, False, True]


def test_foreign_files(tmp_path: Path) -> None:
    """Files that are no pages stay; those that pretend to be one are not believed."""
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "x.kvpage").write_bytes(b"x" * FILE)
    disk = filled(tmp_path, 2)
    assert not (tmp_path / "x.kvpage").exists()
    path = file_of(tmp_path, KEYS[0])
    path.write_bytes(b"y" * FILE)
    assert not is_stored(disk, 0)
    disk.put(KEYS[0], page(0))
    path.write_bytes(file_of(tmp_path, KEYS[1]).read_bytes())  # a good page, of other tokens
    assert not is_stored(disk, 0)
    file_of(tmp_path, KEYS[1]).unlink()
    assert not is_stored(disk, 1) and disk.nbytes == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "notes.txt"]


@pytest.mark.parametrize("operation", ["pwrite", "posix_fallocate", "replace"])
def test_a_full_disk_is_told_and_the_cache_goes_on(
    operation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = filled(tmp_path, 3)
    written = os.pwrite

    def full(*arguments: Any) -> int:
        if operation == "pwrite" and arguments[2] == 0:
            return written(arguments[0], arguments[1][:4096], 0)  # the first block still fits
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, operation, full)
        with pytest.raises(BackendError, match=r"ENOSPC.*free some space.*stored before are still there"):
            disk.put(KEYS[3], page(3))
        assert KEYS[3] not in disk and len(list(tmp_path.iterdir())) == 3 and disk.nbytes == 3 * FILE
        assert all(is_stored(disk, seed) for seed in range(3))
    disk.put(KEYS[3], page(3))
    assert all(is_stored(disk, seed) for seed in range(4))


def test_a_failing_read_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = filled(tmp_path, 1)

    def broken(*arguments: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", broken)
        assert not is_stored(disk, 0)
    disk.put(KEYS[0], page(0))
    assert is_stored(disk, 0)


def dying_put(pipe: Connection, directory: Path, when: str) -> None:
    """In a process of its own."""
    disk = filled(directory, 3)
    written, renamed = os.pwrite, os.replace

    def pwrite(fd: int, data: Any, offset: int) -> int:
        if when == "first block":
            written(fd, data[:4096], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return written(fd, data, offset)

    def replace(old: Path, new: Path) -> None:
        if when == "after the rename":
            renamed(old, new)
        os.kill(os.getpid(), signal.SIGKILL)

    os.pwrite, os.replace = pwrite, replace  # type: ignore[assignment]
    disk.put(KEYS[3], page(3))


@pytest.mark.parametrize("when", ["first block", "before the rename", "after the rename"])
def test_killed_during_put(when: str, tmp_path: Path) -> None:
    peer = Peer(dying_put, tmp_path, when)
    assert peer.dies_within(100) and peer.process.exitcode == -signal.SIGKILL
    peer.bury()
    assert len(list(tmp_path.iterdir())) == 4
    disk = tier(tmp_path)
    assert [is_stored(disk, seed) for seed in range(4)] == [True] * 3 + [when == "after the rename"]
    assert len(list(tmp_path.iterdir())) == len(disk), "the unfinished file is still there"


def test_one_holder_a_directory(tmp_path: Path) -> None:
    disk = filled(tmp_path, 1)
    with pytest.raises(BackendError, match="held by another disk tier"):
        tier(tmp_path)
    assert is_stored(disk, 0)
    del disk
    gc.collect()
    assert is_stored(tier(tmp_path), 0)


def test_nothing_stays_open(tmp_path: Path) -> None:
    disk = filled(tmp_path, 1)
    before = open_files_in(tmp_path)
    for seed in range(20):
        disk.put(KEYS[seed], page(seed))
        assert is_stored(disk, seed)
    assert open_files_in(tmp_path) == before


def test_wrong_pages(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a page is uint8 \[5000\]"):
        tier(tmp_path).put(KEYS[0], page(0, 4999))


def test_hashes_tell_prefixes_apart() -> None:
    one = page_hashes([1, 2, 3, 4, 5, 6, 7], 2)
    assert len(one) == 3 and len({len(each) for each in one}) == 1
    assert page_hashes([1, 2, 3, 4], 2) == one[:2], "a hash depends on what follows"
    assert page_hashes([9, 2, 3, 4], 2)[1] != one[1], "a hash does not depend on what precedes"
    assert page_hashes([3, 4], 2)[0] != one[1]
    assert page_hashes([1, 2, 3, 4], 4)[0] != one[1]
    names = [page_hashes([1, 2], 2, namespace)[0] for namespace in (None, "None", 1, "1", "", True)]
    assert len(set(names)) == len(names)
    assert page_hashes([1, 2], 2)[0].hex() == FIRST, "hashes changed: pages on disks are lost"
    with pytest.raises(ValueError, match="a namespace of tiers is a str, an int or None"):
        page_hashes([1], 1, ("lora",))


FIRST = "3818512af8f3d399731a3efefafc6e18"
