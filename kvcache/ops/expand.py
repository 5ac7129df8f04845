"""Page ids -> token ids for a batch of growing sequences.

The CPU has decided how many and which pages each request gets; what is left is arithmetic. Request
r grows from `prefix_lens[r]` to `seq_lens[r]` tokens: first into the page that `last_loc[r]` is in,
then into its new pages.
"""

import torch
import triton
import triton.language as tl

from memsaver.system.machine import Impl, use_triton

# rows of the `meta` argument
PREFIX_LEN, SEQ_LEN, LAST_LOC, OUT_START, PAGE_START = range(5)


def expand_pages(
    meta: torch.Tensor,
    new_pages: torch.Tensor,
    page_size: int,
    total: int,
    max_extend: int,
    impl: Impl = "auto",
) -> torch.Tensor:
    """Token ids, int64 `[total]`, of the tokens that a batch of n requests gains, in request order.

    meta: int64 `[5, n]`, any strides, rows: length before, length after, token id of the last token
        before (-1 without one), where the request's ids start in the result, where its pages start
        in `new_pages`.
    new_pages: int64 `[m]`, any stride, page ids in request order, ceil(seq / ps) - ceil(prefix /
    ps) of them a request.
    total: sum of the gains; max_extend: the largest gain. Both are known on the CPU, so nothing
    here synchronises.
    """
    if total == 0:
        return torch.empty(0, dtype=torch.int64, device=meta.device)
    if use_triton(impl, meta.device):
        out = torch.empty(total, dtype=torch.int64, device=meta.device)
        expand_triton(meta, new_pages, page_size, max_extend, out)
        return out
    return _expand_torch(meta, new_pages, page_size, total)


def _expand_torch(
    meta: torch.Tensor, new_pages: torch.Tensor, page_size: int, total: int
) -> torch.Tensor:
    gains = meta[SEQ_LEN] - meta[PREFIX_LEN]
    prefix, _, last_loc, out_start, page_start = meta.repeat_interleave(
        gains, dim=1, output_size=total
    )
    step = torch.arange(total, device=meta.device) - out_start
    position = prefix + step
    # which new page; negative: the partial one
    nth = position // page_size - (prefix + page_size - 1) // page_size
    in_partial = last_loc + 1 + step
    if new_pages.numel() == 0:
        return in_partial
    # entries of the partial page look up some page and drop it
    page = new_pages[torch.where(nth < 0, 0, page_start + nth)]
    return torch.where(nth < 0, in_partial, page * page_size + position % page_size)


def expand_triton(
    meta: torch.Tensor, new_pages: torch.Tensor, page_size: int, max_extend: int, out: torch.Tensor
) -> None:
    """One launch: writes the ids to contiguous `out`, int64 `[total]`."""
    block = 32 if max_extend <= 32 else 1024
    grid = (meta.shape[1], triton.cdiv(max_extend, block))
    strides = (*meta.stride(), *new_pages.stride())
    with torch.cuda.device_of(out):
        _expand_kernel[grid](meta, new_pages, out, *strides, page_size, BLOCK=block)


@triton.jit
def _expand_kernel(  # type: ignore[no-untyped-def]
    meta, new_pages, out, row_stride, request_stride, page_stride, page_size, BLOCK: tl.constexpr
):
    mine = meta + tl.program_id(0).to(tl.int64) * request_stride
    prefix = tl.load(mine)
    gain = tl.load(mine + row_stride) - prefix
    step = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = step < gain
    last_loc = tl.load(mine + 2 * row_stride)
    out_start = tl.load(mine + 3 * row_stride)
    page_start = tl.load(mine + 4 * row_stride)
    position = prefix + step
    nth = position // page_size - (prefix + page_size - 1) // page_size
    page = tl.load(new_pages + (page_start + nth) * page_stride, mask=inside & (nth >= 0), other=0)
    ids = tl.where(nth < 0, last_loc + 1 + step, page * page_size + position % page_size)
    tl.store(out + out_start + step, ids, mask=inside)
