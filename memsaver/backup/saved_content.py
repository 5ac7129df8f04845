"""The saved content of one tensor, while its tag is paused."""

from __future__ import annotations

import numpy
import torch

from memsaver.errors import StateError
from memsaver.tag.arena import Arena


def read(arena: Arena, tensor: torch.Tensor, zero_copy: bool) -> torch.Tensor:
    """On the CPU, of the tensor's dtype and shape; see ``MemorySaver.saved``."""
    if arena.backup is None:
        raise StateError(
            f"tag {arena.tag!r} holds no saved content; pause it with content='host' or 'disk'"
        )
    if not tensor.is_contiguous():
        raise ValueError(
            "the saved content of a tensor that is not contiguous cannot be given; ask for its base"
        )
    views = arena.backup.views(tensor.data_ptr() - arena.address, tensor.nbytes)
    if sum(view.numel() for view in views) != tensor.nbytes:
        raise StateError("the tensor was not alive, or had no memory, when its tag was paused")
    if zero_copy and (len(views) != 1 or arena.backup.disk_bytes):
        raise ValueError(
            "zero_copy needs content that is saved in host memory in one piece; use zero_copy=False"
        )
    flat = views[0] if zero_copy else _gathered(views, tensor.nbytes)
    return flat.view(tensor.dtype).view(tensor.shape)


def _gathered(views: list[torch.Tensor], nbytes: int) -> torch.Tensor:
    """One after the other, in memory that is on no tag even if a region is open."""
    flat = torch.from_numpy(numpy.empty(nbytes, dtype=numpy.uint8))
    done = 0
    for view in views:
        flat[done : done + len(view)] = view
        done += len(view)
    return flat
