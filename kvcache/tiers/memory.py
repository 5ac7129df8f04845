"""Host memory for a tier: in huge pages where there are any, pinned for a GPU, given back when
nobody looks at it.
"""

import contextlib
import ctypes

import torch

from memsaver import HostMemoryError
from memsaver.common.finalizers import Finalizer
from memsaver.errors import format_bytes
from memsaver.vmm import HUGE_PAGE, Pinner, make_pinner, pinned_pages


def host_memory(nbytes: int, device: torch.device) -> torch.Tensor:
    """uint8 `[nbytes]` with memory behind it, pinned where `device` is a GPU, at a multiple of 2
    MiB and in whole ones.

    `HostMemoryError`, with nothing taken, for more than machine and container have room for beside
    what this process has pinned (`room_bytes`).
    """
    size = -(-nbytes // HUGE_PAGE) * HUGE_PAGE
    room = max(0, pinned_pages.room_bytes())
    if size > room:
        raise HostMemoryError(
            f"a host tier of {format_bytes(size)} is more than the {format_bytes(room)} of host "
            f"memory that may be taken beside the {format_bytes(pinned_pages.held_bytes())} that "
            "this process holds already; make the tier smaller or free memory; nothing was changed",
            size,
            size - room,
            {},
        )
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        pinner = make_pinner(device)
        (address,) = pinned_pages.obtain([size], pinner)
    owner = (ctypes.c_char * nbytes).from_address(address)
    Finalizer(owner, _give_back, address, size, pinner, device)
    return torch.frombuffer(owner, dtype=torch.uint8)


def check_page(content: torch.Tensor, nbytes: int) -> None:
    """ValueError unless it is uint8 `[nbytes]`, all bytes of a page."""
    if content.dtype != torch.uint8 or content.shape != (nbytes,):
        raise ValueError(
            f"a page is uint8 [{nbytes}], got {content.dtype} of {tuple(content.shape)}"
        )


def _give_back(address: int, size: int, pinner: Pinner | None, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # kernels may still read it or write it
    pinned_pages.give_back(address, size, pinner)
