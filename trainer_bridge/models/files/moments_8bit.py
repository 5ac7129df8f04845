"""The moments of AdamW in 8 bits: codes and scales, also for another number of ranks.

Codes and scales follow Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2022,
arXiv:2110.02861). A block is `BLOCK` consecutive elements of a rank's flattened shard. An element
of a moment is its block's scale times the entry of a table that its code selects.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from trainer_bridge.sync.shards import Box, Ints, chunk, local_shard, shard_box

BLOCK = 256  # elements; fixed in the kernels
CHUNK = 1 << 24  # elements in a call, whole blocks; a call on the CPU takes 20 bytes for each
_LEAST = 4096  # elements of the smallest matrix that is quantized, as in bitsandbytes
FIRST, SECOND = _MOMENTS = "exp_avg", "exp_avg_sq"
CODES, SCALES = "_codes", "_scales"
Spec = tuple[Ints, torch.dtype]


@functools.cache
def code_tables() -> dict[str, tuple[float, ...]]:
    """Import bitsandbytes, and return the 256 values that codes stand for, by moment.

    Under a dispatch mode without content, call it before the mode begins.
    """
    # On some CPUs, the import warns that a kernel for 4-bit inference is missing.
    logging.getLogger("bitsandbytes.backends.cpu").setLevel(logging.ERROR)
    from bitsandbytes.functional import create_dynamic_map

    return {name: tuple(create_dynamic_map(signed=name == FIRST).tolist()) for name in _MOMENTS}


def zero_code(moment: str) -> int:
    """Return the code that stands for 0. bitsandbytes codes 0 on the CPU as a small number."""
    return code_tables()[moment].index(0.0)


def moment_specs(shape: Ints, local: Ints, parts: Ints) -> dict[str, Spec]:
    """Return the shapes and dtypes of one rank's part of both moments, by name.

    Moments of vectors and of small matrices are stored in fp32.

    Args:
        shape: Shape of the whole parameter.
        local: Shape of the rank's shard.
        parts: Number of shards along each dimension.

    Returns:
        For a quantized parameter: codes in the shard's shape, and scales of as many blocks as the
        largest shard has, in a shape with a leading 1 for each of the parameter's dimensions.
    """
    if len(shape) < 2 or math.prod(shape) < _LEAST:
        return dict.fromkeys(_MOMENTS, (local, torch.float32))
    largest = math.prod(-(-size // count) for size, count in zip(shape, parts, strict=True))
    scales = (*[1] * len(shape), -(-largest // BLOCK))
    specs: dict[str, Spec] = {}
    for name in _MOMENTS:
        specs[f"{name}{CODES}"] = local, torch.uint8
        specs[f"{name}{SCALES}"] = scales, torch.float32
    return specs


def is_scales(name: str) -> bool:
    """Return whether a checkpoint's tensor has scales, whose shape depends on the sharding."""
    return any(f".{moment}{SCALES}." in name for moment in _MOMENTS)


def requantize(tensors: Mapping[str, Tensor], name: str, stored: Tensor) -> None:
    """Adapt loaded codes of a moment to this rank's blocks, and set the blocks' scales.

    A block whose elements had one scale keeps its bits. Other blocks are quantized again.

    Args:
        tensors: This rank's shards by name; codes have been loaded and scales have not.
        name: Name of the scales.
        stored: All scales of the checkpoint, which belong to other shards.
    """
    from bitsandbytes import functional as kernels

    moment = next(moment for moment in _MOMENTS if f".{moment}{SCALES}." in name)
    table = torch.tensor(code_tables()[moment], dtype=torch.float32)
    codes = tensors[name.replace(f".{moment}{SCALES}.", f".{moment}{CODES}.", 1)]
    own, scales = local_shard(codes).view(-1), local_shard(tensors[name]).view(-1)
    old_scales = _scale_of_each(stored, tuple(codes.shape), shard_box(codes))
    for start in range(0, own.numel(), CHUNK):
        scale = old_scales[start : start + CHUNK]
        before = own[start : start + CHUNK].cpu()
        values = table[before.int()] * scale
        after, quantized = kernels.quantize_blockwise(values, code=table, blocksize=BLOCK)
        after = after.masked_fill(values == 0, zero_code(moment))
        high, low = _maxima(scale), -_maxima(-scale)
        keep = high == low
        kept = keep.repeat_interleave(BLOCK)[: len(before)]
        own[start : start + CHUNK] = torch.where(kept, before, after).to(own.device)
        first = start // BLOCK
        scales[first : first + len(keep)] = torch.where(keep, high, quantized.absmax).to(own.device)


def _scale_of_each(stored: Tensor, shape: Ints, mine: Box) -> Tensor:
    """Return the stored scale of every element of a box of a parameter, flattened."""
    parts = stored.shape[:-1]
    out = torch.empty(mine.shape)
    for place in itertools.product(*map(range, parts)):
        sides = [chunk(*side) for side in zip(shape, parts, place, strict=True)]
        box = Box(tuple(first for first, _ in sides), tuple(size for _, size in sides))
        if both := box.intersect(mine):
            spread = stored[place].repeat_interleave(BLOCK)[: box.volume].view(box.shape)
            out[both.within(mine)] = spread[both.within(box)]
    return out.view(-1)


def _maxima(values: Tensor) -> Tensor:
    """Return the maximum of every block; the last block may be shorter."""
    return max_pool1d(values.view(1, 1, -1), BLOCK, ceil_mode=True).view(-1)
