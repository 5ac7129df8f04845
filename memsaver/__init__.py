"""Tag-based pause and resume of memory at unchanged addresses.

>>> saver = MemorySaver(device="cpu")
>>> kv = saver.empty((1024, 16), torch.bfloat16, tag="kv_cache")
>>> saver.pause("kv_cache"); saver.resume("kv_cache")
"""

from memsaver.errors import (
    BackendError,
    CompilerError,
    LeaseError,
    MemSaverError,
    OutOfMemory,
    StateError,
    TagError,
)
from memsaver.report import Event, Report, TagReport
from memsaver.saver import MemorySaver
from memsaver.share import Lease, Ticket, attach
from memsaver.timeline import Timeline

__all__ = [
    "BackendError",
    "CompilerError",
    "Event",
    "Lease",
    "LeaseError",
    "MemSaverError",
    "MemorySaver",
    "OutOfMemory",
    "Report",
    "StateError",
    "TagError",
    "TagReport",
    "Ticket",
    "Timeline",
    "attach",
]
