"""Tells who else may hold physical pages behind a tag's addresses, and is kept away or refused.

A pause unmaps pages and a resume maps others. Who noted the pages themselves, not the addresses,
goes on using the old ones: wrong results, and memory that never comes free. docs/memory-model.md
lists everyone; here is what can be checked.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from memsaver.errors import StateError
from memsaver.native import shim

GRAPH_REGISTER = "NCCL_GRAPH_REGISTER"
ALLOCATOR_HOOKS = (  # either; the second is torch's older name
    "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
    "NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
)


def on_a_tag(tensor: torch.Tensor) -> bool:
    """Does the tensor lie on a tag of any saver of this process?"""
    return bool(shim.library().ms_find(tensor.data_ptr()) >= 0)


def registers_graphs() -> bool:
    """Tells whether NCCL, whose default it is, registers the buffers of captured collectives with
    the other ranks' GPUs.
    """
    return os.environ.get(GRAPH_REGISTER, "1") != "0"


def keep_graphs_unregistered() -> None:
    """Have NCCL register no buffers of captured collectives, in this process and those it starts.

    Does nothing where the variable is set already, or a group is made: NCCL reads it once.
    """
    if not dist.is_available() or not dist.is_initialized():
        os.environ.setdefault(GRAPH_REGISTER, "0")


def registering_hook() -> str | None:
    """The variable that has torch register all segments of its allocator, tags' too, with NCCL."""
    on = ("1", "y", "yes", "t", "true")
    return next((name for name in ALLOCATOR_HOOKS if os.environ.get(name, "").lower() in on), None)


def check_segments() -> None:
    """Raises ``StateError`` before tags get segments of torch's allocator that NCCL registers."""
    if name := registering_hook():
        raise StateError(
            f"{name} is set: torch registers the pages of all its segments with NCCL, tags' too, "
            f"which would use the old ones after a pause; unset it"
        )


def check_capture(tag: str) -> None:
    """Raises ``StateError`` before a graph is captured on a tag whose collectives NCCL would
    register the pages of.

    Serves graphs that others capture: our own engine's collectives work on buffers outside of tags.
    """
    if not registers_graphs() or not dist.is_available() or not dist.is_initialized():
        return
    if (ranks := dist.get_world_size()) > 1 and "nccl" in dist.get_backend_config():
        raise StateError(
            f"a graph captured on tag {tag!r} may hold collectives, "
            f"whose buffers NCCL registers with the other ranks ({ranks} in all): "
            "they would use the old pages after a pause; "
            f"set {GRAPH_REGISTER}=0 before the group is made"
        )
