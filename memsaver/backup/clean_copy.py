"""A copy that is kept while its tag is active: if the content is still the same at the next pause,
it is not copied.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from memsaver.backup.on_disk import DiskBackup
from memsaver.backup.on_host import HostBackup
from memsaver.common.digest import Digest
from memsaver.vmm.backend import Waitable


@dataclass
class CleanCopy:
    """version: what the owner calls the content.

    digest: of the content, started when it was copied.
    """

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
