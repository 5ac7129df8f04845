"""Who else may hold physical pages behind a tag's addresses, and is kept away or refused.

A pause unmaps pages and a resume maps others. Who noted the pages themselves, not the addresses, goes on using the old
ones: wrong results, and memory that never comes free. docs/memory-model.md lists everyone; here is what can be checked.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from memsaver.allocator import shim
from memsaver.errors import StateError

GRAPH_REGISTER = "NCCL_GRAPH_REGISTER"
ALLOCATOR_HOOK = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"


def on_a_tag(tensor: torch.Tensor) -> bool:
    """Does the tensor lie on a tag of any saver of this process?"""
    return bool(shim.library().ms_find(tensor.data_ptr()) >= 0)


def registers_graphs() -> bool:
    """Whether NCCL, whose default it is, registers the buffers of captured collectives with the other ranks' GPUs."""
    return os.environ.get(GRAPH_REGISTER, "1") != "0"


def check_capture(tag: str) -> None:
    """``StateError`` before a graph is captured on a tag whose collectives NCCL would register the pages of.

    For graphs that others capture: our own engine's collectives work on buffers outside of tags.
    """
    if not registers_graphs() or not dist.is_available() or not dist.is_initialized():
        return
    if (ranks := dist.get_world_size()) > 1 and "nccl" in dist.get_backend_config():
        raise StateError(
            f"a graph captured on tag {tag!r} may hold collectives, whose buffers NCCL registers with the other ranks "
            f"({ranks} in all): they would use the old pages after a pause; set {GRAPH_REGISTER}=0 before the group is "
            f"made"
        )
