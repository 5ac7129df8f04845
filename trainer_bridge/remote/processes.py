"""The device and the process group that FSDP needs, also for one process alone."""

from __future__ import annotations

import torch
import torch.distributed as dist


def use_device(name: str) -> torch.device:
    """The device of that name; a GPU with its number, and current from here on."""
    device = torch.device(name)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.set_device(device)
    return device


def ensure_process_group(device: torch.device) -> bool:
    """Join the default group, or make one of this process only. True if it was made here and is the caller's to end.

    A group that is there must suit the device: gloo for the CPU, NCCL for CUDA.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    if not dist.is_initialized():
        device_id = device if device.type == "cuda" else None
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=device_id)
        return True
    if backend not in str(dist.get_backend_config()):
        raise ValueError(f"device {device} needs a process group with {backend}, this process has {dist.get_backend()}")
    return False


def sum_ranks(values: list[float], device: torch.device) -> list[float]:
    """Element by element over the ranks, in fp64."""
    if dist.get_world_size() == 1:
        return values
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.tolist()
