"""The engine's operations with gradients, for a trainer whose forward has the engine's bits.

On a GPU, forward runs the engine's kernels, and backward is deterministic. On the CPU, autograd
differentiates the engine's torch reference of norms and attention. Products need `engine_products`
around them.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import starmap
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rollout.ops.row_wise import add_parts, row_invariant_products
from rollout.ops.row_wise import linear as engine_linear
from rollout.ops.row_wise import rms_norm as engine_rms_norm
from rollout.ops.row_wise import silu as engine_silu
from rollout.ops.torch_attention import BatchShape, StoredKV, attend, hidden_keys
from rollout.ops.triton_attention import plan_triton, triton_attention

engine_products = row_invariant_products
MIN_ROWS = 64  # of a product on a GPU; fewer rows may have other bits


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply x [..., K] by the transposed weight [N, K], and add the bias [N]."""
    rows = x.reshape(-1, x.shape[-1])
    count = len(rows)
    if x.is_cuda and count < MIN_ROWS:
        rows = F.pad(rows, (0, 0, 0, MIN_ROWS - count))
    return engine_linear(rows, weight, bias)[:count].view(*x.shape[:-1], len(weight))


def linear_of_ranks(x: Tensor, weight: Tensor, bias: Tensor | None, ranks: int) -> Tensor:
    """Compute `linear` as tensor-parallel ranks do that share the inner dimension.

    Each rank rounds its product. The first adds the bias, and the products are added in order.
    """
    return linear(x, weight, bias) if ranks == 1 else _OfRanks.apply(x, weight, bias, ranks)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute weight * x / rms(x) over the last dimension of x [..., H]."""
    return _RMSNorm.apply(x, weight, eps) if x.is_cuda else engine_rms_norm(x, weight, eps)


def silu(x: Tensor) -> Tensor:
    """Compute x * sigmoid(x)."""
    return _Silu.apply(x)


@dataclass(frozen=True, eq=False)
class Sequences:
    """Sequences that are packed end to end.

    Attributes:
        lengths: Tokens of each sequence.
        bounds: int32 [S + 1], 0 followed by the end of each sequence.
    """

    lengths: tuple[int, ...]
    bounds: Tensor

    @cached_property
    def table(self) -> Tensor:
        """Return the place of each token by sequence and position, int32 [S, longest]."""
        longest = torch.arange(max(self.lengths), device=self.bounds.device, dtype=torch.int32)
        return self.bounds[:-1, None] + longest


def attention(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scale: float, window: int | None
) -> Tensor:
    """Compute causal attention within each sequence, [T, Hq, D] of q's dtype.

    Queries are [T, Hq, D], keys and values [T, Hkv, D]. A query sees `window` keys, its own
    included; all of its sequence if None. `scale` is the factor of the scores.
    """
    if q.is_cuda:
        return _Attention.apply(q, k, v, sequences, scale, window)
    parts = (rows.float().split(sequences.lengths) for rows in (q, k, v))
    out = []
    for queries, keys, values in zip(*parts, strict=True):
        hidden = hidden_keys(len(queries), len(queries), window, q.device)
        out.append(attend(queries, keys, values, hidden, scale))
    return torch.cat(out).to(q.dtype)


class _OfRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, ranks: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        shares = zip(
            x.chunk(ranks, -1), weight.chunk(ranks, -1), (bias, *[None] * (ranks - 1)), strict=True
        )
        return add_parts(starmap(linear, shares))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        grad_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return grad @ weight, rows.t() @ x.flatten(0, -2), grad_bias, None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return engine_rms_norm(x, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + ctx.eps)
        normed, slope = wide * scale, grad.float() * weight.float()
        grad_x = scale * (slope - normed * (slope * normed).mean(-1, keepdim=True))
        grad_weight = (grad * normed.to(x.dtype)).flatten(0, -2).sum(0)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


class _Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return engine_silu(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.ops.aten.silu_backward(grad, *ctx.saved_tensors)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sequences: Sequences,
        scale: float,
        window: int | None,
    ) -> Tensor:
        lengths = sequences.lengths
        rows = range(len(lengths))
        shape = BatchShape(rows=rows, q_lens=lengths, kv_lens=lengths, num_decode=0)
        plan = plan_triton(shape, sequences.table, window)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[1], len(q), dtype=torch.float32, device=q.device)
        with torch.cuda.device_of(q):
            triton_attention(q, StoredKV(k=k, v=v), plan, scale, out, lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.packed = sequences, scale, window
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        sequences, scale, window = ctx.packed
        bounds, longest = sequences.bounds, max(sequences.lengths)
        sides = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # random state of a dropout
        with _deterministic():
            grads = torch.ops.aten._flash_attention_backward(
                grad, q, k, v, out, lse, bounds, bounds, longest, longest, 0.0, True,
                unused, unused[0], scale=scale, **sides,
            )  # fmt: skip
        return *grads, None, None, None


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """Let torch choose deterministic kernels inside the block."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
