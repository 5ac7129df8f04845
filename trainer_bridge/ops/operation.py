"""Registration of functions as operations of torch, and the size of their kernels' programs."""

from collections.abc import Callable, Sequence
from typing import Any

import torch


def operation(
    fake: Callable[..., Any], mutates_args: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], Any]:
    """Register a function as an operation of torch, which a plan sees as a single kernel.

    `fake` gets the same arguments, and returns tensors as the function does, without content. The
    function writes to its arguments `mutates_args`. It has no gradient of its own.

    `torch.library.custom_op` also compares the storages of arguments and results in each call. In
    an update of a small model this took the host longer than all launches.
    """

    def register(function: Callable[..., Any]) -> Any:
        name = function.__name__
        schema = torch.library.infer_schema(function, mutates_args=mutates_args)
        torch.library.define(f"trainer_bridge::{name}", schema)
        torch.library.impl(f"trainer_bridge::{name}", ("cpu", "cuda"), function)
        torch.library.register_fake(f"trainer_bridge::{name}", fake)
        return getattr(torch.ops.trainer_bridge, name).default

    return register


def warps(elements: int) -> int:
    """Return the warps of a program that works on so many elements at a time."""
    return max(1, min(8, elements // 256))
