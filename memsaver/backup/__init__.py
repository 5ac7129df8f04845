"""Where the content of paused tags is kept."""

from memsaver.backup.disk import DiskBackup
from memsaver.backup.host import HostBackup

Backup = HostBackup | DiskBackup
