"""Save the content of a paused tag in a file, through a few buffers in the host arena.

Files consist of whole blocks, are reserved before they are written, and use direct I/O if possible.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import queue
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from pathlib import Path

import numpy
import torch

from memsaver.errors import BackendError, format_bytes
from memsaver.memory.backend import Backend, Transfer
from memsaver.memory.pinned_arena import PinnedArena, PinnedPiece
from memsaver.ops.layout import Ranges, cut, round_up
from memsaver.system.interrupts import Finalizer, deliver
from memsaver.system.threads import workers

CHUNK = 8 << 20
_WORKERS = 8  # requests in flight, enough to keep an NVMe drive busy
_POLL_SECONDS = 0.1

BLOCK = 4096  # bytes: the unit of addresses, offsets and lengths in direct I/O
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT)


def default_directory() -> Path:
    """Return a folder for large files: /var/tmp is on disk, whereas /tmp is often in memory."""
    lasting = Path("/var/tmp")
    return lasting if os.access(lasting, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())


class BlockFile:
    """A file of whole blocks, whose open descriptor this object owns.

    ``place`` is the path of the file or its folder. An error is a ``BackendError`` that names the
    operation, the place, the system's error and ``advice``, the remedy.
    """

    def __init__(self, fd: int, place: Path, nbytes: int, advice: str) -> None:
        self.nbytes = round_up(nbytes, BLOCK)
        self._fd, self._place, self._advice = fd, place, advice
        self._close = weakref.finalize(self, os.close, fd)
        self._close.atexit = False
        self.direct = try_direct(fd)

    @classmethod
    def create(cls, path: Path, nbytes: int, advice: str) -> "BlockFile":
        """Create a file, which must not exist, and reserve its space."""
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
    def open(cls, path: Path, nbytes: int, advice: str) -> "BlockFile":
        """Open an existing file for reading."""
        with explained("opening a file", path, nbytes, advice):
            return cls(os.open(path, os.O_RDONLY | os.O_CLOEXEC), path, nbytes, advice)

    def reserve(self) -> None:
        """Reserve space for the whole file, so that no later write finds the disk full."""
        with self._explained("reserving space"):
            if self.nbytes:
                os.posix_fallocate(self._fd, 0, self.nbytes)

    def rename(self, path: Path) -> None:
        """Rename a file that `create` made, replacing any file of that name."""
        with self._explained("renaming"):
            os.replace(self._place, path)

    def close(self) -> None:
        """Close the file now; otherwise it is closed when this object dies."""
        self._close()

    def write(self, buffer: memoryview, offset: int) -> None:
        """Write all of ``buffer``, a multiple of BLOCK, at ``offset``."""
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
    """An unnamed file in ``directory``, which the kernel frees however the process ends."""

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
    """Turn an OSError inside into a ``BackendError`` with the operation, place and ``advice``."""
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


class DiskBackup:
    """Saved ``ranges`` of a tag, in order, in a file that is freed with this object.

    Buffers are allocated here and kept, so that reading the file back needs no more memory.
    """

    def __init__(self, ranges: Ranges, arena: PinnedArena, directory: Path) -> None:
        self.ranges = tuple(ranges)
        self.nbytes = sum(nbytes for _, nbytes in ranges)
        self._buffers: queue.SimpleQueue[PinnedPiece] = queue.SimpleQueue()
        pieces: list[PinnedPiece] = []
        try:
            for _ in range(min(_WORKERS, -(-self.nbytes // CHUNK))):
                pieces += _whole(arena, CHUNK)
            self._file = DiskFile(directory, self.nbytes)
        except BaseException:
            arena.give(pieces)
            raise
        Finalizer(self, arena.give, pieces)
        for piece in pieces:
            self._buffers.put(piece)
        self.host_bytes = sum(piece.nbytes for piece in pieces)
        self.disk_bytes = self._file.nbytes

    def save(self, backend: Backend, base: int) -> None:
        """Copy the ranges from the tag, whose arena begins at ``base``, and wait."""

        def out(at: int, parts: Sequence[tuple[int, int]], buffer: PinnedPiece) -> None:
            placed = _placed(buffer.address, parts)
            backend.copy([(to, base + offset, nbytes) for to, offset, nbytes in placed])
            self._file.write(_memory(buffer, sum(nbytes for _, nbytes in parts)), at)

        self._each_chunk(backend, out)

    def fill(self, backend: Backend, base: int, at: int, nbytes: int) -> None:
        """Do nothing: ``restore`` reads the file when the whole tag is mapped."""

    def restore(self, backend: Backend, base: int, end: int) -> None:
        """Copy into the tag's first ``end`` bytes; later ones were trimmed and have no memory."""

        def back(at: int, parts: Sequence[tuple[int, int]], buffer: PinnedPiece) -> None:
            self._file.read(_memory(buffer, sum(nbytes for _, nbytes in parts)), at)
            kept = [
                (offset, source, min(nbytes, end - offset))
                for source, offset, nbytes in _placed(buffer.address, parts)
                if offset < end
            ]
            backend.copy([(base + offset, source, nbytes) for offset, source, nbytes in kept])

        self._each_chunk(backend, back)

    def views(self, offset: int, nbytes: int) -> list[torch.Tensor]:
        """Read the saved bytes of the tag from ``offset`` on into uint8 tensors."""
        views = []
        for start, parts in cut(self.ranges, CHUNK):
            at = 0
            for begin, size in parts:
                first, last = max(begin, offset), min(begin + size, offset + nbytes)
                if first < last:
                    chunk = self._read_chunk(start, sum(n for _, n in parts))
                    views.append(chunk[at + first - begin : at + last - begin])
                at += size
        return views

    def _read_chunk(self, at: int, nbytes: int) -> torch.Tensor:
        buffer = self._buffers.get()
        try:
            self._file.read(_memory(buffer, nbytes), at)
            held = numpy.frombuffer(_memory(buffer, nbytes)[:nbytes], numpy.uint8)
            return torch.from_numpy(held.copy())  # on no tag, even inside a region
        finally:
            self._buffers.put(buffer)

    def _each_chunk(
        self, backend: Backend, move: Callable[[int, Sequence[tuple[int, int]], PinnedPiece], None]
    ) -> None:
        def work(chunk: tuple[int, list[tuple[int, int]]]) -> None:
            backend.bind_thread()
            buffer = self._buffers.get()
            try:
                move(*chunk, buffer)
            finally:
                self._buffers.put(buffer)

        futures = [workers("disk").submit(work, chunk) for chunk in cut(self.ranges, CHUNK)]
        try:
            while wait(futures, _POLL_SECONDS).not_done:
                deliver()
        finally:  # also on an error: threads use memory that the caller may unmap
            for future in futures:
                future.cancel()
            wait(futures)
        for future in futures:
            future.result()


def _whole(arena: PinnedArena, nbytes: int) -> list[PinnedPiece]:
    """Take one piece of ``nbytes``, aligned for direct I/O."""
    pieces = arena.take(nbytes, whole=True)
    assert len(pieces) == 1 and pieces[0].address % BLOCK == 0
    return pieces


def _placed(address: int, parts: Sequence[tuple[int, int]]) -> list[Transfer]:
    out = []
    for offset, nbytes in parts:
        out.append((address, offset, nbytes))
        address += nbytes
    return out


def _memory(buffer: PinnedPiece, nbytes: int) -> memoryview:
    """Return the first ``nbytes`` of a buffer, rounded up to whole blocks."""
    size = round_up(nbytes, BLOCK)
    return memoryview((ctypes.c_char * size).from_address(buffer.address)).cast("B")
