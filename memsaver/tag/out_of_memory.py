"""Turn a failed allocation into an exception that says what was missing and who holds the rest."""

from __future__ import annotations

from collections.abc import Mapping

from memsaver.errors import BackendError, OutOfMemory, StateError, format_bytes
from memsaver.native import shim
from memsaver.vmm.backend import Backend

PAGE_POOL = "the page pool"


def explain(
    what: str,
    cause: shim.Cause,
    needed: int,
    reserve_bytes: int,
    holders: Mapping[str, int],
    backend: Backend,
) -> Exception:
    """The exception for ``what``: ``needed`` bytes were asked for, ``holders`` are the tags and
    their bytes.
    """
    if cause.code == shim.E_PAUSED:
        return StateError(f"{what}: the tag is paused; resume it first")
    if cause.code == shim.E_FORKED:
        return StateError(
            f"{what}: this is a forked child, where the saver is inert; make a saver of its own"
        )
    if cause.code == shim.E_RESERVATION:
        message = (
            f"{what} outgrows the {format_bytes(reserve_bytes)} of addresses reserved for each "
            f"tag: {format_bytes(cause.missing)} are missing. Pass a larger reserve_bytes; "
            "nothing was changed."
        )
        return OutOfMemory(message, cause.requested, cause.missing, {})
    if cause.code not in (shim.E_LIMIT, shim.E_DRIVER):
        return BackendError(f"{what} failed: no host memory for the tables")
    if cause.code == shim.E_LIMIT:
        limit = backend.limit_bytes or 0
        missing = backend.committed_bytes + needed - limit
        why = f"{format_bytes(missing)} are missing under the limit of {format_bytes(limit)}"
        advice = "Pause another tag or raise limit_bytes"
    else:
        missing = 0
        why = f"the driver refused with {backend.error_name(cause.driver)}"
        advice = "Pause another tag, or end what holds the memory"
    if holders.get(PAGE_POOL):
        advice = f"trim() gives the page pool's memory back. {advice}"
    everyone = {**holders, **backend.other_holders()}
    held = ", ".join(f"{name} {format_bytes(size)}" for name, size in everyone.items() if size)
    message = (
        f"{what} needs {format_bytes(needed)}: {why}. Held by: {held or 'nobody'}. "
        f"{advice}; nothing was changed."
    )
    return OutOfMemory(message, needed, missing, everyone)
