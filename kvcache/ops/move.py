"""Copies slots to other slots of the same pool: dispatch, and the torch reference."""

from collections.abc import Sequence

import torch

from memsaver.common.dispatch import Impl, use_triton


def move_rows(
    parts: Sequence[torch.Tensor], tgt: torch.Tensor, src: torch.Tensor, impl: Impl = "auto"
) -> None:
    """`part[:, tgt[i]] = part[:, src[i]]` for every i and part, as if all were read before any is
    written.

    parts: integers `[L, N, W]`, the same L and N, each with a contiguous last dimension. tgt and
    src: int64 `[n]` on their device, not range-checked; a slot twice in tgt holds any of its rows
    afterwards. Nothing here synchronises.
    """
    if tgt.shape[0] == 0:
        return
    if use_triton(impl, tgt.device):
        from kvcache.ops.move_triton import move_triton

        move_triton(parts, tgt, src)
        return
    for part in parts:
        part[:, tgt] = part[:, src]
