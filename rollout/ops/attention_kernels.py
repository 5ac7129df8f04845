"""The Triton kernels of paged attention, and the compile-time arguments that cut them into
programs, tuned for Hopper.

Half-precision launches contract no products and sums: the compiler would do it in some of a
kernel's loops only, and where one loop ends and the next begins depends on how a prompt is cut into
chunks.

Latent rows (values are a view of the first elements of keys) are read once, as keys and as values.
The rest of the key is the "tail", multiplied by itself: so no block is padded from rank + rope to a
power of two.

Half-precision queries are multiplied on tensor cores with storage of their own dtype or fp8, with
peaks, sums and accumulators in fp32. Anything else, and everything in the interpreter, which is
wrong on bf16, is widened to fp32 right after the load ("wide"). fp8 is loaded as bytes and
converted by the hardware that can (Ada, Hopper), elsewhere and in the interpreter by its bits; bf16
and fp16 hold every value of it. Its scales are read on the device: that of the keys joins the
softmax scale.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcache.ops.quant import decode_fp8

MAX_HEADS = 16  # query heads of a decode program, at most
NUM_SPLITS = tl.constexpr(16)  # decode programs of a request and KV head, at most
MIN_SPLIT = tl.constexpr(256)  # KV tokens worth a program of its own
SPLIT_STEP = tl.constexpr(64)  # a longer split is a multiple of this, to be made of whole blocks


@triton.jit
def _gather(  # type: ignore[no-untyped-def]
    base,
    rows,
    stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    FP8: tl.constexpr = 0,
):
    """[N, BLOCK]: the rows base + rows * stride of WIDTH elements, padded by zeros. FP8: bits of
    mantissa or 0, negative where the hardware converts.
    """
    dims = tl.arange(0, BLOCK)
    at = base + rows[:, None] * stride + dims[None, :]
    values = tl.load(at) if WIDTH == BLOCK else tl.load(at, mask=(dims < WIDTH)[None, :], other=0)
    if FP8 > 0:
        values = decode_fp8(values, FP8)
    elif FP8 < 0:
        values = values.to(tl.float8e4nv if FP8 == -3 else tl.float8e5, bitcast=True).to(tl.float16)
    return values.to(tl.float32) if WIDE else values


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    query, query_tail, peak, total, acc, slots, mapping, start, end, positions, lowest, window,
    k_head, v_head, stride_k_slot, stride_v_slot, scale,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    TAIL: tl.constexpr, WIDE: tl.constexpr, FP8: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Online softmax, base 2, of query [M, D] over the request's tokens [start, end), whose slots
    are at `slots`, those of the cache at `mapping` of these (None: the same).

    TAIL: keys go on behind D, and meet query_tail [M, TAIL] there; values are the keys' first D
    elements.
    CAUSAL: row m sees no token past positions[m], at most end - 1. WINDOWED: row m sees no token up
    to positions[m] - window, and none before `lowest`. Otherwise it sees all; end - start is a
    multiple of BLOCK_N unless CAUSAL. Past the ends the last, or lowest, token's slot is read
    again: loads need no mask and meet no foreign slot.
    """
    for first in tl.range(start, end, BLOCK_N):
        at = first + tl.arange(0, BLOCK_N)
        token = tl.minimum(at, end - 1) if CAUSAL else at
        if WINDOWED:
            token = tl.maximum(token, lowest)
        slot = tl.load(slots + token).to(tl.int64)
        if mapping is not None:
            slot = tl.load(mapping + slot)
        keys = _gather(k_head, slot, stride_k_slot, DIM, BLOCK_D, WIDE, FP8).to(query.dtype)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
        if TAIL:
            tails = _gather(k_head + DIM, slot, stride_k_slot, TAIL, BLOCK_T, WIDE, FP8).to(
                query.dtype
            )
            scores = tl.dot(query_tail, tl.trans(tails), scores, input_precision="ieee")
        scores *= scale
        if CAUSAL:
            scores = tl.where(at[None, :] <= positions[:, None], scores, float("-inf"))
        if WINDOWED:
            scores = tl.where(at[None, :] > positions[:, None] - window, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        # a row may have seen nothing yet: -inf less -inf would be NaN
        origin = tl.where(new_peak == float("-inf"), 0.0, new_peak) if WINDOWED else new_peak
        shrink = tl.exp2(peak - origin)
        weights = tl.exp2(scores - origin[:, None])
        total = total * shrink + tl.sum(weights, 1)
        values = (
            keys
            if TAIL
            else _gather(v_head, slot, stride_v_slot, VALUE_DIM, BLOCK_V, WIDE, FP8).to(query.dtype)
        )
        acc = tl.dot(
            weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee"
        )
        peak = new_peak
    return peak, total, acc


@triton.jit
def _split_length(seen):  # type: ignore[no-untyped-def]
    """Sizes a split by the `seen` tokens of a request alone: at most NUM_SPLITS splits cover it."""
    return tl.maximum(MIN_SPLIT, tl.cdiv(tl.cdiv(seen, NUM_SPLITS), SPLIT_STEP) * SPLIT_STEP)


@triton.jit(do_not_specialize=["stride_meta", "window"])
def decode_split(  # type: ignore[no-untyped-def]
    q, k_cache, v_cache, scales, table, mapping, meta, part, lse,
    stride_q, stride_q_head, stride_k_slot, stride_k_head, stride_v_slot, stride_v_head,
    stride_row, stride_meta, stride_part, stride_part_head, splits, window, scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TAIL: tl.constexpr,
    WIDE: tl.constexpr, FP8: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Program (request, KV head and block of its GROUP query heads, split): these heads over one
    split of the request's last `window` tokens, normalised, with their log2-sum-exp2.

    lse is None where there is one split: part is then the output itself.
    """
    request, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    head_blocks: tl.constexpr = (GROUP + BLOCK_G - 1) // BLOCK_G
    kv_head = (tl.program_id(1) // head_blocks).to(tl.int64)
    kv_len = tl.load(meta + 2 * stride_meta + request)
    seen = tl.minimum(kv_len, window)
    length = _split_length(seen)
    start = kv_len - seen + split * length
    if start < kv_len:
        end = tl.minimum(start + length, kv_len)
        if scales is not None:
            scale *= tl.load(scales)
        row = tl.load(meta + request).to(tl.int64)
        group = tl.program_id(1) % head_blocks * BLOCK_G + tl.arange(0, BLOCK_G)
        head = kv_head * GROUP + tl.minimum(group, GROUP - 1)
        query = _gather(q + request * stride_q, head, stride_q_head, DIM, BLOCK_D, WIDE)
        tail = (
            _gather(q + request * stride_q + DIM, head, stride_q_head, TAIL, BLOCK_T, WIDE)
            if TAIL
            else query
        )
        peak, total, acc = _attend(
            query, tail,
            tl.full((BLOCK_G,), float("-inf"), tl.float32),
            tl.zeros((BLOCK_G,), tl.float32),
            tl.zeros((BLOCK_G, BLOCK_V), tl.float32),
            table + row * stride_row, mapping, start, end,
            tl.full((BLOCK_G,), 0, tl.int32) + end - 1, start, window,
            k_cache + kv_head * stride_k_head, v_cache + kv_head * stride_v_head,
            stride_k_slot, stride_v_slot, scale,
            True, False, DIM, VALUE_DIM, TAIL, WIDE, FP8, BLOCK_N, BLOCK_D, BLOCK_V, BLOCK_T,
        )  # fmt: skip
        dims = tl.arange(0, BLOCK_V)
        to = (
            part
            + request * stride_part
            + split * VALUE_DIM
            + head[:, None] * stride_part_head
            + dims[None, :]
        )
        inside = (group < GROUP)[:, None] & (dims < VALUE_DIM)[None, :]
        if scales is not None:
            acc *= tl.load(scales + 1)
        tl.store(to, (acc / total[:, None]).to(part.dtype.element_ty), mask=inside)
        if lse is not None:
            to = (
                lse
                + (request * (tl.num_programs(1) // head_blocks * GROUP) + head) * splits
                + split
            )
            tl.store(to, peak + tl.log2(total), mask=group < GROUP)


@triton.jit(do_not_specialize=["stride_meta", "window"])
def decode_combine(  # type: ignore[no-untyped-def]
    part, lse, meta, out, stride_meta, stride_out, stride_out_head, splits, window,
    VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    """Program (request, query head): the weighted mean of its splits."""
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seen = tl.minimum(tl.load(meta + 2 * stride_meta + request), window)
    split = tl.arange(0, BLOCK_SPLITS)
    dims = tl.arange(0, BLOCK_V)
    inside = dims < VALUE_DIM
    used = split * _split_length(seen) < seen
    base = (request * tl.num_programs(1) + head) * splits
    each = tl.load(lse + base + split, mask=used, other=float("-inf"))
    values = tl.load(
        part + (base + split)[:, None] * VALUE_DIM + dims[None, :],
        mask=used[:, None] & inside[None, :],
        other=0.0,
    )
    weights = tl.exp2(each - tl.max(each, 0))
    result = tl.sum(values * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(
        out + request * stride_out + head * stride_out_head + dims,
        result.to(out.dtype.element_ty),
        mask=inside,
    )


@triton.jit(do_not_specialize=["stride_meta", "first_request", "window"])
def prefill(  # type: ignore[no-untyped-def]
    q, k_cache, v_cache, scales, table, mapping, meta, out,
    stride_q, stride_q_head, stride_k_slot, stride_k_head, stride_v_slot, stride_v_head,
    stride_row, stride_meta, stride_out, stride_out_head, first_request, window, scale,
    WINDOWED: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    TAIL: tl.constexpr, WIDE: tl.constexpr, FP8: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Program (block of BLOCK_M rows, request, KV head): causal attention over the cached prefix
    and the chunk itself. Row r of a request is its token r // GROUP, query head r % GROUP of the KV
    head. WINDOWED: blocks that no row sees are skipped.
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest first
    request, kv_head = first_request + tl.program_id(1), tl.program_id(2).to(tl.int64)
    q_len = tl.load(meta + 3 * stride_meta + request)
    rows, first_row = q_len * GROUP, block * BLOCK_M
    if first_row < rows:
        kv_len = tl.load(meta + 2 * stride_meta + request)
        row = tl.load(meta + request).to(tl.int64)
        member = first_row + tl.arange(0, BLOCK_M)
        inside = member < rows
        member = tl.minimum(member, rows - 1)  # rows past the last repeat it
        token, last = member // GROUP, (tl.minimum(first_row + BLOCK_M, rows) - 1) // GROUP
        where = tl.load(meta + stride_meta + request) + token.to(tl.int64)
        head = kv_head * GROUP + member % GROUP
        if scales is not None:
            scale *= tl.load(scales)
        offset = where * stride_q + head * stride_q_head
        query = _gather(q, offset, 1, DIM, BLOCK_D, WIDE)
        tail = _gather(q + DIM, offset, 1, TAIL, BLOCK_T, WIDE) if TAIL else query
        peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
        slots = table + row * stride_row
        k_head, v_head = k_cache + kv_head * stride_k_head, v_cache + kv_head * stride_v_head
        prefix = kv_len - q_len
        first, seen = first_row // GROUP, prefix + token
        # no token before is in any row's future
        diagonal = (prefix + first + 1) // BLOCK_N * BLOCK_N
        lowest = 0  # the first token that any row sees
        inner = 0  # from here to the diagonal every row sees every token
        if WINDOWED:
            lowest = tl.maximum(prefix + first + 1 - window, 0)
            inner = tl.minimum(
                tl.cdiv(tl.maximum(prefix + last + 1 - window, 0), BLOCK_N) * BLOCK_N, diagonal
            )
            peak, total, acc = _attend(
                query, tail, peak, total, acc, slots, mapping,
                lowest // BLOCK_N * BLOCK_N, inner, seen, lowest,
                window, k_head, v_head, stride_k_slot, stride_v_slot, scale,
                False, True, DIM, VALUE_DIM, TAIL, WIDE, FP8, BLOCK_N, BLOCK_D, BLOCK_V, BLOCK_T,
            )  # fmt: skip
        peak, total, acc = _attend(
            query, tail, peak, total, acc, slots, mapping, inner, diagonal, seen, lowest,
            window, k_head, v_head, stride_k_slot, stride_v_slot, scale,
            False, False, DIM, VALUE_DIM, TAIL, WIDE, FP8, BLOCK_N, BLOCK_D, BLOCK_V, BLOCK_T,
        )  # fmt: skip
        peak, total, acc = _attend(
            query, tail, peak, total, acc, slots, mapping,
            diagonal, prefix + last + 1, seen, lowest,
            window, k_head, v_head, stride_k_slot, stride_v_slot, scale,
            True, WINDOWED, DIM, VALUE_DIM, TAIL, WIDE, FP8, BLOCK_N, BLOCK_D, BLOCK_V, BLOCK_T,
        )  # fmt: skip
        dims = tl.arange(0, BLOCK_V)
        if scales is not None:
            acc *= tl.load(scales + 1)
        tl.store(
            out + (where * stride_out + head * stride_out_head)[:, None] + dims[None, :],
            (acc / total[:, None]).to(out.dtype.element_ty),
            mask=inside[:, None] & (dims < VALUE_DIM)[None, :],
        )


def is_wide(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
    """Tells whether everything is widened to fp32; otherwise products are those of the
    half-precision tensors.
    """
    stored = {k_cache.dtype, v_cache.dtype}
    half = q.dtype in (torch.bfloat16, torch.float16) and stored <= {q.dtype, torch.uint8}
    return not (half and q.is_cuda)


def is_latent(k_cache: Tensor, v_cache: Tensor) -> bool:
    """Tells whether values are the first elements of their keys, in the same memory."""
    same = k_cache.data_ptr() == v_cache.data_ptr() and k_cache.stride() == v_cache.stride()
    return same and k_cache.dtype == v_cache.dtype and v_cache.shape[2] < k_cache.shape[2]


class Cut(NamedTuple):
    """Describes what programs are cut by: query heads of a KV head, widths of keys and values,
    `is_wide`, `is_latent`, and bits of an fp8 mantissa (see `_gather`).
    """

    group: int
    dim: int
    value_dim: int
    wide: bool
    latent: bool
    fp8: int


def decode_blocks(cut: Cut) -> dict[str, Any]:
    """Compile-time arguments of `decode_split`.

    Only tensor cores need 16 rows; elsewhere padding rows cost time.
    """
    constants = _dims(cut)
    rows = min(MAX_HEADS, triton.next_power_of_2(cut.group))
    # half for the slots, half for what hangs on them: 2 blocks or 1
    stages = 5 if constants["BLOCK_D"] <= 128 else 3
    if cut.wide:
        block_n = 32 if constants["BLOCK_V"] <= 256 else 16
        warps = 4 if rows * constants["BLOCK_V"] <= 1024 else 8
    else:
        # more latent rows at once are spilled while they are converted
        rows, block_n, warps = MAX_HEADS, 32 if cut.fp8 and cut.latent else 64, 4
    tuning = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": cut.wide}
    return {**constants, "BLOCK_G": rows, "BLOCK_N": block_n, **tuning}


def combine_warps(block_v: int) -> int:
    """Warps of a `decode_combine` program: a few registers of each thread for the rows of all
    splits.
    """
    return max(1, block_v // 128)


def prefill_blocks(cut: Cut, windowed: bool = False) -> dict[str, Any]:
    """Compile-time arguments of `prefill`.

    A program computes BLOCK_M rows (query token, head), whatever the batch.
    """
    constants, wide = _dims(cut), cut.wide
    # sums of 512 elements a row: what is just not spilled
    if cut.latent and constants["BLOCK_D"] > 128:
        block_m, block_n = (16, 16) if wide else (16 if cut.fp8 > 0 else 32, 32)
        tuning = {"num_warps": 8, "num_stages": 1 if wide else 3}
    elif wide:
        # without tensor cores registers are the limit: of 128 two programs fit, and none is spilled
        block_m = 64 if constants["BLOCK_D"] <= 64 else 32
        block_n = 64 if constants["BLOCK_D"] == 128 else 32
        # three loops would spill
        tuning = {"num_warps": 8, "num_stages": 2, "maxnreg": 192 if windowed else 128}
    else:
        block_m, block_n = 128, 64 if constants["BLOCK_D"] <= 128 else 32
        tuning = {"num_warps": 8, "num_stages": 3}
    tuning["enable_fp_fusion"] = wide
    return {**constants, "WINDOWED": windowed, "BLOCK_M": block_m, "BLOCK_N": block_n, **tuning}


def _dims(cut: Cut) -> dict[str, Any]:
    """DIM: width of keys, without the tail of latent rows.

    TAIL: its width, 0 where values have rows of their own.
    """
    tail = cut.dim - cut.value_dim if cut.latent else 0
    widths = (cut.dim - tail, cut.value_dim, tail)
    padded = (max(16, triton.next_power_of_2(width)) for width in widths)
    return {
        "GROUP": cut.group,
        "WIDE": cut.wide,
        "FP8": cut.fp8,
        **dict(zip(("DIM", "VALUE_DIM", "TAIL"), widths, strict=True)),
        **dict(zip(("BLOCK_D", "BLOCK_V", "BLOCK_T"), padded, strict=True)),
    }
