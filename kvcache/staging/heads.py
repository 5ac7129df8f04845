"""Tells which KV heads a prefill rank sends to a decode rank of another tensor-parallel size.

A rank of n holds `heads / n` heads in a row; where there are fewer heads than ranks, `n / heads`
ranks in a row hold the same one. Both sides compute the same plain numbers: nobody has to be asked.
"""

from typing import NamedTuple


class HeadSlice(NamedTuple):
    """Holds what one writer sends to a reader: heads from `src_head_start` of its own to
    `dst_head_start` of the reader's.
    """

    src_tp_rank: int
    src_head_start: int
    dst_head_start: int
    num_heads: int


def compute_head_slice_params(
    src_attn_tp_size: int,
    dst_attn_tp_size: int,
    src_tp_rank: int,
    dst_tp_rank: int,
    total_kv_heads: int,
) -> tuple[int, int, int, int]:
    """`(src_head_start, num_heads_to_send, dst_head_start, num_heads_to_send)`; starts count from a
    rank's first head.

    All zeros where this source has nothing to send to this destination. Every head of a destination
    has exactly one writer; among sources that hold the same head the destinations are dealt out.
    The sizes need not divide each other. ValueError for a rank outside its size, and where heads
    and ranks do not divide: some heads would have no place.
    """
    src_first, src_heads, replicas = _held("source", src_attn_tp_size, src_tp_rank, total_kv_heads)
    dst_first, dst_heads, _ = _held("destination", dst_attn_tp_size, dst_tp_rank, total_kv_heads)
    first = max(src_first, dst_first)
    count = min(src_first + src_heads, dst_first + dst_heads) - first
    if count <= 0 or src_tp_rank % replicas != dst_tp_rank % replicas:
        return 0, 0, 0, 0
    return first - src_first, count, first - dst_first, count


def head_writers(
    src_attn_tp_size: int, dst_attn_tp_size: int, dst_tp_rank: int, total_kv_heads: int
) -> tuple[HeadSlice, ...]:
    """All that send to a destination rank, by source rank: their heads follow each other without
    gaps.
    """
    found = []
    for src in range(src_attn_tp_size):
        src_start, count, dst_start, _ = compute_head_slice_params(
            src_attn_tp_size, dst_attn_tp_size, src, dst_tp_rank, total_kv_heads
        )
        if count:
            found.append(HeadSlice(src, src_start, dst_start, count))
    return tuple(found)


def heads_per_rank(tp_size: int, total_kv_heads: int) -> int:
    """KV heads that each of `tp_size` ranks holds; ValueError where they do not divide."""
    return _held("a", tp_size, 0, total_kv_heads)[1]


def _held(side: str, size: int, rank: int, total: int) -> tuple[int, int, int]:
    """First head of the rank, how many it holds, how many ranks hold the same."""
    if size < 1 or total < 1:
        raise ValueError(
            f"{side} tensor-parallel size {size} and {total} KV heads must be positive"
        )
    if not 0 <= rank < size:
        raise ValueError(f"{side} rank {rank} is outside its tensor-parallel size of {size}")
    if max(size, total) % min(size, total):
        raise ValueError(
            f"{total} KV heads can't be split over {side} tensor-parallel size {size}; "
            "one must divide the other"
        )
    replicas = max(1, size // total)
    heads = max(1, total // size)
    return rank // replicas * heads, heads, replicas
