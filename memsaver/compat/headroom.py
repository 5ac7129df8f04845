"""Memory of a device that regions must leave free."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

from memsaver.common.signals import Unbroken
from memsaver.errors import OutOfMemory
from memsaver.saver import MemorySaver


@dataclass
class _Limits:
    """The saver's own limit, and those of the regions that are open, in whatever threads."""

    own: int | None
    open: list[int] = field(default_factory=list)

    @property
    def tightest(self) -> int | None:
        return min([*self.open, *([] if self.own is None else [self.own])], default=None)


_lock = threading.Lock()
_limits: weakref.WeakKeyDictionary[MemorySaver, _Limits] = weakref.WeakKeyDictionary()


def headroom(saver: MemorySaver, nbytes: int) -> contextlib.AbstractContextManager[None]:
    """Inside, the saver's tags cannot grow so far that less than ``nbytes`` stays free:
    ``OutOfMemory``.

    What is free is looked up on entry. A resume inside is held to it, too; one outside is not.
    """
    return Unbroken(_headroom(saver, nbytes)) if nbytes else contextlib.nullcontext()


@contextlib.contextmanager
def _headroom(saver: MemorySaver, nbytes: int) -> Iterator[None]:
    most = saver.report().committed_bytes + max(0, saver.backend.device_free_bytes - nbytes)
    with _lock:
        limits = _limits.setdefault(saver, _Limits(saver.limit_bytes))
        limits.open.append(most)
        saver.limit_bytes = limits.tightest
    try:
        yield
    except OutOfMemory as error:
        error.add_note(
            f"memory_margin_bytes={nbytes}: so much has to stay free; lower it to allow more"
        )
        raise
    finally:
        with _lock:
            limits.open.remove(most)
            saver.limit_bytes = limits.tightest
            if not limits.open:
                del _limits[saver]
