"""Physical memory and addresses: CUDA's or memfd's; pools of pages, pinned host memory, locks."""

from __future__ import annotations

import contextlib
import ctypes

import torch

from memsaver.errors import BackendError, HostMemoryError, format_bytes
from memsaver.memory import pinned_arena
from memsaver.memory.backend import Backend
from memsaver.memory.memfd import HostBackend
from memsaver.memory.pinned_arena import HUGE_PAGE, Pinner
from memsaver.memory.torch_allocator import clear_workspaces, empty_torch_cache, on_a_tag
from memsaver.ops.layout import round_up
from memsaver.system.interrupts import Finalizer

__all__ = [
    "as_device",
    "clear_workspaces",
    "empty_torch_cache",
    "host_memory",
    "make_backend",
    "on_a_tag",
]


def as_device(device: str | torch.device) -> torch.device:
    """Return the device; raise ``ValueError`` for one that has no backend."""
    with contextlib.suppress(RuntimeError):  # torch's lists twenty types
        if (known := torch.device(device)).type in ("cpu", "cuda"):
            return known
    raise ValueError(f"device {str(device)!r} is not supported: use 'cpu' or 'cuda:N'")


def make_backend(device: torch.device, limit_bytes: int | None = None) -> Backend:
    """Return the backend of a device; raise ``BackendError`` for a GPU that this process lacks."""
    if device.type == "cpu":
        return HostBackend(limit_bytes)
    _require_gpu(device)
    try:
        from memsaver.memory.cuda import CudaBackend
    except ModuleNotFoundError as error:
        raise BackendError(
            f"device {str(device)!r} needs NVIDIA's Python bindings ({error}): "
            "pip install 'memsaver[cuda]'"
        ) from error
    return CudaBackend(device, limit_bytes)


def _require_gpu(device: torch.device) -> None:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        raise BackendError(
            f"device {str(device)!r} cannot be used: torch {torch.__version__} sees {count} GPUs; "
            "use another device, or see what `memsaver doctor` says"
        )


def _pinner(device: torch.device) -> Pinner | None:
    if device.type != "cuda":
        return None
    from memsaver.memory.cuda import CudaBackend

    return CudaBackend.pinner


def host_memory(nbytes: int, device: torch.device, what: str, remedy: str) -> torch.Tensor:
    """Returns uint8 ``[nbytes]``, all 0, with memory behind it, pinned where ``device`` is a GPU,
    at a multiple of 2 MiB and in whole ones; it is given back when nobody looks at it.

    what, remedy: for the ``HostMemoryError``, with nothing taken, for more than machine and
    container have room for beside what this process has pinned (``room_bytes``).
    """
    size, room = round_up(nbytes, HUGE_PAGE), max(0, pinned_arena.room_bytes())
    if size > room:
        raise HostMemoryError(
            f"{what} of {format_bytes(size)} is more than the {format_bytes(room)} of host "
            f"memory that may be taken beside the {format_bytes(pinned_arena.held_bytes())} that "
            f"this process holds already; {remedy} or free memory; nothing was changed",
            size,
            size - room,
            {},
        )
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        pinner = _pinner(device)
        (address,) = pinned_arena.obtain([size], pinner)
    owner = (ctypes.c_char * nbytes).from_address(address)
    Finalizer(owner, _give_back, address, size, pinner, device)
    return torch.frombuffer(owner, dtype=torch.uint8)


def _give_back(address: int, size: int, pinner: Pinner | None, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # kernels may still read it or write it
    pinned_arena.give_back(address, size, pinner)
