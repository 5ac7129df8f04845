"""The disk tier returns a page as it was stored under the present version, or a miss."""

from __future__ import annotations

import errno
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
from memsaver.content import on_disk
from tests.helpers.memory import open_files_in
from tests.helpers.peers import Peer
from tests.helpers.read_only_disk import read_only

PAGE = 5000  # bytes: a file of three blocks
FILE = 3 * 4096
KEYS = page_hashes(range(80), 4)


def tier(directory: Path, pages: int = 100, **fields: Any) -> DiskTier:
    fields = {"page_bytes": PAGE, "format": ("bf16", 2), "owner": "run 1", "version": 0} | fields
    return DiskTier(directory, pages * FILE, **fields)


def page(seed: int, nbytes: int = PAGE) -> torch.Tensor:
    return torch.randint(
        0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def stored(disk: DiskTier, *seeds: int) -> list[bool]:
    """Read pages and check their content; return which of them are hits."""
    hits = []
    for seed in seeds:
        into = torch.zeros(disk.page_bytes, dtype=torch.uint8)
        hits.append(disk.get(KEYS[seed], into))
        assert torch.equal(
            into, page(seed, disk.page_bytes) if hits[-1] else torch.zeros_like(into)
        )
    return hits


def filled(directory: Path, count: int, **fields: Any) -> DiskTier:
    disk = tier(directory, **fields)
    for seed in range(count):
        disk.put(KEYS[seed], page(seed))
    return disk


def file_of(directory: Path, seed: int) -> Path:
    return next(path for path in directory.iterdir() if KEYS[seed].hex() in path.name)


def failing(code: int) -> Callable[..., Any]:
    def fail(*arguments: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("nbytes", [1, 4095, 4096, PAGE, 3 << 20])
def test_pages_are_read_as_stored_and_files_are_closed(
    nbytes: int, direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not direct:
        monkeypatch.setattr(on_disk, "try_direct", lambda fd: False)
    disk = DiskTier(tmp_path, 10 << 20, page_bytes=nbytes, format="f", owner="o")
    before = open_files_in(tmp_path)
    for seed in (0, 1):
        disk.put(KEYS[seed], page(seed, nbytes))
    assert KEYS[0] in disk and KEYS[2] not in disk and len(disk) == 2
    assert stored(disk, 1, 0, 2) == [True, True, False]
    assert (
        disk.nbytes
        == sum(path.stat().st_size for path in tmp_path.iterdir())
        == 2 * disk.file_bytes
    )
    assert open_files_in(tmp_path) == before, "files stay open"


def test_least_recently_used_page_is_evicted_first(tmp_path: Path) -> None:
    disk = filled(tmp_path, 3, pages=3)
    assert stored(disk, 0) == [True]
    disk.put(KEYS[1], page(1))  # already stored, so this counts only as a use
    disk.put(KEYS[3], page(3))
    assert stored(disk, 0, 1, 2, 3) == [True, True, False, True]
    assert disk.nbytes == 3 * FILE and len(list(tmp_path.iterdir())) == 3
    with pytest.raises(ValueError, match="too small for a page"):
        DiskTier(tmp_path / "b", FILE - 1, page_bytes=PAGE, format="f", owner="o")


def test_raise_version_makes_all_pages_misses_without_file_access(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = filled(tmp_path, 3, pages=4)
    with monkeypatch.context() as patch:
        for name in ("unlink", "open", "replace", "rename"):
            patch.setattr(os, name, failing(errno.EIO))
        disk.raise_version(2)
    assert len(disk) == 0 and disk.nbytes == 3 * FILE
    assert stored(disk, 0, 1, 2) == [False] * 3
    disk.put(KEYS[5], page(5))
    disk.put(KEYS[6], page(6))  # evicts a page of the older version, not page 5
    assert stored(disk, 5, 6) == [True] * 2 and disk.nbytes == 4 * FILE
    disk.put(KEYS[0], page(0))
    assert stored(disk, 0, 5, 6) == [True] * 3
    assert len(list(tmp_path.iterdir())) == 4


def test_next_process_keeps_pages_in_order_of_use(tmp_path: Path) -> None:
    disk = filled(tmp_path, 3)
    for seed, seconds in ((1, 1), (0, 2), (2, 3)):
        os.utime(file_of(tmp_path, seed), (seconds, seconds))
    assert stored(disk, 1) == [True]
    with pytest.raises(BackendError, match="held by another disk tier"):
        tier(tmp_path)
    del disk  # has the same effect as `close`
    disk = tier(tmp_path, pages=2)
    assert stored(disk, 0, 1, 2) == [False, True, True] and disk.nbytes == 2 * FILE


@pytest.mark.parametrize(
    "changed",
    [{"owner": "run 2"}, {"format": ("fp8", 2)}, {"version": 1}, {"page_bytes": PAGE - 1}],
)
def test_pages_of_another_owner_format_or_version_are_never_served(
    changed: dict[str, Any], tmp_path: Path
) -> None:
    filled(tmp_path, 2, version=3 if "version" in changed else 0).close()
    disk = tier(tmp_path, **changed)
    assert len(disk) == disk.nbytes == 0 and list(tmp_path.iterdir()) == []
    if "version" in changed:
        disk.raise_version(3)  # version 3 of the earlier run had other weights
    assert stored(disk, 0) == [False]


@pytest.mark.parametrize(
    ("length", "flipped"),
    [
        *((length, None) for length in (0, 100, 4096, FILE - 4096, FILE - 1)),
        *((FILE, at) for at in (0, 9, 24, 30, 48, 60, 4096, 4096 + PAGE - 1)),
    ],
)
def test_damaged_file_is_deleted_and_a_miss(
    length: int, flipped: int | None, tmp_path: Path
) -> None:
    def damage() -> None:
        content = bytearray(file_of(tmp_path, 1).read_bytes()[:length])
        if flipped is not None:
            content[flipped] ^= 16
        file_of(tmp_path, 1).write_bytes(content)

    disk = filled(tmp_path, 3)
    damage()
    assert stored(disk, 0, 1, 2) == [True, False, True]
    assert len(list(tmp_path.iterdir())) == 2 and disk.nbytes == 2 * FILE, "the file is kept"
    disk.put(KEYS[1], page(1))
    assert stored(disk, 1) == [True]
    damage()
    disk.close()
    assert stored(tier(tmp_path), 0, 1, 2) == [True, False, True]


def test_foreign_files_stay_and_forged_pages_are_deleted(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "x.kvpage").write_bytes(b"x" * FILE)
    disk = filled(tmp_path, 2)
    assert not (tmp_path / "x.kvpage").exists()
    path = file_of(tmp_path, 0)
    # The second content is an intact page of other tokens.
    for content in (b"y" * FILE, file_of(tmp_path, 1).read_bytes()):
        path.write_bytes(content)
        assert stored(disk, 0) == [False]
        disk.put(KEYS[0], page(0))
    for seed in (0, 1):
        file_of(tmp_path, seed).unlink()
    assert stored(disk, 0, 1) == [False] * 2 and disk.nbytes == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "notes.txt"]


@pytest.mark.parametrize("operation", ["pwrite", "posix_fallocate", "replace"])
def test_put_on_a_full_disk_raises_and_keeps_other_pages(
    operation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, written, full = filled(tmp_path, 3), os.pwrite, failing(errno.ENOSPC)

    def first_block_still_fits(fd: int, data: Any, offset: int) -> int:
        return full() if offset else written(fd, data[:4096], 0)

    with monkeypatch.context() as patch:
        patch.setattr(os, operation, first_block_still_fits if operation == "pwrite" else full)
        with pytest.raises(BackendError, match=r"ENOSPC.*free some space.*stored before are kept"):
            disk.put(KEYS[3], page(3))
        assert (
            KEYS[3] not in disk and len(list(tmp_path.iterdir())) == 3 and disk.nbytes == 3 * FILE
        )
        assert stored(disk, 0, 1, 2) == [True] * 3
    disk.put(KEYS[3], page(3))
    assert stored(disk, 0, 1, 2, 3) == [True] * 4
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing(errno.EIO))
        assert stored(disk, 0) == [False]
    disk.put(KEYS[0], page(0))
    assert stored(disk, 0) == [True]


def test_read_only_file_system_loses_pages_but_still_serves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = filled(tmp_path, 4, pages=4)  # the whole budget
    with monkeypatch.context() as patch:
        read_only(patch, tmp_path)
        for seed in (4, 5):
            with pytest.raises(BackendError, match="EROFS"):
                disk.put(KEYS[seed], page(seed))
        file_of(tmp_path, 3).write_bytes(b"damaged")
        assert stored(disk, 1, 2, 3) == [True, True, False]
        assert disk.nbytes == 4 * FILE, "a file that can't be deleted is not counted"
        disk.clear()
        assert len(disk) == 0
    disk.put(KEYS[5], page(5))
    assert stored(disk, 0, 1, 5) == [False, False, True]
    assert disk.nbytes == FILE == sum(path.stat().st_size for path in tmp_path.iterdir())


def dying_put(pipe: Connection, directory: Path, when: str) -> None:
    """Fill a tier, and kill this process during the next put."""
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
def test_kill_during_put_loses_at_most_that_page(when: str, tmp_path: Path) -> None:
    peer = Peer(dying_put, tmp_path, when)
    assert peer.dies_within(100) and peer.process.exitcode == -signal.SIGKILL
    peer.bury()
    assert len(list(tmp_path.iterdir())) == 4
    disk = tier(tmp_path)
    assert stored(disk, 0, 1, 2, 3) == [True] * 3 + [when == "after the rename"]
    assert len(list(tmp_path.iterdir())) == len(disk), "the unfinished file is not deleted"


def test_page_hashes_differ_for_different_prefixes_and_never_change() -> None:
    hashes = page_hashes([1, 2, 3, 4, 5, 6, 7], 2)
    assert len(hashes) == 3 and len({len(page_hash) for page_hash in hashes}) == 1
    assert page_hashes([1, 2, 3, 4], 2) == hashes[:2], "a hash depends on later tokens"
    assert page_hashes([9, 2, 3, 4], 2)[1] != hashes[1], "a hash ignores earlier tokens"
    assert page_hashes([3, 4], 2)[0] != hashes[1]
    assert page_hashes([1, 2, 3, 4], 4)[0] != hashes[1]
    names = [page_hashes([1, 2], 2, namespace)[0] for namespace in (None, "None", 1, "1", "", True)]
    assert len(set(names)) == len(names)
    assert page_hashes([1, 2], 2)[0].hex() == "3818512af8f3d399731a3efefafc6e18", (
        "the hashes have changed, so pages on disks are lost"
    )
    with pytest.raises(ValueError, match="a namespace of tiers is a str, an int or None"):
        page_hashes([1], 1, ("lora",))
