"""Manage physical memory and addresses (CUDA or memfd), page pools, and pinned host memory."""

import contextlib
import ctypes

import torch

from memsaver.errors import BackendError, HostMemoryError, format_bytes
from memsaver.memory import pinned_arena
from memsaver.memory.backend import Backend
from memsaver.memory.caching_allocator import CachingAllocator
from memsaver.memory.memfd import HostBackend
from memsaver.memory.pinned_arena import HUGE_PAGE, Pinner
from memsaver.memory.torch_allocator import clear_workspaces, empty_torch_cache, on_a_tag
from memsaver.ops.layout import round_up
from memsaver.system.interrupts import Finalizer

__all__ = [
    "CachingAllocator",
    "as_device",
    "clear_workspaces",
    "empty_torch_cache",
    "host_memory",
    "make_backend",
    "on_a_tag",
]


def as_device(device: str | torch.device) -> torch.device:
    """Return the device, or raise ``ValueError`` if it is neither the CPU nor a GPU."""
    with contextlib.suppress(RuntimeError):  # torch's message lists twenty device types
        if (known := torch.device(device)).type in ("cpu", "cuda"):
            return known
    raise ValueError(f"device {str(device)!r} is not supported: use 'cpu' or 'cuda:N'")


def make_backend(device: torch.device, limit_bytes: int | None = None) -> Backend:
    """Create the backend of a device, which commits at most ``limit_bytes`` (None: no limit).

    Raises:
        BackendError: This process cannot use the GPU, or NVIDIA's Python bindings are missing.
    """
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
            f"device {str(device)!r} cannot be used: torch {torch.__version__} sees "
            f"{count or 'no'} GPU{'s' * (count > 1)}; "
            "use another device, or see what `memsaver doctor` says"
        )


def _pinner(device: torch.device) -> Pinner | None:
    if device.type != "cuda":
        return None
    from memsaver.memory.cuda import CudaBackend

    return CudaBackend.pinner


def host_memory(nbytes: int, device: torch.device, what: str, remedy: str) -> torch.Tensor:
    """Return a uint8 tensor ``[nbytes]`` in host memory that is pinned if ``device`` is a GPU.

    The memory is zeroed, resident, and aligned to 2 MiB. It occupies a multiple of 2 MiB, and is
    released with the last tensor on it. Error messages contain ``what``, a name of the memory, and
    ``remedy``.

    Raises:
        HostMemoryError: The machine or the container has too little room (``room_bytes``). Nothing
            was allocated.
    """
    size, room = round_up(nbytes, HUGE_PAGE), max(0, pinned_arena.room_bytes())
    if size > room:
        raise HostMemoryError(
            f"{what} of {format_bytes(size)} is more than the {format_bytes(room)} of host "
            "memory that may be taken in addition to the "
            f"{format_bytes(pinned_arena.held_bytes())} that this process holds; "
            f"{remedy} or free memory; nothing was changed",
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
