"""Results of asynchronous functions that users wrote, in the one event loop of a process."""

import asyncio
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any


def run_awaited(call: Awaitable[Any]) -> Any:
    """Return a result, awaited in one event loop each time, so that connections can be kept."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _runner().run(_result(call))
    return _thread().submit(_runner().run, _result(call)).result()  # A notebook's loop runs here.


async def _result(call: Awaitable[Any]) -> Any:
    return await call


@cache
def _runner() -> asyncio.Runner:
    return asyncio.Runner()


@cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "async calls")
