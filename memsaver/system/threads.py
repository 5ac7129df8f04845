"""Thread pools of the process, and locks that are free in a forked child."""

import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar


@cache
def workers(purpose: str, most: int = 16) -> ThreadPoolExecutor:
    """Return the process's thread pool for one purpose.

    Work must not wait for work of the same pool. Threads are kept, because starting one takes time,
    and each has its own heap.
    """
    return ThreadPoolExecutor(min(most, os.cpu_count() or 1), f"memsaver-{purpose}")


os.register_at_fork(after_in_child=workers.cache_clear)  # a child does not have the threads
_Lock = TypeVar("_Lock")
_forkable: weakref.WeakSet[Any] = weakref.WeakSet()


def forkable(lock: _Lock) -> _Lock:
    """Register a lock or condition to be free in a forked child, and return it.

    A thread that holds it at the fork does not exist in the child, so nothing would release it.
    """
    _forkable.add(lock)
    return lock


def _free_in_child() -> None:
    for lock in _forkable:
        lock._at_fork_reinit()  # as `logging` does


os.register_at_fork(after_in_child=_free_in_child)
