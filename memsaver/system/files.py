"""Replace files as a whole; where files of a user are kept."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replaced(file: Path) -> Iterator[Path]:
    """Give a path to write to; it takes the place of ``file`` when the block ends.

    Whoever reads ``file`` finds what was there or all that was written, also after a power cut. A
    block that raises, or whose content does not get to the disk (``OSError``), leaves ``file`` as
    it was and nothing beside it.
    """
    partial = file.with_name(f".{file.name}.partial")
    try:
        partial.unlink(missing_ok=True)  # a link, perhaps, which writing would follow
        yield partial
        sync(partial)
        os.replace(partial, file)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    sync(file.parent)


def replace_text(file: Path, text: str) -> None:
    """``file`` holds ``text``, as UTF-8. See ``replaced``."""
    with replaced(file) as partial:
        partial.write_text(text, encoding="utf-8")


def sync(path: Path) -> None:
    """Put on the disk what was written to a file, or which files a folder holds."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cache_dir() -> Path:
    """Return where libraries built on first use are kept (XDG cache of the user)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memsaver"
