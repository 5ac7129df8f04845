"""A copy that is kept while its tag is active: if the content is still the same at the next pause, it is not copied."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from memsaver.backup.disk import DiskBackup
from memsaver.backup.host import HostBackup, Waitable
from memsaver.ops.digest import Digest


@dataclass
class Retained:
    """version: what the owner calls the content. digest: of the content, started when it was copied."""

    backup: HostBackup | DiskBackup
    version: Hashable
    digest: Digest
    copying: Waitable | None = None
    _expected: int | None = None

    def settle(self) -> None:
        """Wait for the copy and its digest."""
        if self.copying is not None:
            self.copying.synchronize()
            self.copying = None
        if self._expected is None:
            self._expected = self.digest.result()

    def holds(self, version: Hashable | None, ranges: list[tuple[int, int]], content: str) -> bool:
        """Is it still the content? The owner says so by the version; who else may have written shows in the digest."""
        kind = HostBackup if content == "host" else DiskBackup
        if version is None or version != self.version or not isinstance(self.backup, kind):
            return False
        if tuple(ranges) != self.backup.ranges:
            return False
        self.settle()
        return self.digest.run() == self._expected
