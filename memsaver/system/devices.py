"""Name devices across processes and machines; choose between Triton and torch kernels."""

from __future__ import annotations

import socket
from typing import Literal

import torch


def device_key(device: torch.device) -> str:
    """Return "cpu", or the UUID of a GPU ("GPU-...")."""
    if device.type != "cuda":
        return device.type
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def place_of(device: torch.device) -> str:
    """Return a device name that is unique among machines: "host/cpu" or "host/GPU-..."."""
    return f"{socket.gethostname()}/{device_key(device)}"


Impl = Literal["auto", "torch", "triton"]


def use_triton(impl: Impl, device: torch.device) -> bool:
    """Return whether to run the Triton kernel, which "auto" selects on CUDA, instead of torch."""
    if impl not in ("auto", "torch", "triton"):
        raise ValueError(f"unknown impl {impl!r}; use 'auto', 'torch' or 'triton'")
    return impl == "triton" or (impl == "auto" and device.type == "cuda")
