"""Regions of the drop-in, which a thread can leave for a while, and which leave memory free."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from memsaver.common.signals import Unbroken
from memsaver.errors import OutOfMemory
from memsaver.saver import MemorySaver

_thread = threading.local()  # .regions: those that the thread is in, outermost first


def _regions() -> list[Region]:
    regions: list[Region] = _thread.__dict__.setdefault("regions", [])
    return regions


class Region:
    """A saver's region that can be left, and entered anew, before it ends."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._inside: contextlib.ExitStack | None = None

    def enter(self) -> None:
        inside = contextlib.ExitStack()
        inside.enter_context(self._make())
        self._inside = inside

    def leave(self, *error: Any) -> bool:
        """``error`` goes through the saver's region, which may have a better one to raise."""
        inside, self._inside = self._inside, None
        return inside is not None and bool(inside.__exit__(*(error or (None, None, None))))

    def __enter__(self) -> None:
        self.enter()
        _regions().append(self)

    def __exit__(self, *error: Any) -> bool:
        _regions().pop()
        return self.leave(*error)


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Lets what this thread allocates inside be torch's own; its regions go on afterwards.

    Raises ``StateError`` at the end if a tag that a region is of was paused meanwhile, and is not
    resumed.
    """
    left = _regions()
    with contextlib.ExitStack() as back:
        for region in reversed(left):
            region.leave()
            back.callback(region.enter)  # the outermost first: it was left last
        _thread.regions = []
        back.callback(setattr, _thread, "regions", left)
        yield


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


def headroom(saver: MemorySaver, nbytes: int) -> AbstractContextManager[None]:
    """Inside, the saver's tags cannot grow so far that less than ``nbytes`` stays free:
    ``OutOfMemory``.

    What is free is looked up on entry. A resume inside is held to it, too; one outside is not.
    """
    return Unbroken(_headroom(saver, nbytes)) if nbytes else contextlib.nullcontext()


@contextlib.contextmanager
def _headroom(saver: MemorySaver, nbytes: int) -> Iterator[None]:
    most = saver.backend.committed_bytes + max(0, saver.backend.device_free_bytes - nbytes)
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
