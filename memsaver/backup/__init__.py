"""Keeps the content of paused tags."""

from memsaver.backup.disk_file import BLOCK, BlockFile, explained
from memsaver.backup.on_disk import DiskBackup
from memsaver.backup.on_host import HostBackup

Backup = HostBackup | DiskBackup

__all__ = ["BLOCK", "Backup", "BlockFile", "DiskBackup", "HostBackup", "explained"]
