"""Triton kernels of paged attention, and their compile-time arguments, tuned for Hopper.

The keys of a sequence are divided at absolute positions, so a query's result has the same bits in
prefill, in decode and in a trainer. Splits have `MIN_SPLIT` keys up to position 32 * MIN_SPLIT, and
from each further power of two on, a sixteenth. In a split, the online softmax starts anew and
runs over blocks of keys in order (`_attend`). The splits of a sequence are folded in order
(`_fold`), whether one program computes them one after the other or each has its own program. The
weights of a block are added as integers (`_sum`). Keys that a query does not see change no bit of
its result.

Half-precision launches disable fused multiply-add (`enable_fp_fusion=False`), except where the code
asks for it: the compiler would fuse in only some of a kernel's loops.

Latent rows, where values are a view of the first elements of keys, are loaded once and used as keys
and as values. The remaining elements of the key, the "tail", are multiplied in a separate product,
so no block is padded from rank + rope to a power of two.

Half-precision queries are multiplied on tensor cores with keys and values of the same dtype or fp8;
peaks, sums and accumulators are fp32. All other inputs are "wide": converted to fp32 after the
load. So are all inputs in the interpreter, which computes bf16 incorrectly. fp8 is loaded as bytes.
Ada and Hopper convert it in hardware; other GPUs and the interpreter convert its bits. bf16 and
fp16 represent all fp8 values. The fp8 scales are read on the device, and the scale of the keys is
multiplied into the softmax scale.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcache.ops.quant import decode_fp8

MAX_HEADS = 16  # maximum number of query heads per decode program
MIN_SPLIT = tl.constexpr(256)  # keys of the shortest splits, a multiple of all blocks of keys
LOG_MIN_SPLIT = tl.constexpr(8)  # of base 2
PARTS = tl.constexpr(16)  # splits from a power of two to the next, above 2 * PARTS * MIN_SPLIT
LOG_PARTS = tl.constexpr(4)
COMBINED = tl.constexpr(16)  # splits that `decode_combine` loads together


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
    """Load the rows base + rows * stride of WIDTH elements, padded with zeros to [N, BLOCK].

    FP8 is the number of mantissa bits, negative where the hardware converts; 0 for other dtypes.
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
def _octave(position):  # type: ignore[no-untyped-def]
    """Return how often the split length has doubled at a position below 2**24."""
    exponent = (tl.cast(position, tl.float32).to(tl.int32, bitcast=True) >> 23) - 127  # of log2
    return tl.maximum(exponent - LOG_PARTS - LOG_MIN_SPLIT, 0)


@triton.jit
def _split_at(position):  # type: ignore[no-untyped-def]
    """Return the number of the split of a position."""
    octave = _octave(position)
    return (position // MIN_SPLIT >> octave) + PARTS * octave


@triton.jit
def _split_bounds(split):  # type: ignore[no-untyped-def]
    """Return the first position of a split, and the first position after it."""
    octave = tl.maximum(split // PARTS, 1) - 1
    first = split - PARTS * octave
    return first * MIN_SPLIT << octave, (first + 1) * MIN_SPLIT << octave


@triton.jit
def _origin(peak):  # type: ignore[no-untyped-def]
    """Return the peak, or 0 if no key was seen: -inf - -inf would be NaN."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def _sum(weights):  # type: ignore[no-untyped-def]
    """Return the sums of rows of weights from 0 to 1, fp32, with the same bits in any order.

    Each weight is rounded to a multiple of 2**-23, and integers are added: a sum of floats would
    depend on the layout, which decode and prefill do not share.
    """
    one: tl.constexpr = 0x3F800000  # bits of 1.0; 1.0 + weight has a step of 2**-23
    steps = (weights + 1.0).to(tl.int32, bitcast=True) - one
    return tl.sum(steps, 1).to(tl.float32) * 2.0**-23


@triton.jit
def _fold(peak, total, acc, next_peak, next_total, next_acc):  # type: ignore[no-untyped-def]
    """Add the state of the next split to the state of all splits before it."""
    top = tl.maximum(peak, next_peak)
    shrink, share = tl.exp2(peak - _origin(top)), tl.exp2(next_peak - _origin(top))
    total = tl.fma(total, shrink, next_total * share)
    acc = tl.fma(acc, tl.broadcast_to(shrink[:, None], acc.shape), next_acc * share[:, None])
    return top, total, acc


@triton.jit
def _finish(total, acc, scales, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the output of a query from its state after all splits."""
    if scales is not None:
        acc *= tl.load(scales + 1)
    return (acc / total[:, None]).to(dtype)


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    query, query_tail, folded_peak, folded_total, folded, peak, total, acc, slots, mapping,
    start, end, split_end, positions, lowest, window,
    k_head, v_head, stride_k_slot, stride_v_slot, scale,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, FOLDS: tl.constexpr, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, TAIL: tl.constexpr, WIDE: tl.constexpr, FP8: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Update the online softmax (base 2) of query [M, D] with a request's tokens [start, end).

    The state of a softmax is its peak, total and accumulator. With FOLDS, the state is folded into
    the folded state at the end of each split; the current split ends at `split_end`. Without FOLDS,
    the tokens are of one split. `start` is a multiple of BLOCK_N.

    Token t is in cache slot slots[t], or mapping[slots[t]] if `mapping` is not None.

    If TAIL is not 0, keys have TAIL elements after the first D, which multiply query_tail
    [M, TAIL], and values are the first D elements of the keys. With CAUSAL, row m sees no token
    after positions[m], which is at most end - 1; without it, end - start is a multiple of BLOCK_N.
    With WINDOWED, row m sees no token up to positions[m] - window, and none before `lowest`.

    Lanes past the ends read the slot of the last or lowest token again. Loads therefore need no
    mask and never read another request's slot.
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
        # After the first product, so that the product of the last values runs meanwhile.
        if FOLDS and first == split_end:
            folded_peak, folded_total, folded = _fold(
                folded_peak, folded_total, folded, peak, total, acc
            )
            peak = tl.full(peak.shape, float("-inf"), tl.float32)
            total, acc = tl.zeros_like(total), tl.zeros_like(acc)
            split_end = first + (MIN_SPLIT << _octave(first))
            scores += 0.0  # keeps the compiler from moving this above the product
        if CAUSAL:
            scores = tl.where(at[None, :] <= positions[:, None], scores, float("-inf"))
        if WINDOWED:
            scores = tl.where(at[None, :] > positions[:, None] - window, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
        # Without mask, every row sees a key of this block.
        origin = _origin(new_peak) if CAUSAL or WINDOWED else new_peak
        shrink = tl.exp2(peak - origin)
        weights = tl.exp2(tl.fma(scores, scale, -tl.broadcast_to(origin[:, None], scores.shape)))
        total = tl.fma(total, shrink, _sum(weights))
        values = (
            keys
            if TAIL
            else _gather(v_head, slot, stride_v_slot, VALUE_DIM, BLOCK_V, WIDE, FP8).to(query.dtype)
        )
        acc = tl.dot(
            weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee"
        )
        peak = new_peak
    return folded_peak, folded_total, folded, peak, total, acc, split_end


@triton.jit(do_not_specialize=["stride_meta", "window"])
def decode_split(  # type: ignore[no-untyped-def]
    q, k_cache, v_cache, scales, table, mapping, meta, part, state,
    stride_q, stride_q_head, stride_k_slot, stride_k_head, stride_v_slot, stride_v_head,
    stride_row, stride_meta, stride_part, stride_part_head, splits, window, scale,
    WINDOWED: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    TAIL: tl.constexpr, WIDE: tl.constexpr, FP8: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Compute attention of a block of query heads over a split of a request's tokens.

    Programs: (request, KV head and block of its GROUP query heads, split of the last `window`
    tokens). Writes the accumulator of the split to `part`, and its peak and total to `state`,
    [requests, heads, 2, splits]. With a single split, `state` is None and `part` is the output.
    A request without cached tokens is padding, and nothing is written for it.
    """
    request, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    head_blocks: tl.constexpr = (GROUP + BLOCK_G - 1) // BLOCK_G
    kv_head = (tl.program_id(1) // head_blocks).to(tl.int64)
    kv_len = tl.load(meta + 2 * stride_meta + request)
    lowest = tl.maximum(kv_len - window, 0) if WINDOWED else 0
    number = split + _split_at(lowest) if WINDOWED else split
    start, end = _split_bounds(number)
    if start < kv_len:
        end = tl.minimum(end, kv_len)
        if WINDOWED:
            start = tl.maximum(start, lowest // BLOCK_N * BLOCK_N)
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
        peak = tl.full((BLOCK_G,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_G,), tl.float32)
        acc = tl.zeros((BLOCK_G, BLOCK_V), tl.float32)
        _, _, _, peak, total, acc, _ = _attend(
            query, tail, peak, total, acc, peak, total, acc,
            table + row * stride_row, mapping, start, end, end,
            tl.full((BLOCK_G,), 0, tl.int32) + kv_len - 1, lowest, window,
            k_cache + kv_head * stride_k_head, v_cache + kv_head * stride_v_head,
            stride_k_slot, stride_v_slot, scale, True, WINDOWED, False,
            DIM, VALUE_DIM, TAIL, WIDE, FP8, BLOCK_N, BLOCK_D, BLOCK_V, BLOCK_T,
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
        if state is not None:
            heads = tl.num_programs(1) // head_blocks * GROUP
            place = state + (request * heads + head) * 2 * splits + split
            tl.store(place, peak, mask=group < GROUP)
            tl.store(place + splits, total, mask=group < GROUP)
            tl.store(to, acc, mask=inside)
        else:
            tl.store(to, _finish(total, acc, scales, part.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["stride_meta", "window"])
def decode_combine(  # type: ignore[no-untyped-def]
    part, state, scales, meta, out, stride_meta, stride_out, stride_out_head, splits, window,
    WINDOWED: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Fold the splits of a request in order. Programs: (request, query head)."""
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kv_len = tl.load(meta + 2 * stride_meta + request)
    if kv_len == 0:  # padding
        return
    used = _split_at(kv_len - 1) + 1
    if WINDOWED:
        used -= _split_at(tl.maximum(kv_len - window, 0))
    dims = tl.arange(0, BLOCK_V)[None, :]
    inside = dims < VALUE_DIM
    row = request * tl.num_programs(1) + head
    place = state + row * 2 * splits + tl.arange(0, 1)
    base = part + row * splits * VALUE_DIM + dims
    peak = tl.full((1,), float("-inf"), tl.float32)
    total, acc = tl.zeros((1,), tl.float32), tl.zeros((1, BLOCK_V), tl.float32)
    for first in tl.range(0, used, COMBINED):
        for number in tl.static_range(COMBINED):  # loads of all of them before the first fold
            split = first + number
            # a block, as Triton 3.9's interpreter rejects a scalar as the mask of a block
            known = split + tl.arange(0, 1) < used
            next_peak = tl.load(place + split, mask=known, other=float("-inf"))
            next_total = tl.load(place + splits + split, mask=known, other=0.0)
            next_acc = tl.load(base + split * VALUE_DIM, mask=inside & known, other=0.0)
            peak, total, acc = _fold(peak, total, acc, next_peak, next_total, next_acc)
    tl.store(
        out + request * stride_out + head * stride_out_head + dims,
        _finish(total, acc, scales, out.dtype.element_ty),
        mask=inside,
    )


@triton.jit
def _chunk_at(  # type: ignore[no-untyped-def]
    block, starts, requests, GROUP: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Return the number of the prefill chunk that a block belongs to, and its number there.

    `starts` has the first token of each of `requests` chunks. So that a program finds its chunk
    without a table, a chunk gets as many blocks as it may need anywhere: one more than the blocks
    that its rows touch if all rows are divided together.
    """
    first, low, high = tl.load(starts), 0, requests
    while high - low > 1:
        middle = (low + high) // 2
        if (tl.load(starts + middle) - first) * GROUP // BLOCK_M + middle <= block:
            low = middle
        else:
            high = middle
    return low, block - (tl.load(starts + low) - first) * GROUP // BLOCK_M - low


@triton.jit(do_not_specialize=["stride_meta", "first_request", "requests", "window"])
def prefill(  # type: ignore[no-untyped-def]
    q, k_cache, v_cache, scales, table, mapping, meta, out, lse,
    stride_q, stride_q_head, stride_k_slot, stride_k_head, stride_v_slot, stride_v_head,
    stride_row, stride_meta, stride_out, stride_out_head, stride_lse, first_request, requests,
    window, scale,
    WINDOWED: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    TAIL: tl.constexpr, WIDE: tl.constexpr, FP8: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Compute causal attention of a prefill chunk over the cached prefix and the chunk itself.

    Programs: (block of BLOCK_M rows of a request, KV head), see `_chunk_at`. Row r of a request is
    its token r // GROUP and query head r % GROUP of the KV head. WINDOWED skips the blocks that no
    row sees. `lse`, if not None, receives the logarithms of the softmax's sums, fp32 [heads,
    tokens].
    """
    place = tl.num_programs(0) - 1 - tl.program_id(0)  # a request's longest programs start first
    starts = meta + stride_meta + first_request
    chunk, block = _chunk_at(place, starts, requests, GROUP, BLOCK_M)
    request, kv_head = first_request + chunk, tl.program_id(1).to(tl.int64)
    q_len = tl.load(meta + 3 * stride_meta + request)
    rows, first_row = q_len * GROUP, block * BLOCK_M
    if first_row < rows:
        kv_len = tl.load(meta + 2 * stride_meta + request)
        row = tl.load(meta + request).to(tl.int64)
        member = first_row + tl.arange(0, BLOCK_M)
        inside = member < rows
        member = tl.minimum(member, rows - 1)  # lanes past the last row repeat it
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
        folded_peak, folded_total, folded = peak, total, acc
        slots = table + row * stride_row
        k_head, v_head = k_cache + kv_head * stride_k_head, v_cache + kv_head * stride_v_head
        prefix = kv_len - q_len
        first, seen = first_row // GROUP, prefix + token
        # every row sees all tokens before the diagonal, if there is no window
        diagonal = (prefix + first + 1) // BLOCK_N * BLOCK_N
        lowest = 0  # the first token that any row sees
        inner = 0  # every row sees all tokens from here to the diagonal
        split_end = MIN_SPLIT + 0 * first  # a tensor, as in the loops
        if WINDOWED:
            lowest = tl.maximum(prefix + first + 1 - window, 0)
            inner = tl.minimum(
                tl.cdiv(tl.maximum(prefix + last + 1 - window, 0), BLOCK_N) * BLOCK_N, diagonal
            )
            _, split_end = _split_bounds(_split_at(lowest))
            folded_peak, folded_total, folded, peak, total, acc, split_end = _attend(
                query, tail, folded_peak, folded_total, folded, peak, total, acc, slots, mapping,
                lowest // BLOCK_N * BLOCK_N, inner, split_end, seen, lowest,
                window, k_head, v_head, stride_k_slot, stride_v_slot, scale, False, True, True,
                DIM, VALUE_DIM, TAIL, WIDE, FP8, BLOCK_N, BLOCK_D, BLOCK_V, BLOCK_T,
            )  # fmt: skip
        folded_peak, folded_total, folded, peak, total, acc, split_end = _attend(
            query, tail, folded_peak, folded_total, folded, peak, total, acc, slots, mapping,
            inner, diagonal, split_end, seen, lowest,
            window, k_head, v_head, stride_k_slot, stride_v_slot, scale, False, False, True,
            DIM, VALUE_DIM, TAIL, WIDE, FP8, BLOCK_N, BLOCK_D, BLOCK_V, BLOCK_T,
        )  # fmt: skip
        folded_peak, folded_total, folded, peak, total, acc, split_end = _attend(
            query, tail, folded_peak, folded_total, folded, peak, total, acc, slots, mapping,
            diagonal, prefix + last + 1, split_end, seen, lowest,
            window, k_head, v_head, stride_k_slot, stride_v_slot, scale, True, WINDOWED, True,
            DIM, VALUE_DIM, TAIL, WIDE, FP8, BLOCK_N, BLOCK_D, BLOCK_V, BLOCK_T,
        )  # fmt: skip
        peak, total, acc = _fold(folded_peak, folded_total, folded, peak, total, acc)
        dims = tl.arange(0, BLOCK_V)
        tl.store(
            out + (where * stride_out + head * stride_out_head)[:, None] + dims[None, :],
            _finish(total, acc, scales, out.dtype.element_ty),
            mask=inside[:, None] & (dims < VALUE_DIM)[None, :],
        )
        if lse is not None:
            sums = (peak + tl.log2(total)) * 0.6931471805599453
            tl.store(lse + head * stride_lse + where, sums, mask=inside)


def split_count(length: int) -> int:
    """Return the number of splits of `length` tokens."""
    last = length - 1
    octave = max(last.bit_length() - 1 - LOG_PARTS.value - LOG_MIN_SPLIT.value, 0)
    return (last // MIN_SPLIT.value >> octave) + PARTS.value * octave + 1


def is_wide(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
    """Return whether inputs are converted to fp32 after the load, see the module docstring."""
    stored = {k_cache.dtype, v_cache.dtype}
    half = q.dtype in (torch.bfloat16, torch.float16) and stored <= {q.dtype, torch.uint8}
    return not (half and q.is_cuda)


def is_latent(k_cache: Tensor, v_cache: Tensor) -> bool:
    """Return whether values are the first elements of their keys, in the same memory."""
    same = k_cache.data_ptr() == v_cache.data_ptr() and k_cache.stride() == v_cache.stride()
    return same and k_cache.dtype == v_cache.dtype and v_cache.shape[2] < k_cache.shape[2]


class Cut(NamedTuple):
    """Properties of a launch that determine the size of its programs."""

    group: int  # query heads per KV head
    dim: int  # width of keys
    value_dim: int  # width of values
    wide: bool  # result of `is_wide`
    latent: bool  # result of `is_latent`
    fp8: int  # mantissa bits of fp8 storage, see `_gather`


@cache
def decode_blocks(cut: Cut, windowed: bool = False) -> dict[str, Any]:
    """Return the compile-time arguments of `decode_split`.

    Only tensor cores need 16 rows; without them, padding rows cost time.
    """
    constants = _dims(cut)
    rows = min(MAX_HEADS, triton.next_power_of_2(cut.group))
    # half of the stages load slots, half load the rows in these slots: 2 blocks or 1
    stages = 5 if constants["BLOCK_D"] <= 128 else 3
    if cut.wide:
        warps = 4 if rows * constants["BLOCK_V"] <= 1024 else 8
    else:
        rows, warps = MAX_HEADS, 4
    tuning = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": cut.wide}
    shape = {"WINDOWED": windowed, "BLOCK_G": rows, "BLOCK_N": _key_block(cut, constants)}
    return {**constants, **shape, **tuning}


def combine_warps(block_v: int) -> int:
    """Return the warps of a `decode_combine` program: its splits fit into a few registers."""
    return max(1, block_v // 128)


@cache
def prefill_blocks(cut: Cut, windowed: bool = False) -> dict[str, Any]:
    """Return the compile-time arguments of `prefill`, which do not depend on the batch.

    A program computes BLOCK_M rows, each a query token and head.
    """
    constants, wide = _dims(cut), cut.wide
    block_n = _key_block(cut, constants)
    # accumulators of 512 elements per row: the largest blocks that do not spill registers
    if cut.latent and constants["BLOCK_D"] > 128:
        block_m, block_n = (16, 16) if wide else (16 if cut.fp8 else 32, 32)
        tuning = {"num_warps": 8, "num_stages": 1 if wide else 3}
    elif wide:
        # Registers are the limit without tensor cores: with 128 per thread, two programs fit and no
        # register spills.
        block_m = 64 if constants["BLOCK_D"] <= 64 else 32
        # the windowed kernel has three loops, which would spill with 128 registers
        tuning = {"num_warps": 8, "num_stages": 2, "maxnreg": 192 if windowed else 128}
    else:
        # wider accumulators, of the split and of all splits before it, would spill many registers
        block_m, tuning = 128 if constants["BLOCK_D"] <= 128 else 64, {}
        tuning |= {"num_warps": 8, "num_stages": 3}
        if constants["BLOCK_D"] <= 64:
            tuning["maxnreg"] = 128  # two programs fit, and a few registers spill
    tuning["enable_fp_fusion"] = wide
    return {**constants, "WINDOWED": windowed, "BLOCK_M": block_m, "BLOCK_N": block_n, **tuning}


def _key_block(cut: Cut, constants: dict[str, Any]) -> int:
    """Return the keys of a block, which are those of decode and, without latent rows, of prefill.

    Larger blocks of latent fp8 rows would spill registers during conversion.
    """
    if cut.wide:
        return 32 if constants["BLOCK_V"] <= 256 else 16
    if cut.latent:
        return 32 if cut.fp8 else 64
    return 64 if constants["BLOCK_D"] <= 128 else 32


def _dims(cut: Cut) -> dict[str, Any]:
    """Return the compile-time widths: DIM excludes TAIL, which is 0 unless rows are latent."""
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
