"""Content on disk is bit-identical, takes constant memory, and leaves no file behind."""

from __future__ import annotations

import errno
import gc
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

import memsaver
from memsaver.content import on_disk
from memsaver.content import on_disk as disk
from memsaver.ops.layout import cut, joined
from tests.helpers.memory import open_files_in
from tests.helpers.peers import Peer

MIB = 1 << 20


def fill(saver: memsaver.MemorySaver, *sizes: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(len(sizes))
    pieces = [saver.empty(size, torch.uint8, tag="kept", content="disk") for size in sizes]
    for piece in pieces:
        piece.copy_(torch.randint(0, 256, (len(piece),), dtype=torch.uint8, generator=generator))
    return pieces


@pytest.mark.parametrize("direct", [True, False])
def test_disk_content_is_bit_identical_over_chunks_holes_and_odd_sizes(
    direct: bool, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "CHUNK", MIB)
    if not direct:
        monkeypatch.setattr(on_disk, "try_direct", lambda fd: False)
    saver = memsaver.MemorySaver(device, disk_dir=tmp_path)
    pieces = fill(saver, 3 * MIB + 17, 1, 5, 64 * 1024, 2 * MIB, 999)
    expected = [piece.clone() for piece in pieces]
    del pieces[3], expected[3]  # a hole
    gc.collect()
    addresses = [piece.data_ptr() for piece in pieces]
    committed = set()
    for _ in range(4):
        saver.pause()
        committed.add(saver.pinned_arena.committed_bytes)
        report = saver.report().tags["kept"]
        assert (
            report.committed_bytes == 0
            and report.disk_bytes == -(-sum(map(len, pieces)) // 4096) * 4096
        )
        assert report.backup_bytes <= 8 * MIB and open_files_in(tmp_path) == 1
        assert list(tmp_path.iterdir()) == [], "the file has a name"
        saver.resume()
        assert all(torch.equal(a, b) for a, b in zip(pieces, expected, strict=True))
        assert [piece.data_ptr() for piece in pieces] == addresses
        gc.collect()
        assert (saver.report().tags["kept"].disk_bytes, open_files_in(tmp_path)) == (0, 0)
    assert len(committed) == 1, "further cycles take no more memory"


FAILURES = {
    "posix_fallocate": (errno.ENOSPC, "ENOSPC.*disk_dir.*nothing was changed"),
    "pwrite": (errno.EIO, "EIO"),
    "preadv": (errno.EIO, "EIO"),
}


@pytest.mark.parametrize("call", FAILURES)
def test_drive_error_is_raised_and_loses_no_content(
    call: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = memsaver.MemorySaver(device, disk_dir=tmp_path)
    (piece,) = fill(saver, 20 * MIB)
    expected, used = piece.clone(), saver.pinned_arena.used_bytes
    number, message = FAILURES[call]

    def broken(*arguments: object) -> int:
        raise OSError(number, os.strerror(number))

    saver.mark_clean("kept", 1)
    if call == "preadv":
        saver.pause()
    with monkeypatch.context() as patch:
        patch.setattr(os, call, broken)
        with pytest.raises(memsaver.BackendError, match=message):
            saver.resume() if call == "preadv" else saver.pause()
    gc.collect()
    assert saver.is_paused("kept") == (call == "preadv") == open_files_in(tmp_path)
    assert saver.is_paused("kept") or saver.pinned_arena.used_bytes == used
    saver.check_integrity()
    saver.resume()
    assert torch.equal(piece, expected)
    saver.mark_clean("kept", 1)
    saver.pause()  # content that was not written must not count as saved
    saver.resume()
    assert torch.equal(piece, expected)


def test_pause_fails_when_disk_dir_is_missing(tmp_path: Path) -> None:
    saver = memsaver.MemorySaver("cpu", disk_dir=tmp_path / "missing")
    fill(saver, 100)
    with pytest.raises(memsaver.BackendError, match="missing.*ENOENT"):
        saver.pause()
    assert not saver.is_paused("kept")


def _die_in_the_middle(pipe: Connection, folder: Path) -> None:
    saver = memsaver.MemorySaver("cpu", disk_dir=folder)
    tensor = saver.empty(64 * MIB, torch.uint8, tag="kept", content="disk").fill_(1)
    written = os.pwrite

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        if offset > 30 * MIB:
            os.kill(os.getpid(), signal.SIGKILL)
        return written(fd, data, offset)

    os.pwrite = pwrite
    saver.pause()
    pipe.send(len(tensor))  # not reached


def test_process_killed_while_saving_leaves_no_file(tmp_path: Path) -> None:
    peer = Peer(_die_in_the_middle, tmp_path)
    assert peer.dies_within(60) and peer.process.exitcode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []
    peer.bury()


def test_disk_file_has_no_name_on_a_file_system_without_o_tmpfile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = os.open

    def refuse(path: object, flags: int, *more: object, **options: object) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return original(path, flags, *more, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)
    file = on_disk.DiskFile(tmp_path, 4096)
    assert list(tmp_path.iterdir()) == []
    file.write(memoryview(b"x" * 4096), 0) if not file.direct else None


def test_ranges_are_joined_and_cut() -> None:
    assert joined([(0, 4), (4, 6), (12, 1)]) == [(0, 10), (12, 1)]
    assert list(cut([(0, 4), (4, 6), (12, 5)], 4)) == [
        (0, [(0, 4)]), (4, [(4, 4)]), (8, [(8, 2), (12, 2)]), (12, [(14, 3)])
    ]  # fmt: skip
    assert list(cut([], 4)) == []
    assert len(list(cut([(0, 1 << 40)], 1 << 30))) == 1024, "must not visit single bytes"


@pytest.mark.parametrize("content", ["host", "disk"])
def test_pause_that_lacks_host_memory_keeps_none(
    content: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "CHUNK", MIB)
    saver = memsaver.MemorySaver(device, disk_dir=tmp_path)
    (tensor,) = fill(saver, 8 * MIB)
    expected, arena = tensor.clone(), saver.pinned_arena
    gc.collect()
    arena.trim()
    # Segments that other savers of this process use may have room, which the pause must not find.
    filler = arena.take(spare) if (spare := arena.committed_bytes - arena.used_bytes) else []
    used, held = arena.used_bytes, arena.committed_bytes
    monkeypatch.setattr(arena, "budget_bytes", held + 4 * MIB)
    for _ in range(3):
        with pytest.raises(memsaver.HostMemoryError, match="nothing was changed"):
            saver.pause(content=content)
        assert arena.used_bytes == used and not saver.is_paused("kept")
    arena.budget_bytes = held + 16 * MIB
    saver.pause(content=content)
    saver.resume()
    assert torch.equal(tensor, expected)
    del filler


@pytest.mark.parametrize("content", ["host", "disk"])
def test_tensor_that_dies_while_paused_is_trimmed_and_not_restored(
    content: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "CHUNK", MIB)
    saver = memsaver.MemorySaver(device, disk_dir=tmp_path)
    pieces = [
        saver.empty(4 * MIB, torch.uint8, tag="kept", content=content).fill_(n + 1)
        for n in range(2)
    ]
    saver.pause()
    del pieces[1]
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
    saver.trim()
    saver.resume()
    assert saver.report().tags["kept"].committed_bytes == 4 * MIB and bool((pieces[0] == 1).all())
