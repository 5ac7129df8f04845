"""Gives back what arenas held that nobody refers to any more."""

from __future__ import annotations

import contextlib
import gc
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from memsaver.common.signals import held
from memsaver.native import shim
from memsaver.vmm.backend import Backend, Reservation

if TYPE_CHECKING:
    from memsaver.tag.borrowed import BorrowedPages


class Parts(NamedTuple):
    """An arena's own; ``borrowed`` has one entry at most."""

    backend: Backend
    reservation: Reservation
    slot: int
    borrowed: list[BorrowedPages]


_forgotten: deque[Parts] = deque()  # not given back yet


def decommit(parts: Parts) -> None:
    """Gives an arena's extents to the driver."""
    if committed := shim.stats(parts.slot).committed:
        parts.backend.unmap(parts.reservation.address, committed)
    extents = shim.extents(parts.slot)
    shim.set_extents(parts.slot, [])
    for extent in extents:
        parts.backend.release(extent.handle, extent.nbytes)


@held()
def forget(parts: Parts) -> None:
    """Undo of an arena that nobody refers to: now, or later where a graph capture forbids to wait,
    or where a region's tensors live on.
    """
    _forgotten.append(parts)
    give_back_forgotten()


def give_back_forgotten() -> None:
    """Gives back those arenas that nobody refers to and no tensor lies on any more."""
    _retry(list(_forgotten))


@held()
def _retry(items: Sequence[Parts]) -> None:
    for item in items:
        if _may_end(item):
            # finalizers run in any thread: another one took it
            with contextlib.suppress(ValueError):
                _forgotten.remove(item)
                _undo(item)
    if _forgotten and _retry_on_host not in gc.callbacks:
        gc.callbacks.append(_retry_on_host)


def _retry_on_host(phase: str, info: object) -> None:
    """Tries again, on the host, when garbage is collected.

    GPUs are left out: waiting for one would break a graph that another thread captures.
    """
    if phase == "stop":
        _retry([item for item in _forgotten if item.backend.device.type == "cpu"])
        if not _forgotten:
            with contextlib.suppress(ValueError):
                gc.callbacks.remove(_retry_on_host)


def _may_end(item: Parts) -> bool:
    backend = item.backend
    return not backend.capturing and (backend.forked or not shim.stats(item.slot).blocks)


def _undo(item: Parts) -> None:
    if item.backend.forked:
        return  # nothing of it came along
    item.backend.synchronize()  # kernels that use it may be queued on any stream
    while item.borrowed:
        item.borrowed.pop().drop(item.backend, item.reservation.address)
    decommit(item)
    if shim.library().ms_arena_free(item.slot) == 0:
        item.reservation.close()
