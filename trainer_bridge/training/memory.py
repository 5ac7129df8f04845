"""Tensors laid side by side in one block of a saver's tag: little between them, so the tag commits
what is used.
"""

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from memsaver import MemorySaver
from memsaver.common.rounding import round_up

ALIGN = 64  # bytes: whole cache lines, and any vector load on a GPU
_END = 256  # bytes: a rollout's weights end so, and who borrows pages needs all of them


def side_by_side(
    specs: Sequence[tuple[tuple[int, ...], torch.dtype]],
    device: torch.device,
    saver: MemorySaver | None,
    tag: str,
    starts: Sequence[int] | None = None,
) -> list[Tensor]:
    """Makes one tensor a (shape, dtype), all in one allocation of `tag` (content host); plain
    memory without a saver.

    starts: the first byte of each in the block, None: one after the other. The content is
    undefined. The tensors keep the block alive.
    """
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in specs]
    if starts is None:
        starts = [0, *accumulate(round_up(size, ALIGN) for size in sizes)][: len(sizes)]
    ends = (start + size for start, size in zip(starts, sizes, strict=True))
    end = round_up(max(ends, default=0), _END)
    if saver is None:
        block = torch.empty(end, dtype=torch.uint8, device=device)
    else:
        block = saver.empty((end,), torch.uint8, tag=tag, content="host")
    return [
        block[start : start + size].view(dtype).view(shape)
        for start, size, (shape, dtype) in zip(starts, sizes, specs, strict=True)
    ]
