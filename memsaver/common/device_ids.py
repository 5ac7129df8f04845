"""Names of devices that mean the same in every process."""

from __future__ import annotations

import socket

import torch


def device_key(device: torch.device) -> str:
    """ "cpu", or a GPU's UUID."""
    if device.type != "cuda":
        return device.type
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def place_of(device: torch.device) -> str:
    """A device of any machine: "host/cpu", "host/GPU-..."."""
    return f"{socket.gethostname()}/{device_key(device)}"
