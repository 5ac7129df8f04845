"""The regions that a thread is in, so that it can leave all of them for a while."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType

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

    def leave(self) -> None:
        self._end(None, None, None)

    def __enter__(self) -> None:
        self.enter()
        _regions().append(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        _regions().pop()
        return self._end(kind, error, trace)

    def _end(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """``error`` goes through the saver's region, which may have a better one to raise."""
        inside, self._inside = self._inside, None
        return inside is not None and bool(inside.__exit__(kind, error, trace))


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
