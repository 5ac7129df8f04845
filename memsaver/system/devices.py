"""Name devices across processes and machines; choose between Triton and torch kernels."""

import os
import socket
from hashlib import sha256
from pathlib import Path
from typing import Literal

import torch


def device_key(device: torch.device) -> str:
    """Return "cpu", or the UUID of a GPU ("GPU-...")."""
    if device.type != "cuda":
        return device.type
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def machine() -> str:
    """Return the name of this machine, within which processes can map each other's memory.

    Memory is mapped through abstract Unix sockets, which reach as far as a network namespace. A
    container with its own network therefore counts as a machine. Host names may repeat, so the name
    ends with a hash of the kernel's boot and the namespace.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    network = os.stat("/proc/self/ns/net").st_ino
    return f"{socket.gethostname()}-{sha256(f'{boot} {network}'.encode()).hexdigest()[:8]}"


def place_of(device: torch.device) -> str:
    """Return a device name that is unique among machines: "machine/cpu" or "machine/GPU-..."."""
    return f"{machine()}/{device_key(device)}"


def machine_of(place: str) -> str:
    """Return the machine of a place; empty if the place names none."""
    return place.rpartition("/")[0]


Impl = Literal["auto", "torch", "triton"]


def use_triton(impl: Impl, device: torch.device) -> bool:
    """Return whether to run the Triton kernel, which "auto" selects on CUDA, instead of torch."""
    if impl not in ("auto", "torch", "triton"):
        raise ValueError(f"unknown impl {impl!r}; use 'auto', 'torch' or 'triton'")
    return impl == "triton" or (impl == "auto" and device.type == "cuda")
