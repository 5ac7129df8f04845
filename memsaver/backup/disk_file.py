"""A file without a name: its space is there before it is written, and the kernel frees it when the process ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path

from memsaver.errors import BackendError, format_bytes
from memsaver.rounding import round_up

BLOCK = 4096  # bytes: what direct I/O wants addresses, offsets and lengths to be multiples of
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT)


def default_directory() -> Path:
    """Where large files may lie: /var/tmp is on disk where /tmp is often memory."""
    lasting = Path("/var/tmp")
    return lasting if os.access(lasting, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())


class DiskFile:
    """``nbytes`` (rounded up to BLOCK) in ``directory``; direct I/O where the file system has it."""

    def __init__(self, directory: Path, nbytes: int) -> None:
        self.nbytes = round_up(nbytes, BLOCK)
        self._directory = directory
        with self._explained("making a file for saved content"):
            self._fd = _open(directory)
            weakref.finalize(self, os.close, self._fd).atexit = False
            self.direct = _try_direct(self._fd)
            if self.nbytes:
                os.posix_fallocate(self._fd, 0, self.nbytes)

    def write(self, buffer: memoryview, offset: int) -> None:
        """All of ``buffer``, a multiple of BLOCK, at ``offset``."""
        with self._explained("saving content"):
            done = 0
            while done < len(buffer):
                done += os.pwrite(self._fd, buffer[done:], offset + done)

    def read(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer``, a multiple of BLOCK, from ``offset``."""
        with self._explained("reading saved content"):
            done = 0
            while done < len(buffer):
                got = os.preadv(self._fd, [buffer[done:]], offset + done)
                if not got:
                    raise OSError(errno.EIO, "the file ends too early")
                done += got

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            name = errno.errorcode.get(error.errno or 0, "?")
            raise BackendError(
                f"{what} in {self._directory} failed: {name} ({error.strerror}), {format_bytes(self.nbytes)}; free "
                f"some space, pass another disk_dir, or use content='host'; nothing was changed"
            ) from error


def _open(directory: Path) -> int:
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in _NO_TMPFILE or not directory.is_dir():
            raise
    fd, name = tempfile.mkstemp(prefix="memsaver-", dir=directory)  # NFS, some overlays
    os.unlink(name)
    return fd


def _try_direct(fd: int) -> bool:
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError:  # tmpfs of older kernels
        return False
    return True
