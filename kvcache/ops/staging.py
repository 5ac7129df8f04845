"""Pages to staged bytes and back: dispatch, checks, and the torch reference.

k `[L, N, H, D]` and v `[L, N, H, Dv]` are all layers of a pool (`kvcache.staging.pool_layers`), of
any strides but a contiguous last dimension, of any element size: bytes are moved as they are. loc:
int64 `[n]`, any stride. Staged bytes are uint8, for one writer `[K0..KL-1, V0..VL-1][token][head]`,
the writers of a range one after the other. All on one device; slots are not range-checked and
nothing synchronises there. Errors are ValueError, before anything is written.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from memsaver.common.machine import Impl, use_triton


@dataclass(frozen=True)
class Writers:
    """Whose heads lie in a staged range, in order: (first head in the pool, heads).

    table: int64 `[writers, 3]` on the device: first head, heads, heads staged before.
    """

    heads: tuple[tuple[int, int], ...]
    table: torch.Tensor

    @staticmethod
    def of(heads: Sequence[tuple[int, int]], device: torch.device | str) -> "Writers":
        """Synchronises: not for every transfer. ValueError where two writers share a head."""
        ends = list(itertools.accumulate(count for _, count in heads))
        pairs = zip(heads, ends, strict=True)
        rows = [(first, count, end - count) for (first, count), end in pairs]
        taken = set[int]().union(*(range(first, first + count) for first, count in heads))
        wrong = any(first < 0 or count < 1 for first, count in heads)
        if not rows or len(taken) != ends[-1] or wrong:
            raise ValueError(
                f"writers (first head, heads) {list(heads)} must be some, "
                "and have no head in common"
            )
        return Writers(tuple(heads), torch.tensor(rows, device=device))

    @property
    def total(self) -> int:
        """Heads of all writers."""
        return sum(count for _, count in self.heads)


def staged_bytes(k: torch.Tensor, v: torch.Tensor, tokens: int, heads: int) -> int:
    """Bytes that `tokens` tokens of `heads` heads take in all layers."""
    return k.shape[0] * tokens * heads * sum(_row_bytes(k, v))


def gather_staged(
    k: torch.Tensor,
    v: torch.Tensor,
    loc: torch.Tensor,
    head_start: int,
    num_heads: int,
    staged: torch.Tensor,
    impl: Impl = "auto",
) -> None:
    """Fills `staged` with `num_heads` heads from `head_start` of slots `loc`, in all layers.

    staged: uint8, contiguous, `staged_bytes(k, v, len(loc), num_heads)` long.
    """
    _check(k, v, loc, staged, [(head_start, num_heads)])
    if len(loc) == 0:
        return
    k, v = (t.view(torch.uint8)[:, :, head_start : head_start + num_heads] for t in (k, v))
    if use_triton(impl, k.device):
        from kvcache.ops.staging_triton import copy_triton

        copy_triton(k, v, loc, staged, [num_heads])
        return
    for pages, part in zip((k, v), _parts(staged, k, v, len(loc), num_heads), strict=True):
        part.copy_(pages[:, loc])


def scatter_staged(
    staged: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    loc: torch.Tensor,
    writers: Writers,
    impl: Impl = "auto",
) -> None:
    """Puts what the writers staged into slots `loc`; heads without a writer here stay.

    staged: as of `gather_staged`, all writers'. A slot named twice holds any of its rows.
    """
    _check(k, v, loc, staged, writers.heads)
    if writers.table.device != k.device:
        raise ValueError(f"writers on {writers.table.device} must be on the pool's {k.device}")
    if len(loc) == 0:
        return
    k, v = k.view(torch.uint8), v.view(torch.uint8)
    if use_triton(impl, k.device):
        from kvcache.ops.staging_triton import copy_triton

        copy_triton(k, v, loc, staged, [count for _, count in writers.heads], writers.table)
        return
    at = 0
    for first, count in writers.heads:
        size = staged_bytes(k, v, len(loc), count)
        parts = _parts(staged[at : at + size], k, v, len(loc), count)
        for pages, part in zip((k, v), parts, strict=True):
            pages[:, loc, first : first + count] = part
        at += size


def _parts(
    staged: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tokens: int, heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """One writer's bytes as keys `[L, tokens, heads, bytes]` and values alike."""
    keys, values = staged.split([k.shape[0] * tokens * heads * row for row in _row_bytes(k, v)])
    shape = (k.shape[0], tokens, heads, -1)
    return keys.view(shape), values.view(shape)


def _row_bytes(k: torch.Tensor, v: torch.Tensor) -> tuple[int, int]:
    return k.shape[3] * k.element_size(), v.shape[3] * v.element_size()


def _check(
    k: torch.Tensor,
    v: torch.Tensor,
    loc: torch.Tensor,
    staged: torch.Tensor,
    heads: Sequence[tuple[int, int]],
) -> None:
    if k.ndim != 4 or v.ndim != 4 or k.shape[:3] != v.shape[:3] or 0 in (k.shape[3], v.shape[3]):
        raise ValueError(
            f"k {tuple(k.shape)} and v {tuple(v.shape)} must be [layers, slots, heads, width] alike"
        )
    if k.stride(3) != 1 or v.stride(3) != 1:
        raise ValueError(f"rows must be contiguous; k has strides {k.stride()}, v {v.stride()}")
    if loc.dtype != torch.int64 or loc.ndim != 1:
        raise ValueError(f"loc must be int64 [n], got {loc.dtype} of shape {tuple(loc.shape)}")
    if not k.device == v.device == loc.device == staged.device:
        raise ValueError(
            f"k, v, loc and staged are on {k.device}, {v.device}, "
            f"{loc.device} and {staged.device}, not one"
        )
    for first, count in heads:
        if first < 0 or count < 1 or first + count > k.shape[2]:
            raise ValueError(f"heads {first} to {first + count} are not in a pool of {k.shape[2]}")
    wanted = staged_bytes(k, v, len(loc), sum(count for _, count in heads))
    if staged.dtype != torch.uint8 or staged.shape != (wanted,) or not staged.is_contiguous():
        raise ValueError(
            f"staged must be contiguous uint8 [{wanted}], "
            f"got {staged.dtype} of shape {tuple(staged.shape)} and strides {staged.stride()}"
        )
