"""Digests of a tag's live ranges, and copies that a pause need not make again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

import torch

from memsaver.backup.on_disk import DiskBackup
from memsaver.backup.on_host import HostBackup
from memsaver.common.digest import Digest
from memsaver.common.layout import Ranges, joined
from memsaver.errors import BackendError
from memsaver.vmm.backend import Waitable

View = Callable[[int, int], torch.Tensor]
"""``view(offset, nbytes)``: these bytes of the tag, as a uint8 tensor where they are."""

_WORD = 4
_BYTES = 1 << 62  # numbers of single bytes, apart from those of words


def fingerprint(ranges: Ranges, view: View) -> Digest:
    """One digest of all ranges (offset, nbytes), to be run as often as their addresses hold."""
    parts = (_parts(offset, view(offset, nbytes)) for offset, nbytes in joined(ranges))
    return Digest([*itertools.chain.from_iterable(parts)])


def _parts(offset: int, data: torch.Tensor) -> list[tuple[torch.Tensor, int]]:
    """Splits into whole words and odd bytes; each element is numbered by its place in the tag."""
    words = data.numel() // _WORD * _WORD
    parts = [(data[:words].view(torch.int32), offset // _WORD)] if words else []
    return parts + ([(data[words:], _BYTES + offset + words)] if words < data.numel() else [])


@dataclass(frozen=True)
class Checksums:
    """A digest of each range: taken before a pause that keeps content, compared after a resume."""

    tag: str
    digests: Mapping[tuple[int, int], int]

    @classmethod
    def take(cls, tag: str, ranges: Ranges, view: View) -> Checksums:
        return cls(tag, {item: fingerprint([item], view).run() for item in ranges})

    def verify(self, view: View, end: int) -> None:
        """Raise ``BackendError`` where a range changed; ranges beyond ``end`` were trimmed."""
        there = {item: digest for item, digest in self.digests.items() if sum(item) <= end}
        changed = [
            item for item, digest in there.items() if fingerprint([item], view).run() != digest
        ]
        if changed:
            offset, nbytes = changed[0]
            raise BackendError(
                f"content of tag {self.tag!r} changed across a pause: "
                f"{nbytes} bytes at offset {offset} differ ({len(changed)} of {len(there)} "
                "ranges); define it anew, and look for what wrote to its backup"
            )


@dataclass
class CleanCopy:
    """version: what the owner calls the content. digest: of it, begun when it was copied."""

    backup: HostBackup | DiskBackup
    version: Hashable
    digest: Digest
    copying: Waitable | None = None
    _expected: int | None = None

    def finish(self) -> None:
        """Wait for the copy, which reads the tag's memory."""
        if self.copying is not None:
            self.copying.synchronize()
            self.copying = None

    def settle(self) -> None:
        """Wait for the copy and its digest."""
        self.finish()
        if self._expected is None:
            self._expected = self.digest.result()

    def begin_check(self, version: Hashable | None, content: str, committed: int) -> bool:
        """Is it said to be the content of a tag of ``committed`` bytes? Then ``holds`` follows."""
        kind = HostBackup if content == "host" else DiskBackup
        if version is None or version != self.version or not isinstance(self.backup, kind):
            return False
        if any(offset + nbytes > committed for offset, nbytes in self.backup.ranges):
            return False
        self.settle()
        self.digest.start()
        return True

    def holds(self, ranges: list[tuple[int, int]]) -> bool:
        """Is it the content? The owner said so by the version; other writers show in the digest."""
        return self.digest.result() == self._expected and tuple(ranges) == self.backup.ranges
