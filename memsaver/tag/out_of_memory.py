"""Explanations of a shortage of memory: the cause, the holders and a remedy."""

import contextlib
from collections.abc import Iterator, Sequence

from memsaver.errors import BackendError, OutOfMemory, StateError, format_bytes
from memsaver.memory.backend import ShortOfMemory
from memsaver.native import shim
from memsaver.report import PAGE_POOL
from memsaver.tag.arena import Arena
from memsaver.tag.tags import Accounts


@contextlib.contextmanager
def explained(
    accounts: Accounts, operation: str, arenas: Sequence[Arena], needed: int = 0
) -> Iterator[None]:
    """Convert ``ShortOfMemory`` in the body to an error that explains it; see `shortage`."""
    try:
        yield
    except ShortOfMemory as short:
        raise shortage(accounts, operation, arenas, short.cause, needed) from None


def shortage(
    accounts: Accounts,
    operation: str,
    arenas: Sequence[Arena],
    cause: shim.Cause,
    needed: int = 0,
    hint: str = "",
) -> Exception:
    """Return the exception for an operation that was short of memory.

    The operation needs `needed` bytes; 0 stands for the size of the paused arenas, or else the size
    of the failed call. The message names the remedy `hint` before its own.
    """
    if cause.code not in (shim.E_LIMIT, shim.E_DRIVER):
        return _without_holders(accounts, operation, cause)
    away = sum(arena.committed_when_paused for arena in arenas if arena.paused)
    needed = needed or away or cause.requested
    if cause.code == shim.E_LIMIT:
        limit = accounts.backend.limit_bytes or 0
        kept = accounts.pool.held_bytes  # was available to the operation
        more = max(accounts.backend.committed_bytes - kept + needed - limit, cause.missing)
        why = f"{format_bytes(more)} are missing under the limit of {format_bytes(limit)}"
        advice = "Have another tag paused by its owner or raise limit_bytes"
    else:
        more = 0
        why = f"the driver refused with {accounts.backend.error_name(cause.driver)}"
        advice = "Have another tag paused by its owner, or free memory of the holders"
        if accounts.backend.names_limit(cause.driver):
            advice = "Have that limit raised"
    holders = accounts.holders()
    if holders[PAGE_POOL]:
        advice = f"trim() releases the page pool's memory. {advice}"
    if hint:
        advice = f"{hint}. {advice}"
    everyone = {**holders, **accounts.backend.other_holders()}
    held = ", ".join(f"{name} {format_bytes(size)}" for name, size in everyone.items() if size)
    message = (
        f"{operation} needs {format_bytes(needed)}: {why}. Held by: {held or 'nobody'}. "
        f"{advice}; nothing was changed."
    )
    return OutOfMemory(message, needed, more, everyone)


def _without_holders(accounts: Accounts, operation: str, cause: shim.Cause) -> Exception:
    """Return the exception for a cause that no other holder's memory would remedy."""
    if cause.code == shim.E_PAUSED:
        return StateError(f"{operation}: the tag is paused; resume it first")
    if cause.code == shim.E_FORKED:
        return StateError(
            f"{operation}: this is a forked child, where the saver is inert; make a new MemorySaver"
        )
    if cause.code == shim.E_RESERVATION:
        reserved, missing = accounts.tags.reserve_bytes, format_bytes(cause.missing)
        message = (
            f"{operation} outgrows the {format_bytes(reserved)} of addresses reserved for each "
            f"tag: {missing} are missing. Pass a larger reserve_bytes; nothing was changed."
        )
        return OutOfMemory(message, cause.requested, cause.missing, {})
    return BackendError(f"{operation} failed: no host memory for the tables")
