"""Gradients of weights as sums that do not depend on the division into micro batches.

The gradient of a weight is one fp32 sum over the tokens of a batch, in order. A micro batch
continues it where the one before ended. A tensor core adds the products of `STEP` tokens at once,
so each sequence begins at a multiple of `STEP`; tokens with zero gradients between two sequences
change no bits.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from memsaver.system.devices import Impl, use_triton
from rollout.ops.chain_product import GROUP, tile_of


class Total(Protocol):
    """The sum of a parameter's gradients, fp32."""

    def apply(self, add: Callable[[Tensor], object]) -> None:
        """Call `add` with the sum, to which it adds."""


Totals = Mapping[str, Total]
"""The totals of a module's parameters, by name."""
STEP = 16  # tokens that a tensor core adds at once
_PROGRAMS = 264  # below, smaller tiles are faster: two programs on each multiprocessor of an H100
_WIDE: dict[str, Any] = {
    "BLOCK_N": 128, "BLOCK_K": 256, "BLOCK_T": 64, "num_warps": 8, "num_stages": 3
}  # fmt: skip
_SMALL = _WIDE | {"BLOCK_K": 128, "num_warps": 4, "num_stages": 4}
_ONE_ROW = {"BLOCK_N": 16, "BLOCK_K": 32, "BLOCK_T": 256, "num_warps": 2, "num_stages": 3}
_COLUMNS = 256  # of an embedding, in a program


def totals_of(module: Any) -> Totals | None:
    """Return the totals of a module's parameters; None if autograd has their gradients."""
    return getattr(module, "totals", None)


# Registered as torch operations, so that the planner's fake tensors see no kernel.


@torch.library.custom_op("trainer_bridge::add_product", mutates_args=("total",))
def add_product(total: Tensor, grad: Tensor, x: Tensor, impl: str = "auto") -> None:
    """Add grad.T @ x to `total`, fp32 [N, K], with a row stride.

    `grad` [T, N] and `x` [T, K] have one dtype, and T is a multiple of `STEP`. Several calls with
    parts of the tokens have the bits of one call, on the CPU and by Triton.
    """
    assert len(x) % STEP == 0 and total.dtype == torch.float32 and total.stride(1) == 1
    if use_triton(impl, x.device):  # type: ignore[arg-type]
        _add_product_triton(total, grad, x)
        return
    for part, rows in zip(grad.float().split(STEP), x.float().split(STEP), strict=True):
        total.addmm_(part.t(), rows)


@add_product.register_fake
def _(*_: Any) -> None:
    """Return nothing: the operation works in place."""


def add_rows(total: Tensor, rows: Tensor, impl: Impl = "auto") -> None:
    """Add the sum of rows [T, N] to `total`, fp32 [N], as `add_product`."""
    add_product(total[None], rows.new_ones((len(rows), 1)), rows, impl)


@torch.library.custom_op("trainer_bridge::add_embeddings", mutates_args=("total",))
def add_embeddings(total: Tensor, ids: Tensor, grad: Tensor, impl: str = "auto") -> None:
    """Add the rows of `grad` [T, H] to those of `total`, fp32 [V, H], with numbers `ids` [T]."""
    if not use_triton(impl, grad.device):  # type: ignore[arg-type]
        total.index_add_(0, ids, grad.float())  # on the CPU in order
        return
    assert grad.stride(1) == 1 and total.is_contiguous()
    tokens, width = grad.shape
    words, order = ids.sort(stable=True)
    with torch.cuda.device_of(grad):
        _add_embeddings[(tokens, triton.cdiv(width, _COLUMNS))](
            total, words, order, grad, tokens, width, grad.stride(0), BLOCK=_COLUMNS, num_warps=2
        )


@add_embeddings.register_fake
def _(*_: Any) -> None:
    """Return nothing: the operation works in place."""


def _add_product_triton(total: Tensor, grad: Tensor, x: Tensor) -> None:
    grad, x = (part if part.stride(1) == 1 else part.contiguous() for part in (grad, x))
    (tokens, outputs), inputs = grad.shape, x.shape[1]
    tile = _ONE_ROW if outputs == 1 else _WIDE
    if outputs > 1 and _programs(outputs, inputs, tile) < _PROGRAMS:
        tile = _SMALL
    programs = _programs(outputs, inputs, tile)
    if not x.is_cuda:  # the sums of the interpreter depend on the tile
        tile = tile | {"BLOCK_T": STEP}
    with torch.cuda.device_of(x):
        _add_product[(programs,)](
            total, grad, x, tokens, outputs, inputs,
            total.stride(0), grad.stride(0), x.stride(0), GROUP=GROUP,
            WIDE=not x.is_cuda, **tile,
        )  # fmt: skip


def _programs(outputs: int, inputs: int, tile: dict[str, Any]) -> int:
    return triton.cdiv(outputs, tile["BLOCK_N"]) * triton.cdiv(inputs, tile["BLOCK_K"])


@triton.jit(do_not_specialize=["tokens"])
def _add_product(  # type: ignore[no-untyped-def]
    total, grad, x, tokens, outputs, inputs, stride_total, stride_grad, stride_x,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr, GROUP: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Compute a tile of `add_product`.

    Programs: (tile), see `tile_of`. WIDE is for the interpreter, which does not multiply bf16.
    """
    n, k = tile_of(tl.program_id(0), outputs, inputs, BLOCK_N, BLOCK_K, GROUP)
    t = tl.arange(0, BLOCK_T)
    left = grad + t[None, :].to(tl.int64) * stride_grad + n[:, None]
    right = x + t[:, None].to(tl.int64) * stride_x + k[None, :]
    to = total + n[:, None].to(tl.int64) * stride_total + k[None, :]
    inside = (n < outputs)[:, None] & (k < inputs)[None, :]
    added = tl.load(to, mask=inside, other=0.0)
    for start in range(0, tokens, BLOCK_T):
        here = t < tokens - start
        a = tl.load(left, mask=(n < outputs)[:, None] & here[None, :], other=0.0)
        b = tl.load(right, mask=(k < inputs)[None, :] & here[:, None], other=0.0)
        if WIDE:
            a, b = a.to(tl.float32), b.to(tl.float32)
        added = tl.dot(a, b, added)
        left += BLOCK_T * stride_grad
        right += BLOCK_T * stride_x
    tl.store(to, added, mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _add_embeddings(  # type: ignore[no-untyped-def]
    total, words, order, grad, tokens, width, stride, BLOCK: tl.constexpr
):
    """Add all rows of one word, as program (first of its places in `words`, block of columns)."""
    place = tl.program_id(0)
    word = tl.load(words + place)
    if place > 0 and tl.load(words + place - 1) == word:
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    to = total + word * width + column
    added = tl.load(to, mask=inside, other=0.0)
    same = word == word
    while same:
        row = tl.load(order + place)
        added += tl.load(grad + row * stride + column, mask=inside, other=0.0).to(tl.float32)
        place += 1
        same = (place < tokens) and tl.load(words + tl.minimum(place, tokens - 1)) == word
    tl.store(to, added, mask=inside)
