"""Threads that are kept: a new one each time would cost time, and another heap of its own."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache

_THREADS = 16


@cache
def workers(purpose: str, most: int = _THREADS) -> ThreadPoolExecutor:
    """The process's threads for one purpose; work that waits for other work needs another."""
    return ThreadPoolExecutor(min(most, os.cpu_count() or 1), f"memsaver-{purpose}")


os.register_at_fork(after_in_child=workers.cache_clear)  # threads do not come along
