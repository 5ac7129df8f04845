"""The giver's side of a hand-over, which makes another saver the owner of extents."""

import threading
import time
from collections.abc import Sequence

from memsaver.errors import LeaseError
from memsaver.memory.backend import Backend
from memsaver.memory.page_pool import Import, imports
from memsaver.native import shim
from memsaver.sharing import rpc
from memsaver.sharing.client import Owner, owner_of
from memsaver.sharing.lease import TIMEOUT_SECONDS, explained
from memsaver.tag.tickets import PoolTicket


def hand_over(
    extents: Sequence[shim.Extent], to: PoolTicket, backend: Backend
) -> LeaseError | None:
    """Hand unmapped extents over to another saver; the memory is neither copied nor freed.

    The giver's handles become imports.

    Returns:
        An error to raise once the caller has finished, if the receiver fell silent during the
        transfer. The receiver may own the extents then, so this saver no longer does.

    Raises:
        LeaseError: The receiver refuses or is gone. Nothing has changed.
    """
    lost = None
    _giving[threading.get_ident()] = time.monotonic()
    try:
        with explained("the memory was not handed over", "the saver to hand it to"):
            owner = owner_of(to.socket_name)
            wanted = [(extent.id, extent.nbytes) for extent in extents]
            answer, _ = owner.endpoint.call(
                "offer", timeout=TIMEOUT_SECONDS, token=to.token, extents=wanted
            )
        with imports.receiving([extent.id for extent in extents]):
            _give(owner, extents, to, backend, answer["need"])
            for extent in extents:
                imports.add(extent.id, Import(extent.handle, extent.nbytes, backend, owner))
    except (rpc.ConnectionClosed, TimeoutError) as error:
        lost = LeaseError(
            f"the memory was given to process {to.pid}, which fell silent ({error}): "
            "the tags are paused, and the driver frees the memory that it did not take"
        )
        for extent in extents:
            backend.release(extent.handle, 0)
    finally:
        del _giving[threading.get_ident()]
    shim.discharge(backend.phys, sum(extent.nbytes for extent in extents))
    return lost


_giving: dict[int, float] = {}  # start time of each thread's hand-over


def gives_for(seconds: float) -> bool:
    """Return whether a hand-over of this process has waited for its receiver that long."""
    return any(time.monotonic() - began > seconds for began in tuple(_giving.values()))


def _give(
    owner: Owner, extents: Sequence[shim.Extent], to: PoolTicket, backend: Backend, need: list[int]
) -> None:
    """Send the extents; `need` has the ids that the receiver has not imported."""
    fds: list[int] = []
    wanted = [(extent.id, extent.nbytes) for extent in extents]
    try:
        for extent in extents:
            if extent.id in need:
                fds.append(backend.export_fd(extent.handle))
        owner.endpoint.call(
            "give", timeout=TIMEOUT_SECONDS, fds=fds, token=to.token, extents=wanted, need=need
        )
    except rpc.CallRefused as error:
        raise LeaseError(f"the memory was not handed over: {error}; nothing was changed") from error
    finally:
        rpc.close_all(fds)
