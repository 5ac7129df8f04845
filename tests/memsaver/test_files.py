"""Files are replaced whole, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from memsaver.system.files import replace_text, replaced


def test_a_file_is_replaced_after_its_content_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order is what a power cut would show; nothing else can be seen of it here."""
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
def test_an_error_leaves_the_file_and_nothing_beside_it(
    tmp_path: Path, error: BaseException
) -> None:
    file = tmp_path / "file"
    replace_text(file, "old")
    with pytest.raises(type(error)), replaced(file) as partial:
        partial.write_text("half")
        raise error
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]
    with pytest.raises(FileNotFoundError), replaced(file):
        pass  # nothing was written
    assert file.read_text() == "old"
