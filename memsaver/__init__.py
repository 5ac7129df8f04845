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
from memsaver.report import CallStats, Event, Report, TagReport, Timeline, Usage
from memsaver.saver import MemorySaver
from memsaver.sharing.lease import Lease, LeaseCache, attach
from memsaver.tag.arrival import Arrival
from memsaver.tag.borrowed import PoolTicket, Ticket

__all__ = [
    "Arrival",
    "BackendError",
    "CallStats",
    "CompilerError",
    "ContentWatch",
    "Event",
    "HostMemoryError",
    "Lease",
    "LeaseCache",
    "LeaseError",
    "LockTimeout",
    "MemSaverError",
    "MemorySaver",
    "OutOfMemory",
    "PoolTicket",
    "Report",
    "StateError",
    "TagError",
    "TagReport",
    "Ticket",
    "Timeline",
    "Usage",
    "attach",
]
