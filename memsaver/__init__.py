"""Tag-based pause and resume of memory at unchanged addresses.

>>> saver = MemorySaver(device="cpu")
>>> kv = saver.empty((1024, 16), torch.bfloat16, tag="kv_cache")
>>> saver.pause("kv_cache"); saver.resume("kv_cache")
"""

from memsaver.content_watch import ContentWatch
from memsaver.errors import (
    BackendError,
    CompilerError,
    HostMemoryError,
    LeaseError,
    LockTimeout,
    MemSaverError,
    OutOfMemory,
    StateError,
    TagError,
)
from memsaver.report import Event, Report, TagReport, Timeline, Usage
from memsaver.saver import MemorySaver
from memsaver.sharing.lease import Lease, LeaseCache, attach
from memsaver.tag.prefetch import Prefetch
from memsaver.tag.tickets import PoolTicket, Ticket
from memsaver.types import Content, Operation, Release, TagState

__version__ = "0.1.0"

__all__ = [
    "BackendError",
    "CompilerError",
    "Content",
    "ContentWatch",
    "Event",
    "HostMemoryError",
    "Lease",
    "LeaseCache",
    "LeaseError",
    "LockTimeout",
    "MemSaverError",
    "MemorySaver",
    "Operation",
    "OutOfMemory",
    "PoolTicket",
    "Prefetch",
    "Release",
    "Report",
    "StateError",
    "TagError",
    "TagReport",
    "TagState",
    "Ticket",
    "Timeline",
    "Usage",
    "attach",
]
