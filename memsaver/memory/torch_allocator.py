"""Tells how much of a device torch's allocator holds outside of tags, and has it give that back;
tells who else may hold physical pages behind a tag's addresses, and is kept away or refused.

A pause unmaps pages and a resume maps others. Who noted the pages themselves, not the addresses,
goes on using the old ones: wrong results, and memory that never comes free. docs/memory-model.md
lists everyone; here is what can be checked.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from memsaver.errors import StateError
from memsaver.native import cuda_hook, shim

_PAGES = {"small": 2 << 20, "large": 20 << 20}  # of expandable segments, in bytes


def outside_tags(segments: Iterable[Mapping[str, Any]], index: int) -> dict[str, int]:
    """Bytes that torch holds of this GPU on no tag of any saver of this process, asleep or not:
    cached, of tensors, or of pools of others' (captured graphs' temporaries).

    segments: torch's `memory_snapshot`.
    """
    cache, tensors, pools = 0, 0, 0
    for each in segments:
        if each["device"] != index or shim.library().ms_find(each["address"]) >= 0:
            continue
        if tuple(each["segment_pool_id"]) != (0, 0):
            pools += each["total_size"]
        else:
            tensors += each["allocated_size"]
            cache += each["total_size"] - each["allocated_size"]
    return {"torch's cache": cache, "torch's tensors": tensors, "torch's private pools": pools}


def releasable(segments: Iterable[Mapping[str, Any]], index: int) -> int:
    """Count the bytes of this GPU that torch's cache gives back: segments outside of tags and pools
    that no tensor is in, and the whole pages of expandable ones.
    """
    return sum(
        _unused_pages(each) if each["is_expandable"] else each["total_size"]
        for each in segments
        if each["device"] == index
        and tuple(each["segment_pool_id"]) == (0, 0)
        and (each["is_expandable"] or not each["active_size"])
        and shim.library().ms_find(each["address"]) < 0
    )


def _unused_pages(segment: Mapping[str, Any]) -> int:
    page = _PAGES[segment["segment_type"]]
    unused, at = 0, 0
    for block in segment["blocks"]:
        end = at + block["size"]
        if block["state"] == "inactive":
            unused += max(0, end // page - -(-at // page)) * page
        at = end
    return unused


class TorchUse:
    """Asked again and again by one saver; torch's peak counter of the device is its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seen: Hashable = None
        self._on_tags = 0

    def take(self, allocated: Hashable) -> tuple[int, int, int | None]:
        """(reserved now, most reserved since the last call, bytes used of the whole device, by
        anyone).

        allocated: changes whenever tags gain or lose allocations: torch counts those of its pools
        as its own, and it takes milliseconds to find out which these are.
        """
        if self._device.type != "cuda":
            return 0, 0, None
        if allocated != self._seen:
            self._seen, self._on_tags = allocated, self._pools()
        now = torch.cuda.memory_reserved(self._device)
        peak = torch.cuda.max_memory_reserved(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        return now - self._on_tags, peak - self._on_tags, total - free

    def _pools(self) -> int:
        """Bytes of segments that lie in pools, which are those of regions and graphs on tags."""
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        segments = torch.cuda.memory_snapshot(include_traces=False)
        return sum(
            each["total_size"]
            for each in segments
            if each["device"] == index and tuple(each["segment_pool_id"]) != (0, 0)
        )


_workspaces_in_graphs = False


def hold_workspaces() -> None:
    """Keep cuBLAS's workspaces of this process from now on: graphs that others captured, as vLLM's,
    write to them, and to what lies there next if they are gone.
    """
    global _workspaces_in_graphs
    _workspaces_in_graphs = True


def clear_workspaces(device: torch.device | None = None) -> None:
    """Have cuBLAS take new workspaces, where none is held: torch keeps those it has for ever, and
    one in a cached block keeps the whole segment, which may be as large as a batch's logits.
    """
    torch.cuda.synchronize(device)
    if not _workspaces_in_graphs:
        torch._C._cuda_clearCublasWorkspaces()


def empty_torch_cache(device: torch.device) -> None:
    """Give torch's cached blocks back to the device, once its work is done, cuBLAS's workspaces
    too; nothing to do on the CPU.
    """
    if device.type == "cuda":
        clear_workspaces(device)
        with cuda_hook.outside_regions():
            cuda_hook.empty_cache(device)


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
