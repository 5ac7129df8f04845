"""Dtypes by name, as manifests and plans carry them."""

import torch


def itemsize(dtype: str) -> int:
    """Counts the bytes of an element of "float32", "bfloat16", ..."""
    return torch_dtype(dtype).itemsize


def torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no torch dtype")
    return dtype
