"""Physical memory and addresses: CUDA's or memfd's; pools of pages, pinned host memory, locks."""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING

from memsaver.common.layout import round_up
from memsaver.common.signals import Finalizer
from memsaver.errors import HostMemoryError, format_bytes
from memsaver.vmm import pinned_memory
from memsaver.vmm.pinned_memory import HUGE_PAGE, Pinner
from memsaver.vmm.torch_usage import clear_workspaces, empty_torch_cache, on_a_tag

if TYPE_CHECKING:
    import torch

    from memsaver.vmm.backend import Backend

__all__ = [
    "HUGE_PAGE",
    "Pinner",
    "clear_workspaces",
    "empty_torch_cache",
    "host_memory",
    "make_backend",
    "make_pinner",
    "on_a_tag",
]


def make_backend(device: torch.device, limit_bytes: int | None = None) -> Backend:
    """The backend of a device; raises ``ValueError`` for a device type that has none."""
    if device.type == "cpu":
        from memsaver.vmm.memfd import HostBackend

        return HostBackend(limit_bytes)
    if device.type == "cuda":
        from memsaver.vmm.cuda import CudaBackend

        return CudaBackend(device, limit_bytes)
    raise ValueError(f"device {str(device)!r} is not supported: use 'cpu' or 'cuda:N'")


def make_pinner(device: torch.device) -> Pinner | None:
    """Returns what makes host memory reachable for a device, whose context must be current; None:
    all of it is.
    """
    if device.type != "cuda":
        return None
    from memsaver.vmm.cuda import CudaPinner

    return CudaPinner()


def host_memory(nbytes: int, device: torch.device, what: str, remedy: str) -> torch.Tensor:
    """Returns uint8 ``[nbytes]``, all 0, with memory behind it, pinned where ``device`` is a GPU,
    at a multiple of 2 MiB and in whole ones; it is given back when nobody looks at it.

    what, remedy: for the ``HostMemoryError``, with nothing taken, for more than machine and
    container have room for beside what this process has pinned (``room_bytes``).
    """
    import torch

    size, room = round_up(nbytes, HUGE_PAGE), max(0, pinned_memory.room_bytes())
    if size > room:
        raise HostMemoryError(
            f"{what} of {format_bytes(size)} is more than the {format_bytes(room)} of host "
            f"memory that may be taken beside the {format_bytes(pinned_memory.held_bytes())} that "
            f"this process holds already; {remedy} or free memory; nothing was changed",
            size,
            size - room,
            {},
        )
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        pinner = make_pinner(device)
        (address,) = pinned_memory.obtain([size], pinner)
    owner = (ctypes.c_char * nbytes).from_address(address)
    Finalizer(owner, _give_back, address, size, pinner, device)
    return torch.frombuffer(owner, dtype=torch.uint8)


def _give_back(address: int, size: int, pinner: Pinner | None, device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)  # kernels may still read it or write it
    pinned_memory.give_back(address, size, pinner)
