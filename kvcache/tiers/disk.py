"""The disk tier: one file per page, each verified by a checksum when it is read."""

import contextlib
import fcntl
import logging
import os
import struct
import weakref
from pathlib import Path

import torch

from kvcache.tiers.keys import HASH_BYTES, VersionedLRU, stable_hash
from memsaver.content import BLOCK, BlockFile, explained
from memsaver.errors import BackendError
from memsaver.memory import host_memory

_MAGIC = b"kvpage01"
# magic, format, version, page hash, payload bytes
_FIELDS = struct.Struct(f"<8s{HASH_BYTES}sq{HASH_BYTES}sq")
# Bytes before the payload: the fields, then the checksum of fields and payload.
_HEADER = BLOCK
_SUFFIX, _PART = ".kvpage", ".kvpage.part"
_log = logging.getLogger("kvcache")
_ADVICE = "free some space or pass another directory; pages stored before are kept"


class DiskTier:
    """Store of pages on disk, one file per page, keyed by weight version and page hash.

    One process at a time owns the directory, which is created if missing. At the start, the tier
    keeps the pages that an earlier process left under the same owner, format and version. It
    deletes all other pages and unfinished files, and ignores files that are not pages.

    A page is written under a temporary name and renamed when it is complete. Each file contains its
    key and a checksum; a file that does not match is deleted and counts as a miss. A crash at any
    point therefore only loses entries. Not thread-safe.

    All files together take at most `budget_bytes`. `format` is that of the stored bytes
    (`HostKVCache.format`). `owner` names the model and the run: in one directory, the same owner
    and version must mean the same weights.

    Raises:
        ValueError: The budget is too small for a page.
        BackendError: Another tier owns the directory, or the directory can't be used.
    """

    def __init__(
        self,
        directory: Path,
        budget_bytes: int,
        *,
        page_bytes: int,
        format: object,
        owner: str,
        version: int = 0,
    ) -> None:
        self.directory, self.budget_bytes, self.page_bytes = directory, budget_bytes, page_bytes
        self.file_bytes = _HEADER + -(-page_bytes // BLOCK) * BLOCK
        if budget_bytes < self.file_bytes:
            raise ValueError(
                f"budget_bytes={budget_bytes} is too small for a page file of {self.file_bytes}"
            )
        self._format = stable_hash(repr(format).encode(), owner.encode(), str(page_bytes).encode())
        # Aligned for direct I/O.
        buffer = host_memory(self.file_bytes, torch.device("cpu"), "a page", "make pages smaller")
        self._memory = buffer.numpy().data
        # A numpy view, because torch's threads cost more than copying one page.
        self._payload = buffer[_HEADER : _HEADER + page_bytes].numpy()
        self._entries: VersionedLRU[Path] = VersionedLRU(version)
        self._count = 0  # files, including those of older versions
        # Files of dropped pages that could not be deleted yet; they are still in _count.
        self._stuck: set[Path] = set()
        with explained("opening a directory for KV pages", directory, self.file_bytes, _ADVICE):
            self._hold_directory()
            self._adopt()

    @property
    def version(self) -> int:
        """Return the weight version whose pages can be hit."""
        return self._entries.version

    @property
    def nbytes(self) -> int:
        """Return the bytes of the files of all versions."""
        return self._count * self.file_bytes

    def __len__(self) -> int:
        """Return the number of pages that can be hit."""
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        """Return whether a page is stored; `get` may still find it damaged."""
        return key in self._entries

    def use(self, key: bytes) -> bool:
        """Mark a page as most recently used, and return whether it is stored."""
        return self._entries.use(key) is not None

    def put(self, key: bytes, content: torch.Tensor) -> None:
        """Store a page under the present version, unless it is already stored.

        Pages are evicted to make room: those of older versions first, then the least recently used.
        `content` is uint8 `[page_bytes]` on the CPU.

        Raises:
            BackendError: The disk is full or fails. The page is not stored; pages evicted to make
                room are lost.
        """
        assert content.dtype == torch.uint8 and content.shape == (self.page_bytes,)
        if self.use(key):
            return
        self._make_room()
        self._payload[:] = content.numpy()
        header = self._header(key)
        self._memory[: len(header)] = header
        path = self._path(key)
        self._write(path)
        self._count += path not in self._stuck
        self._stuck.discard(path)
        self._entries.add(key, path)

    def get(self, key: bytes, into: torch.Tensor) -> bool:
        """Read a page and return True, or return False on a miss.

        A file that is damaged or can't be read is deleted and logged, and counts as a miss. `into`
        is uint8 `[page_bytes]` on the CPU, and unchanged on a miss.
        """
        path = self._entries.use(key)
        if path is None:
            return False
        reason = self._read(path)
        if reason is None and not self._is_intact(key):
            reason = "key or checksum differ; the file is torn, damaged or of another cache"
        if reason is None:
            into.numpy()[:] = self._payload
            with contextlib.suppress(OSError):
                os.utime(path)  # preserve the order of use for the next process
            return True
        message = "KV page file %s is dropped, its tokens will be computed again: %s"
        _log.warning(message, path, reason)
        self._entries.remove(key)
        with contextlib.suppress(BackendError):  # deletion is retried later
            self._delete(path)
        return False

    def raise_version(self, version: int) -> None:
        """Start a new, greater weight version, which makes every entry a miss, in O(1).

        Files of older versions are deleted when room is needed, or at the next start.
        """
        self._entries.raise_version(version)

    def clear(self) -> None:
        """Drop the pages of all versions and delete their files, as far as possible."""
        while dropped := self._entries.drop():
            with contextlib.suppress(BackendError):
                self._delete(dropped.value)

    def close(self) -> None:
        """Release the directory, which otherwise happens when this object is collected.

        The files remain.
        """
        self._unlock()

    def _hold_directory(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._unlock = weakref.finalize(self, os.close, fd)
        self._unlock.atexit = False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            message = f"{self.directory} is held by another disk tier; pass another directory"
            raise BackendError(message) from error

    def _adopt(self) -> None:
        """Add existing files that can be hit, in order of use, and delete all other page files."""
        usable = []
        for path in self.directory.iterdir():
            if not path.name.endswith((_SUFFIX, _PART)):
                continue
            key, stat = self._key_of(path.name), path.stat()
            if key is not None and stat.st_size == self.file_bytes:
                usable.append((stat.st_mtime_ns, key, path))
            else:
                path.unlink()
        for _, key, path in sorted(usable):
            self._entries.add(key, path)
        self._count = len(usable)
        while self.nbytes > self.budget_bytes:
            self._drop_oldest()

    def _make_room(self) -> None:
        for path in tuple(self._stuck):
            self._delete(path)
        while self.nbytes + self.file_bytes > self.budget_bytes:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        dropped = self._entries.drop()
        assert dropped is not None, "more files are counted than there are entries"
        self._delete(dropped.value)

    def _delete(self, path: Path) -> None:
        """Delete a file; if that raises BackendError, it is retried when room is needed."""
        self._stuck.add(path)
        self._unlink(path)
        self._stuck.discard(path)
        self._count -= 1

    def _unlink(self, path: Path) -> None:
        with explained("deleting a file", path, self.file_bytes, _ADVICE):
            path.unlink(missing_ok=True)

    def _write(self, path: Path) -> None:
        part = path.with_suffix(_PART)
        self._unlink(part)
        file = BlockFile.create(part, self.file_bytes, _ADVICE)
        try:
            file.write(self._memory, 0)
            file.rename(path)
        except BaseException:
            # If this fails, the next write of the page or the next start deletes the file.
            with contextlib.suppress(BackendError):
                self._unlink(part)
            raise
        finally:
            file.close()

    def _read(self, path: Path) -> str | None:
        """Read a file into the buffer; return the reason if it is missing, short or unreadable."""
        try:
            with contextlib.closing(BlockFile.open(path, self.file_bytes, _ADVICE)) as file:
                file.read(self._memory, 0)
        except BackendError as error:
            return str(error)
        return None

    def _is_intact(self, key: bytes) -> bool:
        """Return whether the buffer contains the page of this key with a valid checksum."""
        header = self._header(key)
        return self._memory[: len(header)] == header

    def _header(self, key: bytes) -> bytes:
        """Return a page's header fields and the checksum of the fields and the present payload."""
        fields = _FIELDS.pack(_MAGIC, self._format, self.version, key, self.page_bytes)
        return fields + stable_hash(fields, self._payload.data)

    def _path(self, key: bytes) -> Path:
        return self.directory / f"{self._format.hex()}-{self.version}-{key.hex()}{_SUFFIX}"

    def _key_of(self, name: str) -> bytes | None:
        """Return the page hash in a file name; None if the file is not of this tier and version."""
        with contextlib.suppress(ValueError):
            key = bytes.fromhex(name.removesuffix(_SUFFIX).rsplit("-", 1)[-1])
            if name == self._path(key).name:
                return key
        return None
