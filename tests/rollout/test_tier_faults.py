"""Faults of host and disk tiers cost recomputation and are logged, but never change answers."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from rollout import Engine
from tests.helpers.rollout.answers import check, random_prompts, run, spent
from tests.helpers.rollout.tiers import blocks_of, out_of_memory, tiered
from tests.helpers.rollout.updates import tiny


def full(*arguments: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def with_disk(path: Path, directory: Path) -> Engine:
    return tiered(path, host_ratio=1.0, disk_directory=directory, disk_bytes=1 << 24)


@pytest.mark.parametrize("fault", ["torn", "foreign", "gone", "full"])
def test_faulty_disk_pages_are_recomputed_and_logged(
    path: Path,
    tmp_path: Path,
    fault: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = with_disk(path, tmp_path)
    prompts = random_prompts((80, 100, 100, 100), seed=3)
    if fault == "full":
        monkeypatch.setattr(os, "posix_fallocate", full)
    for prompt in prompts:
        run(engine, [prompt])
    files = sorted(tmp_path.glob("*.kvpage"))
    assert bool(files) == (fault != "full")
    foreign = {file: files[i - 1].read_bytes() for i, file in enumerate(files)}
    for file in files:
        if fault == "torn":
            os.truncate(file, 4096)
        elif fault == "foreign":
            file.write_bytes(foreign[file])  # a whole page of other tokens
        elif fault == "gone":
            file.unlink()
    for prompt in prompts:
        check(tiny(0), [prompt], [run(engine, [prompt])])
    reasons = {
        "torn": "the file ends too early",
        "foreign": "key or checksum differ",
        "gone": "ENOENT",
        "full": "ENOSPC",
    }
    assert reasons[fault] in caplog.text and "will be computed again" in caplog.text


def test_files_of_an_earlier_engine_are_deleted_and_not_hit(path: Path, tmp_path: Path) -> None:
    prompts = random_prompts((80, 100, 100, 100), seed=3)
    first = with_disk(path, tmp_path)
    for prompt in prompts:
        run(first, [prompt])
    left = set(tmp_path.glob("*.kvpage"))
    assert left
    with pytest.raises(RuntimeError, match="is held by another disk tier"):
        with_disk(path, tmp_path)
    disk = blocks_of(first).tiers.lower.disk
    assert disk is not None
    disk.close()
    second = with_disk(path, tmp_path)
    assert not left & set(tmp_path.glob("*.kvpage"))
    assert spent(second, prompts[:1]) == (80 + 7, 0)


def test_failed_copies_to_the_host_are_logged_and_change_no_answer(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = tiered(path)
    prompts = random_prompts((80, 100, 100, 100), seed=3)
    monkeypatch.setattr(
        blocks_of(engine).tiers.lower.host, "backup_from_device_all_layer", out_of_memory
    )
    for prompt in prompts * 2:
        check(tiny(0), [prompt], [run(engine, [prompt])])
    assert "not kept below the device: no room" in caplog.text and engine.stats.loaded_tokens == 0
