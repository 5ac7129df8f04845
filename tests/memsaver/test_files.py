"""Atomic replacement of files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from memsaver.system.files import replace_text, replacing


def test_file_is_replaced_after_its_content_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The order of the calls decides the file's content after a power failure.
    file, done = tmp_path / "file", list[str]()
    file.write_text("old")
    synced, moved = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        done.append(
            f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}, {file.read_text()}"
        )
        synced(descriptor)

    def replace(source: Path, target: Path) -> None:
        done.append(f"replace {target.name}")
        moved(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    replace_text(file, "new")
    assert done == ["sync .file.partial, old", "replace file", f"sync {tmp_path.name}, new"]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_error_keeps_old_file_and_leaves_no_partial_file(
    tmp_path: Path, error: BaseException
) -> None:
    file = tmp_path / "file"
    replace_text(file, "old")
    with pytest.raises(type(error)), replacing(file) as partial:
        partial.write_text("half")
        raise error
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]
    with pytest.raises(FileNotFoundError), replacing(file):
        pass  # write nothing
    assert file.read_text() == "old"
