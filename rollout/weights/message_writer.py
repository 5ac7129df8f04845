"""Weights that come as bytes, from a writer that cannot map the pages: boxes of elements, packed in
a message.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rollout.errors import WeightUpdateError
from rollout.types import PackedBox

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def write_boxes(pages: Tensor, boxes: Sequence[PackedBox], data: Tensor, base: int = 0) -> None:
    """Copy every box of `data` to where it belongs, on the current stream of the pages' device.

    pages: uint8, contiguous; base: byte of the tag's arena at which they begin. data: uint8 on the
    CPU, contiguous. WeightUpdateError names a box outside of either; nothing was written then.
    """
    if data.dtype != torch.uint8 or data.is_cuda or data.dim() != 1 or not data.is_contiguous():
        raise WeightUpdateError(
            f"a message is uint8 on the CPU, in one piece; got {data.dtype} {tuple(data.shape)} on {data.device}"
        )
    for box in boxes:
        if box.at + box.nbytes > data.numel():
            raise WeightUpdateError(
                f"bytes {box.at} to {box.at + box.nbytes} are outside the {data.numel()} sent"
            )
        if box.offset < base or box.end > base + pages.numel():
            raise WeightUpdateError(
                f"bytes {box.offset} to {box.end} are outside the weights, {base} to {base + pages.numel()}"
            )
    arrived = data.to(pages.device)
    for box in boxes:
        bits = _BITS[box.itemsize]
        place = (
            pages[box.offset - base : box.end - base].view(bits).as_strided(box.shape, box.strides)
        )
        place.copy_(arrived[box.at : box.at + box.nbytes].view(bits).view(box.shape))
