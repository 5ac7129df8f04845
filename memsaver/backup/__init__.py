"""Where the content of paused tags is kept."""

from memsaver.backup.on_disk import DiskBackup
from memsaver.backup.on_host import HostBackup

Backup = HostBackup | DiskBackup
