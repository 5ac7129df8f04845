"""Replace files atomically; locate the user's cache folder."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Yield a path to write to, which replaces ``file`` when the block ends.

    A reader of ``file`` sees either the old or the complete new content, even after a power cut. If
    the block raises, or the content cannot be flushed to the disk (``OSError``), ``file`` is
    unchanged and the partial file is removed.
    """
    partial = file.with_name(f".{file.name}.partial")
    try:
        partial.unlink(missing_ok=True)  # it may be a link, which writing would follow
        yield partial
        sync(partial)
        os.replace(partial, file)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    sync(file.parent)


def replace_text(file: Path, text: str) -> None:
    """Replace the content of ``file`` by ``text`` in UTF-8, atomically as by ``replacing``."""
    with replacing(file) as partial:
        partial.write_text(text, encoding="utf-8")


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's list of files, to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cache_dir() -> Path:
    """Return the folder of this package in the user's XDG cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memsaver"
