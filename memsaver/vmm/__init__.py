"""Physical memory and addresses: CUDA's or memfd's; pools of pages, pinned host memory, locks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memsaver.vmm.pinned_pages import HUGE_PAGE, Pinner
from memsaver.vmm.registrations import on_a_tag
from memsaver.vmm.torch_usage import empty_torch_cache

if TYPE_CHECKING:
    import torch

    from memsaver.vmm.backend import Backend

__all__ = ["HUGE_PAGE", "Pinner", "empty_torch_cache", "make_backend", "make_pinner", "on_a_tag"]


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
