"""File systems that become read-only."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

_WRITES = os.O_CREAT | os.O_WRONLY | os.O_RDWR


def read_only(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Refuse to change files below a folder, like a file system that has become read-only.

    A mode of the folder would not stop a superuser.
    """
    opened = os.open

    def refuse(path: Any) -> None:
        if Path(os.fspath(path)).is_relative_to(folder):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    def open_to_read(path: Any, flags: int, *rest: Any, **names: Any) -> int:
        if flags & _WRITES:
            refuse(path)
        return opened(path, flags, *rest, **names)

    patch.setattr(os, "open", open_to_read)
    for name in ("unlink", "replace", "rename", "mkdir", "utime"):
        patch.setattr(os, name, _refusing(getattr(os, name), refuse))


def _refusing(function: Any, refuse: Any) -> Any:
    def call(path: Any, *rest: Any, **names: Any) -> Any:
        refuse(path)
        return function(path, *rest, **names)

    return call
