"""Save and restore the content of paused tags, in host memory or on disk."""

from memsaver.content.on_disk import BLOCK, BlockFile, DiskBackup, explained
from memsaver.content.on_host import HostBackup

Backup = HostBackup | DiskBackup

__all__ = ["BLOCK", "Backup", "BlockFile", "DiskBackup", "HostBackup", "explained"]
