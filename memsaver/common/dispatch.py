"""Decides per call which implementation of an operation runs: by argument or tensors' device."""

from typing import Literal

import torch

Impl = Literal["auto", "torch", "triton"]


def use_triton(impl: Impl, device: torch.device) -> bool:
    """`auto` takes the Triton kernel on CUDA and the torch reference elsewhere."""
    if impl not in ("auto", "torch", "triton"):
        raise ValueError(f"unknown impl {impl!r}; use 'auto', 'torch' or 'triton'")
    return impl == "triton" or (impl == "auto" and device.type == "cuda")
