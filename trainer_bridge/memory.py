"""Tensors laid side by side in one block of a saver's tag: nothing between them, so the tag commits what is used."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from memsaver import MemorySaver

_ALIGN = 64  # bytes: whole cache lines, and any vector load on a GPU


def side_by_side(
    specs: Sequence[tuple[tuple[int, ...], torch.dtype]], device: torch.device, saver: MemorySaver | None, tag: str
) -> list[Tensor]:
    """One tensor a (shape, dtype), all in one allocation of `tag` (content host); plain memory without a saver.

    The content is undefined. The tensors keep the block alive.
    """
    starts, end = [], 0
    for shape, dtype in specs:
        starts.append(end)
        end += math.ceil(math.prod(shape) * dtype.itemsize / _ALIGN) * _ALIGN
    if saver is None:
        block = torch.empty(end, dtype=torch.uint8, device=device)
    else:
        block = saver.empty((end,), torch.uint8, tag=tag, content="host")
    views = []
    for start, (shape, dtype) in zip(starts, specs, strict=True):
        nbytes = math.prod(shape) * dtype.itemsize
        views.append(block[start : start + nbytes].view(dtype).view(shape))
    return views
