"""The driver's own calls, as the floor of what gives memory back and takes it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from memsaver.backends.base import make_backend
from tests.benchmarks.common import Times


def extent_by_driver(
    device: torch.device, nbytes: int, take: str, give: str, between: Callable[[], object]
) -> dict[str, float]:
    """Medians, under these names, of create and map, and of unmap and release, of one extent and nothing else.
    between: after it was given."""
    backend, times, handle = make_backend(device), Times(), 0
    nbytes = backend.round_up(nbytes)
    address = backend.reserve(nbytes)

    def taken() -> None:
        nonlocal handle
        handle = backend.create(nbytes).handle
        backend.map(address, nbytes, handle)
        backend.set_access(address, nbytes)

    def given() -> None:
        backend.unmap(address, nbytes)
        backend.release(handle, nbytes)

    taken()
    for _ in times.rounds:
        times(give, given)
        between()
        times(take, taken)
    given()
    backend.unreserve(address, nbytes)
    return times.medians
