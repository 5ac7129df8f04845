"""Name devices in every process and machine; choose the kernels that a device runs."""

from __future__ import annotations

import socket
from typing import Literal

import torch


def device_key(device: torch.device) -> str:
    """Return "cpu", or a GPU's UUID."""
    if device.type != "cuda":
        return device.type
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def place_of(device: torch.device) -> str:
    """Name a device of any machine: "host/cpu", "host/GPU-..."."""
    return f"{socket.gethostname()}/{device_key(device)}"


Impl = Literal["auto", "torch", "triton"]


def use_triton(impl: Impl, device: torch.device) -> bool:
    """`auto` takes the Triton kernel on CUDA and the torch reference elsewhere."""
    if impl not in ("auto", "torch", "triton"):
        raise ValueError(f"unknown impl {impl!r}; use 'auto', 'torch' or 'triton'")
    return impl == "triton" or (impl == "auto" and device.type == "cuda")
