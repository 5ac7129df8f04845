"""Computation of a token's experts, in torch or Triton.

In both, the bits of a token do not depend on the other tokens of a call.

The Triton path sorts pairs (token, choice) by expert, computes the first product with the
activation, the second product, and the weighted sum; it uses no atomics. The pairs of an expert
are divided into blocks, and a program computes a block's rows with that expert's weights. The
maximum number of blocks follows from the shapes alone, so a CUDA graph can replay the launches with
other choices: programs without a block return immediately.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from memsaver.system.devices import Impl, use_triton
from rollout.ops.chain_product import cell
from rollout.ops.row_wise import gated, linear, silu_mul

_TILE = 16384  # elements of a program's table of pairs and experts
_CHUNKS = 128  # approximate number of programs that sort
_FEW = 4096  # up to this many pairs, each program counts all of them, which saves a kernel


def mix_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    impl: Impl = "auto",
    *,
    first: int = 0,
    total: int | None = None,
) -> Tensor:
    """Sum weights[t, j] * down[e] @ silu_mul(gate_up[e] @ x[t]) over j, where e = ids[t, j].

    Rounding points are the same as in transformers' `grouped_mm` and `batched_mm`: products are
    rounded to x's dtype, the weighted product to the wider of both dtypes, and the sum is fp32.
    A token's result depends on no other token. The launches of the kernels do not depend on `ids`;
    the reference synchronizes to read `ids`.

    Args:
        x: Contiguous [T, H].
        ids: Experts int64 [T, k], all different within a row.
        weights: [T, k], of x's dtype or fp32.
        gate_up: Contiguous [E, 2I, H] of x's dtype, gate rows first.
        down: Contiguous [E, H, I] of x's dtype.
        impl: Implementation; "auto" uses Triton on a GPU.
        first: Number of the first held expert; pairs of experts that are not held contribute 0.
        total: Number of experts of the model; None if all are held.

    Returns:
        Contiguous [T, H] of x's dtype.
    """
    products = expert_products(x, ids, gate_up, down, impl, first=first, total=total)
    summed = None if total in (None, len(down)) else range(first, first + len(down))
    return weighted_sum(products, weights, ids, impl, summed=summed)


def expert_products(
    x: Tensor,
    ids: Tensor,
    gate_up: Tensor,
    down: Tensor,
    impl: Impl = "auto",
    *,
    first: int = 0,
    total: int | None = None,
    kept: Tensor | None = None,
) -> Tensor:
    """Compute down[e] @ silu_mul(gate_up[e] @ x[t]), where e = ids[t, j].

    Arguments are those of `mix_experts`. `kept`, if given, [T * k, 2I] of x's dtype, receives
    gate_up[e] @ x[t] from the kernels, sorted by expert, then by token.

    Returns:
        Contiguous [T, k, H] of x's dtype, undefined for pairs of experts that are not held.
    """
    total = len(down) if total is None else total
    (tokens, top_k), (experts, hidden, inner) = ids.shape, down.shape
    if not use_triton(impl, x.device):
        assert kept is None
        products = x.new_zeros((*ids.shape, hidden))
        for expert in set(ids.unique().tolist()) & {*range(first, first + experts)}:
            token, choice = (ids == expert).nonzero(as_tuple=True)
            gate, up = linear(x[token], gate_up[expert - first]).chunk(2, dim=-1)
            products[token, choice] = linear(silu_mul(gate, up, "torch"), down[expert - first])
        return products
    assert all(tensor.is_contiguous() for tensor in (x, ids, gate_up, down))
    products = x.new_empty((*ids.shape, hidden))
    if tokens and experts:
        with torch.cuda.device_of(x):
            blocks = product_blocks(ids.numel(), total, x)
            pairs = sort_pairs(ids, experts, blocks.rows, first)
            act = x.new_empty((ids.numel(), inner))
            _launch(x, gate_up, act, pairs, top_k, blocks, gate=True, kept=kept)
            _launch(act, down, products.view(-1, hidden), pairs, top_k, blocks, gate=False)
    return products


def weighted_sum(
    products: Tensor,
    weights: Tensor,
    ids: Tensor,
    impl: Impl = "auto",
    *,
    summed: range | None = None,
) -> Tensor:
    """Sum products [T, k, H] of a token's experts, times their weights [T, k], to [T, H].

    `ids` [T, k] are the experts of the products, which are added in the order of a token's choices.
    With `summed`, only the products of these experts are added, and others may be undefined.
    """
    (tokens, top_k), hidden = ids.shape, products.shape[-1]
    if not use_triton(impl, products.device):
        if summed is not None:
            others = (ids < summed.start) | (ids >= summed.stop)
            products = products.masked_fill(others.unsqueeze(-1), 0)
        terms = (products * weights.unsqueeze(-1)).unbind(1)
        return functools.reduce(torch.add, terms[1:], terms[0].float()).to(products.dtype)
    assert all(tensor.is_contiguous() for tensor in (products, weights, ids))
    out = products.new_empty((tokens, hidden))
    if tokens:
        first, experts = (0, 0) if summed is None else (summed.start, len(summed))
        block = min(1024, triton.next_power_of_2(hidden))
        with torch.cuda.device_of(products):
            _sum[(tokens, triton.cdiv(hidden, block))](
                products, weights, ids, out, hidden, first, experts, TOP_K=top_k, BLOCK=block,
                ALL=summed is None, enable_fp_fusion=False,
            )  # fmt: skip
    return out


class Blocks(NamedTuple):
    """Block sizes of both products."""

    rows: int  # rows of a block of pairs
    gate_up: dict[str, Any]  # other compile-time arguments of `_product` for the first product
    down: dict[str, Any]  # the same for the second product


def product_blocks(pairs: int, experts: int, x: Tensor) -> Blocks:
    """Choose block sizes by the average number of pairs per expert.

    The choice is tuned on an H100 with 1 to 1,024 pairs for each of 128 experts of 2048 x 768. fp32
    inputs and the interpreter use WIDE: exact fp32 products without tensor cores.
    """
    if x.dtype == torch.float32 or not x.is_cuda:
        exact = _cut(32, 32, 1, 4, 3, wide=True)
        return Blocks(16, exact, exact)
    rows = pairs / experts
    if rows <= 8:
        blocks = Blocks(16, _cut(32, 128, 1, 4, 5), _cut(64, 128, 1, 4, 4))
    elif rows <= 32:
        blocks = Blocks(32, _cut(64, 128, 1, 4, 3), _cut(128, 128, 1, 4, 3))
    elif rows <= 64:
        blocks = Blocks(64, _cut(64, 64, 4, 4, 3), _cut(256, 64, 1, 8, 4))
    else:
        blocks = Blocks(128, _cut(128, 64, 1, 8, 4), _cut(256, 64, 8, 8, 4))
    return _fitting(blocks, _shared_memory(x.device))


def _fitting(blocks: Blocks, room: int) -> Blocks:
    """Reduce the stages until the blocks, at 2 bytes per element, fit into `room` bytes."""

    def fit(cut: dict[str, Any], halves: int) -> dict[str, Any]:
        stage = 2 * cut["BLOCK_K"] * (blocks.rows + halves * cut["BLOCK_N"])
        return cut | {"num_stages": max(1, min(cut["num_stages"], room // stage))}

    return Blocks(blocks.rows, fit(blocks.gate_up, 2), fit(blocks.down, 1))


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program can use."""
    driver: Any = triton.runtime.driver.active
    return int(driver.utils.get_device_properties(device.index)["max_shared_mem"])


def _cut(
    columns: int, depth: int, group: int, warps: int, stages: int, wide: bool = False
) -> dict[str, Any]:
    return {
        "BLOCK_N": columns, "BLOCK_K": depth, "GROUP": group, "WIDE": wide, "num_warps": warps,
        "num_stages": stages,
    }  # fmt: skip


class Pairs(NamedTuple):
    """Pairs sorted by expert."""

    # int32 [pairs]: pair t * top_k + j for choice j of token t, sorted by expert. Pairs of experts
    # that are not held are left out, and as many entries at the end are undefined.
    order: Tensor
    # int32 [3, maximum number of blocks]: expert, first row in `order`, and end of the expert's
    # rows. First row and end are 0 for unused blocks.
    blocks: Tensor


def sort_pairs(ids: Tensor, experts: int, block_m: int, base: int = 0) -> Pairs:
    """Sort pairs by expert, and divide the pairs of each expert into blocks of `block_m` rows.

    `ids` are the experts, contiguous int64 [T, top_k], not empty. `experts` is the number of held
    experts, and `base` the index of the first held expert.
    """
    pairs, width = ids.numel(), max(32, triton.next_power_of_2(experts))  # histograms need 32
    few = pairs <= _FEW
    rows = max(1, (_TILE // 4 if few else _TILE) // width)
    chunk = rows * triton.next_power_of_2(triton.cdiv(pairs, rows * _CHUNKS))
    chunks = triton.cdiv(pairs, chunk)
    most = (pairs + min(experts, pairs) * (block_m - 1)) // block_m
    counts, order, blocks = (
        torch.empty(shape, dtype=torch.int32, device=ids.device)
        for shape in ((chunks, width), (pairs,), (3, most))
    )
    sizes: dict[str, int] = {"CHUNK": chunk, "ROWS": rows, "EXPERTS": width}
    if not few:
        _count[(chunks,)](ids, counts, pairs, base, experts, **sizes, num_warps=8)
    _place[(chunks,)](
        ids, counts, order, blocks, pairs, chunks, most, base, experts, **sizes, BLOCK_M=block_m,
        FEW=max(256, triton.next_power_of_2(pairs)) if few else 0,
        BLOCKS=triton.next_power_of_2(triton.cdiv(most, chunks)), num_warps=8,
    )  # fmt: skip
    return Pairs(order, blocks)


def _launch(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    pairs: Pairs,
    top_k: int,
    blocks: Blocks,
    gate: bool,
    kept: Tensor | None = None,
) -> None:
    most, columns, depth = pairs.blocks.shape[1], out.shape[1], x.shape[1]
    cut = blocks.gate_up if gate else blocks.down
    # Fusion is for products without tensor cores. The activation has the bits of `silu_mul`.
    _product[(most * triton.cdiv(columns, cut["BLOCK_N"]),)](
        x, weight, out, out if kept is None else kept, pairs.order, pairs.blocks, most, columns,
        depth, TOP_K=top_k, GATE=gate, KEEP=kept is not None, EVEN=depth % cut["BLOCK_K"] == 0,
        BLOCK_M=blocks.rows, enable_fp_fusion=cut["WIDE"], **cut,
    )  # fmt: skip


@triton.jit(do_not_specialize=["pairs"])
def _count(  # type: ignore[no-untyped-def]
    ids, counts, pairs, base, held, CHUNK: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr
):
    """Count the pairs of each expert. Programs: (chunk of pairs)."""
    expert = tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), tl.int32)
    for first in range(0, CHUNK, ROWS):
        at = tl.program_id(0) * CHUNK + first
        hit, _, _ = _hits(ids, at, pairs, base, held, ROWS, EXPERTS)
        total += tl.sum(hit, 0)
    tl.store(counts + tl.program_id(0) * EXPERTS + expert, total)


@triton.jit
def _hits(ids, first, pairs, base, held, ROWS: tl.constexpr, EXPERTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a table int32 [ROWS, EXPERTS], 1 where a pair goes to a held expert.

    Also return the pairs [ROWS], and whether each goes to a held expert.
    """
    pair = first + tl.arange(0, ROWS)
    chosen = _held(ids, pair, pairs, base, held)
    hit = (chosen[:, None] == tl.arange(0, EXPERTS)[None, :]).to(tl.int32)
    return hit, pair, chosen >= 0


@triton.jit
def _held(ids, pair, pairs, base, held):  # type: ignore[no-untyped-def]
    """Return the number of each pair's expert among the held experts, int32; -1 if not held."""
    chosen = tl.load(ids + pair, mask=pair < pairs, other=-1).to(tl.int32) - base
    return tl.where((chosen >= 0) & (chosen < held), chosen, -1)


@triton.jit(do_not_specialize=["pairs", "chunks", "most"])
def _place(  # type: ignore[no-untyped-def]
    ids, counts, order, blocks, pairs, chunks, most, base, held, CHUNK: tl.constexpr,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCKS: tl.constexpr,
    FEW: tl.constexpr,
):  # fmt: skip
    """Place the chunk's pairs after the earlier chunks' pairs, and write its share of the blocks.

    Programs: (chunk of pairs). If FEW is not 0, there are at most FEW pairs and each program counts
    all of them; otherwise `counts` has the counts.
    """
    chunk = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    if FEW:
        counting = tl.arange(0, FEW)
        chosen = _held(ids, counting, pairs, base, held)
        counted = chosen >= 0
        chosen = tl.maximum(chosen, 0)
        total = tl.histogram(chosen, EXPERTS, mask=counted)
        at = tl.histogram(chosen, EXPERTS, mask=counted & (counting < chunk * CHUNK))
    else:
        total = tl.zeros((EXPERTS,), tl.int32)
        at = tl.zeros((EXPERTS,), tl.int32)
        for first in range(0, chunks, ROWS):
            row = (first + tl.arange(0, ROWS))[:, None]
            part = tl.load(counts + row * EXPERTS + expert[None, :], mask=row < chunks, other=0)
            total += tl.sum(part, 0)
            at += tl.sum(tl.where(row < chunk, part, 0), 0)
    end = tl.cumsum(total, 0)
    at += end - total
    for first in range(0, CHUNK, ROWS):
        hit, pair, here = _hits(ids, chunk * CHUNK + first, pairs, base, held, ROWS, EXPERTS)
        to = tl.sum(hit * (at[None, :] + tl.cumsum(hit, 0) - 1), 1)
        tl.store(order + to, pair, mask=here)
        at += tl.sum(hit, 0)

    needed = (total + BLOCK_M - 1) // BLOCK_M
    last = tl.cumsum(needed, 0)
    block = chunk * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < most
    owner = tl.sum((last[None, :] <= block[:, None]).to(tl.int32), 1)
    mine = owner[:, None] == expert[None, :]
    begin = (end - total)[None, :] + (block[:, None] - (last - needed)[None, :]) * BLOCK_M
    tl.store(blocks + block, owner, mask=inside)
    tl.store(blocks + most + block, tl.sum(tl.where(mine, begin, 0), 1), mask=inside)
    tl.store(blocks + 2 * most + block, tl.sum(tl.where(mine, end[None, :], 0), 1), mask=inside)


@triton.jit(do_not_specialize=["most"])
def _product(  # type: ignore[no-untyped-def]
    x, weight, out, kept, order, blocks, most, columns, depth, TOP_K: tl.constexpr,
    GATE: tl.constexpr, KEEP: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Compute weight[expert] @ x for the pairs of a block. Programs: (block, columns).

    With GATE, x is [T, depth], weight is [E, 2 * columns, depth], and out is silu_mul of both
    halves, [pairs, columns] in sorted order; with KEEP, `kept` gets both halves, [pairs,
    2 * columns]. Otherwise x is in sorted order and out in the order of pairs. GROUP adjacent
    blocks are computed together, because they often share weights.
    """
    block, column = cell(tl.program_id(0), most, tl.cdiv(columns, BLOCK_N), GROUP)
    first, end = tl.load(blocks + most + block), tl.load(blocks + 2 * most + block)
    if first >= end:
        return
    # lanes past the end repeat the last row, or wrap to the first columns, and are not stored
    row = first + tl.arange(0, BLOCK_M)
    inside = row < end
    row = tl.minimum(row, end - 1)
    pair = tl.load(order + row)
    if GATE:
        source, target = pair // TOP_K, row
    else:
        source, target = row, pair
    column = column * BLOCK_N + tl.arange(0, BLOCK_N)
    wrapped = column % columns
    k = tl.arange(0, BLOCK_K)
    left = x + source[:, None].to(tl.int64) * depth + k[None, :]
    half = columns * depth
    of_expert = tl.load(blocks + block).to(tl.int64) * ((2 if GATE else 1) * half)
    right = weight + of_expert + wrapped[None, :] * depth + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, depth, BLOCK_K):
        here = k < (BLOCK_K if EVEN else depth - start)
        a = _load(left, here[None, :], EVEN, WIDE)
        b = _load(right, here[:, None], EVEN, WIDE)
        total = tl.dot(a, b, total, input_precision="ieee")
        if GATE:
            b = _load(right + half, here[:, None], EVEN, WIDE)
            up = tl.dot(a, b, up, input_precision="ieee")
        left += BLOCK_K
        right += BLOCK_K
    dtype = out.dtype.element_ty
    result = total.to(dtype)
    mask = inside[:, None] & (column < columns)[None, :]
    if KEEP:
        to = kept + 2 * target[:, None].to(tl.int64) * columns + column[None, :]
        tl.store(to, result, mask=mask)
        tl.store(to + columns, up.to(dtype), mask=mask)
    if GATE:
        result = gated(result.to(tl.float32), up.to(dtype).to(tl.float32), dtype)
    to = out + target[:, None].to(tl.int64) * columns + column[None, :]
    tl.store(to, result, mask=mask)


@triton.jit
def _load(at, mask, EVEN: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    value = tl.load(at) if EVEN else tl.load(at, mask=mask, other=0.0)
    return value.to(tl.float32) if WIDE else value


@triton.jit
def _sum(  # type: ignore[no-untyped-def]
    products, weights, ids, out, hidden, base, held, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
    ALL: tl.constexpr,
):  # fmt: skip
    """Sum a token's weighted products in the order of its choices.

    Programs: (token, block of the hidden size). Unless ALL experts are held, products of experts
    that are not held are undefined and count as 0.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        mine = inside
        if not ALL:
            # a single comparison, as Triton 3.9's interpreter rejects a mask of a block & a scalar
            mine = column < tl.where(_held(ids, pair, pair + 1, base, held) >= 0, hidden, 0)
        value = tl.load(products + pair * hidden + column, mask=mine, other=0.0).to(tl.float32)
        weight = tl.load(weights + pair)
        total += (value * weight.to(tl.float32)).to(weight.dtype).to(tl.float32)
    tl.store(out + token * hidden + column, total.to(out.dtype.element_ty), mask=inside)
