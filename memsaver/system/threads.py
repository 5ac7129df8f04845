"""Threads that are kept, and locks that are free in a forked child."""

from __future__ import annotations

import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar


@cache
def workers(purpose: str, most: int = 16) -> ThreadPoolExecutor:
    """Return the process's threads for one purpose; work that waits for other work needs another.

    They are kept: a new one each time would cost time, and another heap of its own.
    """
    return ThreadPoolExecutor(min(most, os.cpu_count() or 1), f"memsaver-{purpose}")


os.register_at_fork(after_in_child=workers.cache_clear)  # threads do not come along
_Lock = TypeVar("_Lock")
_forkable: weakref.WeakSet[Any] = weakref.WeakSet()


def forkable(lock: _Lock) -> _Lock:
    """Return the lock or condition, which will be free in a forked child: a thread that held it is
    not there to release it.
    """
    _forkable.add(lock)
    return lock


def _free_in_child() -> None:
    for lock in _forkable:
        lock._at_fork_reinit()  # as `logging` does


os.register_at_fork(after_in_child=_free_in_child)
