"""Measure and release torch's memory outside of tags; refuse libraries that hold on to pages.

A pause unmaps pages and a resume maps others. A library that has registered the pages instead of
the addresses keeps using the old ones: results are wrong, and the memory is never freed.
docs/memory-model.md lists such libraries; the functions here detect some of them.
"""

import os
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from memsaver.errors import StateError
from memsaver.native import cuda_hook, shim

_PAGES = {"small": 2 << 20, "large": 20 << 20}  # bytes of a page in expandable segments


def outside_tags(segments: Iterable[Mapping[str, Any]], index: int) -> dict[str, int]:
    """Return the bytes of a GPU that torch holds outside of all tags of this process, by name.

    Names are torch's cache, its tensors, and private pools (temporaries of graphs). ``segments``
    are torch's `memory_snapshot`.
    """
    cache, tensors, pools = 0, 0, 0
    for segment in segments:
        if segment["device"] != index or shim.library().ms_find(segment["address"]) >= 0:
            continue
        if tuple(segment["segment_pool_id"]) != (0, 0):
            pools += segment["total_size"]
        else:
            tensors += segment["allocated_size"]
            cache += segment["total_size"] - segment["allocated_size"]
    return {"torch's cache": cache, "torch's tensors": tensors, "torch's private pools": pools}


def releasable(segments: Iterable[Mapping[str, Any]], index: int) -> int:
    """Return the bytes of a GPU that torch releases when its cache is emptied.

    In ``segments``, torch's `memory_snapshot`, these are segments without tensors, outside of tags
    and pools, and the unused pages of expandable segments.
    """
    return sum(
        _unused_pages(segment) if segment["is_expandable"] else segment["total_size"]
        for segment in segments
        if segment["device"] == index
        and tuple(segment["segment_pool_id"]) == (0, 0)
        and (segment["is_expandable"] or not segment["active_size"])
        and shim.library().ms_find(segment["address"]) < 0
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
    """Reader of torch's memory use for one saver, which owns torch's peak counter of the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last_allocated: Hashable = None
        self._on_tags = 0

    def take(self, allocated: Hashable) -> tuple[int, int, int | None]:
        """Read torch's memory use outside of pools, and reset its peak.

        ``allocated`` is a value that changes whenever tags gain or lose allocations. Only then are
        the bytes of pools measured again, which takes milliseconds.

        Returns:
            (bytes reserved now, most reserved since the last call, bytes used on the device by all
            processes, None on the CPU).
        """
        if self._device.type != "cuda":
            return 0, 0, None
        if allocated != self._last_allocated:
            self._last_allocated, self._on_tags = allocated, self._pools()
        now = torch.cuda.memory_reserved(self._device)
        peak = torch.cuda.max_memory_reserved(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        return now - self._on_tags, peak - self._on_tags, total - free

    def _pools(self) -> int:
        """Return the bytes of segments in pools, which belong to regions and graphs on tags."""
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        return sum(
            segment["total_size"]
            for segment in torch.cuda.memory_snapshot(include_traces=False)
            if segment["device"] == index and tuple(segment["segment_pool_id"]) != (0, 0)
        )


_workspaces_in_graphs = False


def hold_workspaces() -> None:
    """Keep this process's cuBLAS workspaces from now on.

    Graphs captured by another project, such as vLLM, write to the workspaces, and would overwrite
    the next tensor at their address if they were freed.
    """
    global _workspaces_in_graphs
    _workspaces_in_graphs = True


def clear_workspaces(device: torch.device | None = None) -> None:
    """Free cuBLAS's workspaces, unless ``hold_workspaces`` was called.

    torch keeps a workspace forever, and one in a cached block keeps the whole segment, which may be
    as large as a batch's logits.
    """
    torch.cuda.synchronize(device)
    if not _workspaces_in_graphs:
        torch._C._cuda_clearCublasWorkspaces()


def empty_torch_cache(device: torch.device) -> None:
    """Release torch's cached blocks and cuBLAS's workspaces after the work on the device is done.

    On the CPU there is nothing to release.
    """
    if device.type == "cuda":
        clear_workspaces(device)
        with cuda_hook.outside_regions():
            cuda_hook.empty_cache(device)


GRAPH_REGISTER = "NCCL_GRAPH_REGISTER"
ALLOCATOR_HOOKS = (  # two names of one variable, torch's older one last
    "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
    "NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
)


def on_a_tag(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is on a tag of a saver of this process."""
    return bool(shim.library().ms_find(tensor.data_ptr()) >= 0)


def registers_graphs() -> bool:
    """Return whether NCCL registers the buffers of captured collectives with other ranks' GPUs.

    That is its default.
    """
    return os.environ.get(GRAPH_REGISTER, "1") != "0"


def keep_graphs_unregistered() -> None:
    """Disable NCCL's registration of captured collectives, in this process and its children.

    This has no effect if the variable is set already, or if a process group exists, because NCCL
    reads the variable once.
    """
    if not dist.is_available() or not dist.is_initialized():
        os.environ.setdefault(GRAPH_REGISTER, "0")


def registering_hook() -> str | None:
    """Return the variable, if set, that makes torch register all its segments with NCCL."""
    on = ("1", "y", "yes", "t", "true")
    return next((name for name in ALLOCATOR_HOOKS if os.environ.get(name, "").lower() in on), None)


def check_segments() -> None:
    """Raise ``StateError`` if NCCL would register segments that torch's allocator puts on a tag."""
    if name := registering_hook():
        raise StateError(
            f"{name} is set: torch registers the pages of all its segments, tags included, "
            "with NCCL, and NCCL would use the old pages after a pause; unset it"
        )


def check_capture(tag: str) -> None:
    """Raise ``StateError`` if NCCL would register collectives of a graph captured on a tag.

    This is for graphs of other projects: our own engine's collectives use buffers outside of tags.
    """
    if not registers_graphs() or not dist.is_available() or not dist.is_initialized():
        return
    if (ranks := dist.get_world_size()) > 1 and "nccl" in dist.get_backend_config():
        raise StateError(
            f"a graph captured on tag {tag!r} may contain collectives, "
            f"whose buffers NCCL registers with the other ranks ({ranks} in all): "
            "they would use the old pages after a pause; "
            f"set {GRAPH_REGISTER}=0 before the group is made"
        )
