"""Paged attention in Triton: chunked causal prefill and split-KV decode with the query heads of a KV head packed.

The decode splits have a fixed length, so a request's result does not depend on the batch it is in. All arithmetic is
fp32 (`input_precision="ieee"`), whatever the storage dtype: the interpreter is wrong on bf16.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.ops.attention import BatchShape

SPLIT = 256  # KV tokens a decode program reads


@dataclass(frozen=True, kw_only=True)
class TritonPlan:
    """meta: int32 [4, requests] on the device: row of req_to_token, first query token, tokens cached, query tokens."""

    req_to_token: Tensor
    meta: Tensor
    num_decode: int
    num_prefill: int
    max_decode_len: int
    max_q_len: int


def plan_triton(shape: BatchShape, req_to_token: Tensor) -> TritonPlan:
    starts, start = [], 0
    for q_len in shape.q_lens:
        starts.append(start)
        start += q_len
    meta = torch.tensor([list(shape.rows), starts, list(shape.kv_lens), list(shape.q_lens)], dtype=torch.int32).to(
        req_to_token.device
    )
    return TritonPlan(
        req_to_token=req_to_token,
        meta=meta,
        num_decode=shape.num_decode,
        num_prefill=len(shape.rows) - shape.num_decode,
        max_decode_len=max(shape.kv_lens[: shape.num_decode], default=0),
        max_q_len=max(shape.q_lens[shape.num_decode :], default=0),
    )


def triton_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: TritonPlan, scale: float) -> Tensor:
    """Same contract as `paged_attention`."""
    assert q.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == 1
    out = torch.empty((*q.shape[:2], v_cache.shape[-1]), dtype=q.dtype, device=q.device)
    if plan.num_decode:
        _launch_decode(q, k_cache, v_cache, out, plan, scale)
    if plan.num_prefill:
        _launch_prefill(q, k_cache, v_cache, out, plan, scale)
    return out


def _launch_decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, plan: TritonPlan, scale: float) -> None:
    heads, dim = q.shape[1:]
    kv_heads, value_dim = v_cache.shape[1:]
    splits = triton.cdiv(plan.max_decode_len, SPLIT)
    part = torch.empty((plan.num_decode, heads, splits, value_dim), dtype=torch.float32, device=q.device)
    lse = torch.empty((plan.num_decode, heads, splits), dtype=torch.float32, device=q.device)
    meta, table = plan.meta, plan.req_to_token
    block_v = max(16, triton.next_power_of_2(value_dim))
    _decode_split[(plan.num_decode, kv_heads, splits)](
        q, k_cache, v_cache, table, meta[0], meta[2], part, lse,
        q.stride(0), q.stride(1), k_cache.stride(0), k_cache.stride(1), v_cache.stride(0), v_cache.stride(1),
        table.stride(0), heads, splits, scale,
        GROUP=heads // kv_heads, DIM=dim, VALUE_DIM=value_dim, SPLIT=SPLIT,
        BLOCK_G=max(16, triton.next_power_of_2(heads // kv_heads)), BLOCK_N=min(64, SPLIT),
        BLOCK_D=max(16, triton.next_power_of_2(dim)), BLOCK_V=block_v, num_stages=2,
    )  # fmt: skip
    _decode_combine[(plan.num_decode, heads)](
        part, lse, meta[2], out, out.stride(0), out.stride(1), heads, splits,
        VALUE_DIM=value_dim, SPLIT=SPLIT, BLOCK_V=block_v, BLOCK_SPLITS=triton.next_power_of_2(splits),
    )  # fmt: skip


def _launch_prefill(q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, plan: TritonPlan, scale: float) -> None:
    heads, dim = q.shape[1:]
    kv_heads, value_dim = v_cache.shape[1:]
    meta, table = plan.meta[:, plan.num_decode :], plan.req_to_token
    block_m = 64 if plan.max_q_len > 16 else 16
    _prefill[(triton.cdiv(plan.max_q_len, block_m), plan.num_prefill, heads)](
        q, k_cache, v_cache, table, meta[0], meta[1], meta[2], meta[3], out,
        q.stride(0), q.stride(1), k_cache.stride(0), k_cache.stride(1), v_cache.stride(0), v_cache.stride(1),
        table.stride(0), out.stride(0), out.stride(1), scale,
        GROUP=heads // kv_heads, DIM=dim, VALUE_DIM=value_dim, BLOCK_M=block_m, BLOCK_N=32,
        BLOCK_D=max(16, triton.next_power_of_2(dim)), BLOCK_V=max(16, triton.next_power_of_2(value_dim)),
        num_stages=2,
    )  # fmt: skip


@triton.jit
def _attend_block(  # type: ignore[no-untyped-def]
    query, peak, total, acc, slots, visible, k_head, v_head, stride_k_slot, stride_v_slot, scale,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax. slots: int64 [N]. visible: [M, N] or [1, N]; loads are masked by its columns."""
    dims = tl.arange(0, BLOCK_D)
    value_dims = tl.arange(0, BLOCK_V)
    used = slots >= 0
    keys = tl.load(
        k_head + slots[:, None] * stride_k_slot + dims[None, :], mask=used[:, None] & (dims < DIM)[None, :], other=0.0
    ).to(tl.float32)
    values = tl.load(
        v_head + slots[:, None] * stride_v_slot + value_dims[None, :],
        mask=used[:, None] & (value_dims < VALUE_DIM)[None, :],
        other=0.0,
    ).to(tl.float32)
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
    scores = tl.where(visible, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    shrink = tl.exp(peak - new_peak)
    weights = tl.exp(scores - new_peak[:, None])
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None] + tl.dot(weights, values, input_precision="ieee")
    return new_peak, total, acc


@triton.jit
def _decode_split(  # type: ignore[no-untyped-def]
    q, k_cache, v_cache, table, rows, kv_lens, part, lse,
    stride_q, stride_q_head, stride_k_slot, stride_k_head, stride_v_slot, stride_v_head,
    stride_row, heads, splits, scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Program (request, KV head, split): the GROUP query heads over one split, normalised, with its log-sum-exp."""
    request, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_len = tl.load(kv_lens + request)
    first = split * SPLIT
    if first < kv_len:
        row = tl.load(rows + request).to(tl.int64)
        group = tl.arange(0, BLOCK_G)
        dims = tl.arange(0, BLOCK_D)
        value_dims = tl.arange(0, BLOCK_V)
        q_head = kv_head * GROUP + group
        query = tl.load(
            q + request.to(tl.int64) * stride_q + q_head[:, None] * stride_q_head + dims[None, :],
            mask=(group < GROUP)[:, None] & (dims < DIM)[None, :],
            other=0.0,
        ).to(tl.float32)
        peak = tl.full((BLOCK_G,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_G,), tl.float32)
        acc = tl.zeros((BLOCK_G, BLOCK_V), tl.float32)
        for block in range(SPLIT // BLOCK_N):
            at = first + block * BLOCK_N + tl.arange(0, BLOCK_N)
            slots = tl.load(table + row * stride_row + at, mask=at < kv_len, other=-1).to(tl.int64)
            peak, total, acc = _attend_block(
                query, peak, total, acc, slots, (at < kv_len)[None, :],
                k_cache + kv_head * stride_k_head, v_cache + kv_head * stride_v_head, stride_k_slot, stride_v_slot,
                scale, DIM, VALUE_DIM, BLOCK_D, BLOCK_V,
            )  # fmt: skip
        to = (request * heads + q_head).to(tl.int64) * splits + split
        tl.store(
            part + to[:, None] * VALUE_DIM + value_dims[None, :],
            acc / total[:, None],
            mask=(group < GROUP)[:, None] & (value_dims < VALUE_DIM)[None, :],
        )
        tl.store(lse + to, peak + tl.log(total), mask=group < GROUP)


@triton.jit
def _decode_combine(  # type: ignore[no-untyped-def]
    part, lse, kv_lens, out, stride_out, stride_out_head, heads, splits,
    VALUE_DIM: tl.constexpr, SPLIT: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    """Program (request, query head): the weighted mean of its splits."""
    request, head = tl.program_id(0), tl.program_id(1)
    value_dims = tl.arange(0, BLOCK_V)
    inside = value_dims < VALUE_DIM
    base = (request * heads + head).to(tl.int64) * splits
    split = tl.arange(0, BLOCK_SPLITS)
    used = split * SPLIT < tl.load(kv_lens + request)
    each = tl.load(lse + base + split, mask=used, other=float("-inf"))
    weights = tl.exp(each - tl.max(each, 0))
    values = tl.load(
        part + (base + split)[:, None] * VALUE_DIM + value_dims[None, :],
        mask=used[:, None] & inside[None, :],
        other=0.0,
    )
    result = tl.sum(values * weights[:, None], 0) / tl.sum(weights, 0)
    to = out + request.to(tl.int64) * stride_out + head * stride_out_head + value_dims
    tl.store(to, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _prefill(  # type: ignore[no-untyped-def]
    q, k_cache, v_cache, table, rows, starts, kv_lens, q_lens, out,
    stride_q, stride_q_head, stride_k_slot, stride_k_head, stride_v_slot, stride_v_head,
    stride_row, stride_out, stride_out_head, scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Program (query block, request, query head): causal attention over the cached prefix and the chunk itself."""
    block, request, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    q_len = tl.load(q_lens + request)
    kv_len = tl.load(kv_lens + request)
    first = block * BLOCK_M
    if first < q_len:
        row = tl.load(rows + request).to(tl.int64)
        token = tl.load(starts + request).to(tl.int64)
        members = first + tl.arange(0, BLOCK_M)
        positions = kv_len - q_len + members
        dims = tl.arange(0, BLOCK_D)
        value_dims = tl.arange(0, BLOCK_V)
        query = tl.load(
            q + (token + members)[:, None] * stride_q + head * stride_q_head + dims[None, :],
            mask=(members < q_len)[:, None] & (dims < DIM)[None, :],
            other=0.0,
        ).to(tl.float32)
        peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
        kv_head = head // GROUP
        end = tl.minimum(kv_len, kv_len - q_len + first + BLOCK_M)
        start = 0
        while start < end:  # `range` takes no run-time bound in the interpreter with NumPy 2.4 and later
            at = start + tl.arange(0, BLOCK_N)
            slots = tl.load(table + row * stride_row + at, mask=at < end, other=-1).to(tl.int64)
            peak, total, acc = _attend_block(
                query, peak, total, acc, slots, (at[None, :] <= positions[:, None]) & (at < end)[None, :],
                k_cache + kv_head * stride_k_head, v_cache + kv_head * stride_v_head, stride_k_slot, stride_v_slot,
                scale, DIM, VALUE_DIM, BLOCK_D, BLOCK_V,
            )  # fmt: skip
            start += BLOCK_N
        tl.store(
            out + (token + members)[:, None] * stride_out + head * stride_out_head + value_dims[None, :],
            (acc / total[:, None]).to(out.dtype.element_ty),
            mask=(members < q_len)[:, None] & (value_dims < VALUE_DIM)[None, :],
        )
