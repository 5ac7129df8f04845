"""Files of whole blocks, whose space is there before it is written, with direct I/O where the file
system has it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path

from memsaver.common.rounding import round_up
from memsaver.errors import BackendError, format_bytes

BLOCK = 4096  # bytes: what direct I/O wants addresses, offsets and lengths to be multiples of
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT)


def default_directory() -> Path:
    """Returns where large files may lie: /var/tmp is on disk where /tmp is often memory."""
    lasting = Path("/var/tmp")
    return lasting if os.access(lasting, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())


class BlockFile:
    """``nbytes`` (rounded up to BLOCK) behind an open descriptor, which is this object's to close.

    Errors are ``BackendError``: what failed, the place and the system's name for the error, then
    ``advice``.
    """

    def __init__(self, fd: int, place: Path, nbytes: int, advice: str) -> None:
        self.nbytes = round_up(nbytes, BLOCK)
        self._fd, self._place, self._advice = fd, place, advice
        self._close = weakref.finalize(self, os.close, fd)
        self._close.atexit = False
        self.direct = try_direct(fd)

    @classmethod
    def create(cls, path: Path, nbytes: int, advice: str) -> BlockFile:
        """A new file of that name, which must not be there."""
        with explained("making a file", path, nbytes, advice):
            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            file = cls(fd, path, nbytes, advice)
        try:
            file.reserve()
        except BackendError:
            file.close()
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        return file

    @classmethod
    def open(cls, path: Path, nbytes: int, advice: str) -> BlockFile:
        """An existing file, to read."""
        with explained("opening a file", path, nbytes, advice):
            return cls(os.open(path, os.O_RDONLY | os.O_CLOEXEC), path, nbytes, advice)

    def reserve(self) -> None:
        """Reserves space for all of it, so that no later write finds the disk full."""
        with self._explained("reserving space"):
            if self.nbytes:
                os.posix_fallocate(self._fd, 0, self.nbytes)

    def rename(self, path: Path) -> None:
        """Gives a file that `create` made another name, in place of whatever has it."""
        with self._explained("renaming"):
            os.replace(self._place, path)

    def close(self) -> None:
        """Closes at once; otherwise it is closed when this object dies."""
        self._close()

    def write(self, buffer: memoryview, offset: int) -> None:
        """Writes all of ``buffer``, a multiple of BLOCK, at ``offset``."""
        with self._explained("writing"):
            done = 0
            while done < len(buffer):
                done += os.pwrite(self._fd, buffer[done:], offset + done)

    def read(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer``, a multiple of BLOCK, from ``offset``."""
        with self._explained("reading"):
            done = 0
            while done < len(buffer):
                got = os.preadv(self._fd, [buffer[done:]], offset + done)
                if not got:
                    raise OSError(errno.EIO, "the file ends too early")
                done += got

    def _explained(self, what: str) -> contextlib.AbstractContextManager[None]:
        return explained(what, self._place, self.nbytes, self._advice)


class DiskFile(BlockFile):
    """A file without a name in ``directory``: the kernel frees it however the process ends."""

    def __init__(self, directory: Path, nbytes: int) -> None:
        advice = (
            "free some space, pass another disk_dir, or use content='host'; nothing was changed"
        )
        with explained("making a file for saved content", directory, nbytes, advice):
            fd = _open(directory)
        super().__init__(fd, directory, nbytes, advice)
        self.reserve()


@contextlib.contextmanager
def explained(what: str, place: Path, nbytes: int, advice: str) -> Iterator[None]:
    """An OSError inside becomes a ``BackendError``: what failed, where, the system's name for it,
    and ``advice``.
    """
    try:
        yield
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "?")
        raise BackendError(
            f"{what} in {place} failed: {name} ({error.strerror}), {format_bytes(nbytes)}; {advice}"
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


def try_direct(fd: int) -> bool:
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError:  # tmpfs of older kernels
        return False
    return True
