"""Page ids -> token ids for a batch of growing sequences.

The CPU has decided how many and which pages each request gets; what is left is arithmetic. Request r grows from
`prefix_lens[r]` to `seq_lens[r]` tokens: first into the page that `last_loc[r]` is in, then into its new pages.
"""

import torch
import triton
import triton.language as tl

from memsaver.ops.dispatch import Impl, use_triton

# rows of the `meta` argument
PREFIX_LEN, SEQ_LEN, LAST_LOC, OUT_START, PAGE_START = range(5)


def expand_pages(
    meta: torch.Tensor, new_pages: torch.Tensor, page_size: int, total: int, max_extend: int, impl: Impl = "auto"
) -> torch.Tensor:
    """Token ids, int64 `[total]`, of the tokens that a batch of n requests gains, in request order.

    meta: contiguous int64 `[5, n]`, rows: length before, length after, token id of the last token before (-1 without
        one), where the request's ids start in the result, where its pages start in `new_pages`.
    new_pages: contiguous int64 `[m]`, page ids in request order, ceil(seq / ps) - ceil(prefix / ps) of them a request.
    total: sum of the gains; max_extend: the largest gain. Both are known on the CPU, so nothing here synchronises.
    """
    if total == 0:
        return torch.empty(0, dtype=torch.int64, device=meta.device)
    if use_triton(impl, meta.device):
        return _expand_triton(meta, new_pages, page_size, total, max_extend)
    return _expand_torch(meta, new_pages, page_size, total)


def _expand_torch(meta: torch.Tensor, new_pages: torch.Tensor, page_size: int, total: int) -> torch.Tensor:
    gains = meta[SEQ_LEN] - meta[PREFIX_LEN]
    prefix, _, last_loc, out_start, page_start = meta.repeat_interleave(gains, dim=1, output_size=total)
    step = torch.arange(total, device=meta.device) - out_start
    position = prefix + step
    nth = position // page_size - (prefix + page_size - 1) // page_size  # which new page; negative: the partial one
    in_partial = last_loc + 1 + step
    if new_pages.numel() == 0:
        return in_partial
    # entries of the partial page look up some page and drop it
    page = new_pages[torch.where(nth < 0, 0, page_start + nth)]
    return torch.where(nth < 0, in_partial, page * page_size + position % page_size)


def _expand_triton(
    meta: torch.Tensor, new_pages: torch.Tensor, page_size: int, total: int, max_extend: int
) -> torch.Tensor:
    out = torch.empty(total, dtype=torch.int64, device=meta.device)
    block = 32 if max_extend <= 32 else 1024
    n = meta.shape[1]
    with torch.cuda.device_of(out):
        _expand_kernel[(n, triton.cdiv(max_extend, block))](meta, new_pages, out, n, page_size, BLOCK=block)
    return out


@triton.jit
def _expand_kernel(meta, new_pages, out, n, page_size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    r = tl.program_id(0)
    prefix = tl.load(meta + r)
    gain = tl.load(meta + n + r) - prefix
    step = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = step < gain
    last_loc = tl.load(meta + 2 * n + r)
    out_start = tl.load(meta + 3 * n + r)
    page_start = tl.load(meta + 4 * n + r)
    position = prefix + step
    nth = position // page_size - (prefix + page_size - 1) // page_size
    page = tl.load(new_pages + page_start + nth, mask=inside & (nth >= 0), other=0)
    ids = tl.where(nth < 0, last_loc + 1 + step, page * page_size + position % page_size)
    tl.store(out + out_start + step, ids, mask=inside)
