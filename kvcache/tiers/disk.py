"""The disk tier: one file a page, none of which is ever believed without its checksum."""

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
# bytes of the file before the payload: fields, then the checksum of fields and payload
_HEADER = BLOCK
_SUFFIX, _PART = ".kvpage", ".kvpage.part"
_log = logging.getLogger("kvcache")
_ADVICE = "free some space or pass another directory; pages stored before are still there"


class DiskTier:
    """Pages by (weight version, page hash) in `directory`, at most `budget_bytes` of files.

    format: what must be equal for bytes to be exchanged (`HostKVCache.format`). owner: names the
    model and the run; in one directory the same owner and version have to mean the same weights.
    One process at a time holds the directory. What an earlier one left under the same owner, format
    and version is served; all other pages and unfinished files are deleted at the start, and files
    that are no pages are left alone.

    A page is written under another name first and renamed when it is complete; each holds its key
    and a checksum, and what does not match is deleted and a miss. So a crash at any point costs
    entries only. Not thread-safe.
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
                f"{budget_bytes} bytes hold no page, whose file takes {self.file_bytes}"
            )
        self._format = stable_hash(repr(format).encode(), owner.encode(), str(page_bytes).encode())
        # aligned, as direct I/O needs it
        buffer = host_memory(self.file_bytes, torch.device("cpu"), "a page", "make pages smaller")
        self._memory = buffer.numpy().data
        # torch's threads cost more than one page
        self._payload = buffer[_HEADER : _HEADER + page_bytes].numpy()
        self._entries: VersionedLRU[Path] = VersionedLRU(version)
        self._count = 0  # files, those of older versions included
        # files of dropped pages that could not be deleted; they count until they are
        self._stuck: set[Path] = set()
        with explained("taking a directory for KV pages", directory, self.file_bytes, _ADVICE):
            self._hold_directory()
            self._adopt()

    @property
    def version(self) -> int:
        return self._entries.version

    @property
    def nbytes(self) -> int:
        """Return the bytes of all files."""
        return self._count * self.file_bytes

    def __len__(self) -> int:
        """Return the number of pages that can be hit."""
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        """Return whether there is a page; `get` may still find it damaged."""
        return key in self._entries

    def use(self, key: bytes) -> bool:
        """Return whether there is a page, and make it the one used last."""
        return self._entries.use(key) is not None

    def put(self, key: bytes, content: torch.Tensor) -> None:
        """Store a page (uint8 `[page_bytes]` on the CPU) under the present version, unless it is
        there.

        Evict what was used longest ago, older versions first. `BackendError` for a full or failing
        disk: the page is not stored, nothing else is lost but what had to make room.
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
        """Read a page into uint8 `[page_bytes]` on the CPU; False, `into` unchanged, for a miss.

        A file that is not what was written, or that cannot be read, is deleted, logged and a miss.
        """
        path = self._entries.use(key)
        if path is None:
            return False
        reason = self._read(path)
        if reason is None and not self._is_intact(key):
            reason = "torn, damaged or not of this cache: key or checksum differ"
        if reason is None:
            into.numpy()[:] = self._payload
            with contextlib.suppress(OSError):
                os.utime(path)  # the order of use outlives the process
            return True
        message = "KV page file %s is dropped, its tokens will be computed again: %s"
        _log.warning(message, path, reason)
        self._entries.remove(key)
        with contextlib.suppress(BackendError):  # then it goes later
            self._delete(path)
        return False

    def raise_version(self, version: int) -> None:
        """Make every entry a miss, in O(1); files go when room is needed, or at the next start."""
        self._entries.raise_version(version)

    def clear(self) -> None:
        """Drop all pages, of every version, and their files as far as they can be deleted."""
        while dropped := self._entries.drop():
            with contextlib.suppress(BackendError):
                self._delete(dropped.value)

    def close(self) -> None:
        """Let go of the directory; otherwise when this object dies. The pages stay."""
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
            message = f"{self.directory} is held by another disk tier; give each one its own"
            raise BackendError(message) from error

    def _adopt(self) -> None:
        """Take over files that can be hit, in order of use, and delete others of this kind."""
        found = []
        for path in self.directory.iterdir():
            if not path.name.endswith((_SUFFIX, _PART)):
                continue
            key, stat = self._key_of(path.name), path.stat()
            if key is not None and stat.st_size == self.file_bytes:
                found.append((stat.st_mtime_ns, key, path))
            else:
                path.unlink()
        for _, key, path in sorted(found):
            self._entries.add(key, path)
        self._count = len(found)
        while self.nbytes > self.budget_bytes:
            self._drop_oldest()

    def _make_room(self) -> None:
        for path in tuple(self._stuck):
            self._delete(path)
        while self.nbytes + self.file_bytes > self.budget_bytes:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        dropped = self._entries.drop()
        assert dropped is not None, "files are counted that no entry stands for"
        self._delete(dropped.value)

    def _delete(self, path: Path) -> None:
        """Raise BackendError where the file system keeps it: tried again when room is needed."""
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
            # the next one of this name, or the next start, deletes it
            with contextlib.suppress(BackendError):
                self._unlink(part)
            raise
        finally:
            file.close()

    def _read(self, path: Path) -> str | None:
        """Fill the buffer; return why not where the file is gone, too short or cannot be read."""
        try:
            with contextlib.closing(BlockFile.open(path, self.file_bytes, _ADVICE)) as file:
                file.read(self._memory, 0)
        except BackendError as error:
            return str(error)
        return None

    def _is_intact(self, key: bytes) -> bool:
        """Return whether the buffer holds that page, as it was written."""
        header = self._header(key)
        return self._memory[: len(header)] == header

    def _header(self, key: bytes) -> bytes:
        """Return the fields of a page, and the checksum of them and of the payload of now."""
        fields = _FIELDS.pack(_MAGIC, self._format, self.version, key, self.page_bytes)
        return fields + stable_hash(fields, self._payload.data)

    def _path(self, key: bytes) -> Path:
        return self.directory / f"{self._format.hex()}-{self.version}-{key.hex()}{_SUFFIX}"

    def _key_of(self, name: str) -> bytes | None:
        """Return the page hash in the name of a file that can be hit."""
        with contextlib.suppress(ValueError):
            key = bytes.fromhex(name.removesuffix(_SUFFIX).rsplit("-", 1)[-1])
            if name == self._path(key).name:
                return key
        return None
