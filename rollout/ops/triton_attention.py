"""Paged attention in Triton: index tensors of a batch, and kernel launches.

The kernels compute chunked causal prefill and split-KV decode; both pack the query heads of a KV
head. A request's keys are divided at absolute positions (`attention_kernels`). A query's result
therefore depends neither on the batch nor on how the prompt is divided into chunks, and is the same
in prefill and decode, except with latent rows. The launches depend only on the numbers of requests
and query tokens, so a CUDA graph can replay them with other lengths.
"""

import math
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate
from typing import Any

import torch
import triton
from torch import Tensor

from rollout.ops import attention_kernels as kernels
from rollout.ops.torch_attention import BatchShape, StoredKV

_NO_WINDOW = 2**31 - 1  # longer than any request
_MANTISSA = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}  # bits


@dataclass(frozen=True, kw_only=True)
class TritonPlan:
    """Index tensors of a forward pass for `triton_attention`.

    Kernels read rows, places and lengths only from the device: a caller may build a plan over
    static tensors, and refill the tensors between replays of a CUDA graph. A decode request of
    padding has no cached tokens, or one token in any valid row. A prefill chunk of padding has no
    query tokens, and begins after all other chunks.
    """

    req_to_token: Tensor  # slots by request row and position, int32 [rows, max_context_len]
    # int32 [4, requests] on the device, decode requests first: row of req_to_token, first query
    # token, number of cached tokens, number of query tokens.
    meta: Tensor
    num_decode: int  # decode requests
    num_prefill: int  # prefill chunks
    num_query_tokens: int  # of all prefill chunks together, or more
    padded: bool = False  # whether some query tokens are of no request; their results are 0
    kv_lens: tuple[int, ...] = ()  # cached tokens of each request, on the host
    window: int | None = None  # see `plan_torch`
    mapping: Tensor | None = None  # see `plan_torch`

    @property
    def reach(self) -> int:
        """Return the maximum number of keys that a query sees."""
        return self.window or _NO_WINDOW

    @cached_property
    def gathered(self) -> tuple[Tensor, "TritonPlan"]:
        """Return the slots of all cached tokens, and the plan over a packed copy of their rows.

        The slots are int64 [sum(kv_lens)], request by request.
        """
        assert len(self.kv_lens) == self.meta.shape[1], "no lengths on the host"
        device, total = self.meta.device, sum(self.kv_lens)
        lens = self.meta[2].long()
        starts = lens.cumsum(0) - lens
        request = torch.repeat_interleave(lens, output_size=total)
        positions = torch.arange(total, device=device) - starts[request]
        slots = self.req_to_token[self.meta[0][request].long(), positions]
        table = (starts[:, None] + torch.arange(max(self.kv_lens), device=device)).int()
        numbers = torch.arange(len(lens), device=device, dtype=torch.int32)
        meta = torch.cat([numbers[None], self.meta[1:]])
        slots = slots.long() if self.mapping is None else self.mapping[slots]
        return slots, replace(self, req_to_token=table, meta=meta, mapping=None)


def plan_triton(
    shape: BatchShape,
    req_to_token: Tensor,
    window: int | None = None,
    mapping: Tensor | None = None,
) -> TritonPlan:
    """Return the index tensors of a forward pass; arguments as in `plan_torch`."""
    starts = list(accumulate(shape.q_lens, initial=0))[:-1]
    device = req_to_token.device
    numbers = [list(shape.rows), starts, list(shape.kv_lens), list(shape.q_lens)]
    pinned = device.type == "cuda"  # a copy from pageable memory would wait for running kernels
    meta = torch.tensor(numbers, dtype=torch.int32, pin_memory=pinned)
    return TritonPlan(
        req_to_token=req_to_token,
        meta=meta.to(device, non_blocking=True),
        num_decode=shape.num_decode,
        num_prefill=len(shape.rows) - shape.num_decode,
        num_query_tokens=sum(shape.q_lens[shape.num_decode :]),
        kv_lens=tuple(shape.kv_lens),
        window=window,
        mapping=mapping,
    )


def plan_decode(rows: Tensor, positions: Tensor, req_to_token: Tensor) -> TritonPlan:
    """Plan a decode-only forward pass without host synchronization, as CUDA graphs require.

    The plan has no window and no mapping; `dataclasses.replace` adds them. `rows`, the row of each
    request in req_to_token, and `positions`, the position of its query token, are integers [B] on
    the device. `req_to_token` is int32 [rows, max_context_len].
    """
    count = len(rows)
    meta = torch.empty((4, count), dtype=torch.int32, device=req_to_token.device)
    meta[0] = rows
    torch.arange(count, out=meta[1])
    torch.add(positions, 1, out=meta[2])
    meta[3] = 1
    return TritonPlan(
        req_to_token=req_to_token, meta=meta, num_decode=count, num_prefill=0, num_query_tokens=0
    )


def triton_attention(
    q: Tensor,
    stored: StoredKV,
    plan: TritonPlan,
    scale: float,
    out: Tensor,
    lse: Tensor | None = None,
) -> None:
    """Compute causal attention by Triton kernels, and write it to `out`, [T, Hq, Dv] of q's dtype.

    Queries are [T, Hq, D], and `scale`, above 0, is the factor of the scores. Softmax and sums are
    fp32. Products are fp32 too, except products of half-precision tensors. `lse`, if given,
    receives the logarithms of the prefills' softmax sums, fp32 [Hq, T].
    """
    fp8 = _MANTISSA.get(stored.k.dtype, 0) * (-1 if _converts_fp8(q.device) else 1)
    k_cache, v_cache = (kv.view(torch.uint8) if fp8 else kv for kv in (stored.k, stored.v))
    assert q.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == plan.meta.stride(-1) == 1
    table, meta = plan.req_to_token, plan.meta
    read = (q, k_cache, v_cache, stored.scales, table, plan.mapping, meta)
    strides = (
        *q.stride()[:2], *k_cache.stride()[:2], *v_cache.stride()[:2], table.stride(0),
        meta.stride(0),
    )  # fmt: skip
    (heads, dim), (kv_heads, value_dim) = q.shape[1:], v_cache.shape[1:]
    wide, latent = kernels.is_wide(q, k_cache, v_cache), kernels.is_latent(k_cache, v_cache)
    cut = kernels.Cut(heads // kv_heads, dim, value_dim, wide, latent, fp8)
    log2_scale = scale * math.log2(math.e)
    if plan.num_decode:
        blocks = kernels.decode_blocks(cut, windowed=plan.window is not None)
        _launch_decode(read, strides, out, plan, log2_scale, blocks)
    if plan.num_prefill:
        blocks = kernels.prefill_blocks(cut, windowed=plan.window is not None)
        rows = plan.num_query_tokens * blocks["GROUP"]
        kernels.prefill[(rows // blocks["BLOCK_M"] + plan.num_prefill, kv_heads)](
            *read, out, lse, *strides, *out.stride()[:2], 0 if lse is None else lse.stride(0),
            plan.num_decode, plan.num_prefill, plan.reach, log2_scale, **blocks,
        )  # fmt: skip


@cache
def _converts_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _launch_decode(
    read: tuple[Tensor | None, ...],
    strides: tuple[int, ...],
    out: Tensor,
    plan: TritonPlan,
    log2_scale: float,
    blocks: dict[str, Any],
) -> None:
    """Launch the decode kernels, which write `out` [T, Hq, Dv].

    `read` are the leading arguments, which decode and prefill kernels share, and `strides` their
    strides in the kernels' order. `log2_scale` is the factor of the scores times log2(e). `blocks`
    is the result of `decode_blocks`.
    """
    (heads, value_dim), count, group = out.shape[1:], plan.num_decode, blocks["GROUP"]
    splits = kernels.split_count(plan.req_to_token.shape[1])
    if plan.window is not None:  # which may begin at any place of a split
        splits = min(splits, triton.cdiv(plan.window, kernels.MIN_SPLIT.value) + 1)
    if splits == 1:
        part, state = out.unsqueeze(2), None
    else:
        part = out.new_empty((count, heads, splits, value_dim), dtype=torch.float32)
        state = out.new_empty((count, heads, 2, splits), dtype=torch.float32)
    kernels.decode_split[(count, heads // group * triton.cdiv(group, blocks["BLOCK_G"]), splits)](
        *read, part, state, *strides, *part.stride()[:2], splits, plan.reach, log2_scale, **blocks
    )
    if state is not None:
        meta, block = plan.meta, blocks["BLOCK_V"]
        kernels.decode_combine[(count, heads)](
            part, state, read[3], meta, out, meta.stride(0), *out.stride()[:2], splits, plan.reach,
            WINDOWED=blocks["WINDOWED"], VALUE_DIM=value_dim, BLOCK_V=block,
            num_warps=kernels.combine_warps(block), enable_fp_fusion=blocks["enable_fp_fusion"],
        )  # fmt: skip
