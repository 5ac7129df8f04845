"""The engine's operations with gradients, for a trainer whose forward has the engine's bits.

On a GPU, forward runs the engine's kernels, and backward is deterministic. On the CPU, autograd
differentiates the engine's torch reference of attention. Products of forward need `engine_products`
around them. Those of backward are the library's, in any number of parts. Norms, gated activation
and rotation are those of every trainer (`decoder_ops`).
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, starmap
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from memsaver.memory import empty_torch_cache
from memsaver.system.devices import Impl, use_triton
from rollout.ops.experts import expert_products, weighted_sum
from rollout.ops.low_rank import Choice, Factors, add_low_rank, add_scaled, low_rank
from rollout.ops.product_probe import define_products as define_engine_products
from rollout.ops.product_probe import is_probed
from rollout.ops.routing import Routing
from rollout.ops.row_wise import add_parts, chained, product_key, row_invariant_products
from rollout.ops.row_wise import linear as engine_linear
from rollout.ops.torch_attention import StoredKV, attend, hidden_keys, similar_lengths
from rollout.ops.triton_attention import TritonPlan, triton_attention
from rollout.weights import held
from trainer_bridge.ops.decoder_ops import gated, gated_gradient
from trainer_bridge.ops.experts import sort_pairs, token_sum

engine_products = row_invariant_products


def define_products(
    shapes: Iterable[tuple[int, int, bool]],
    device: torch.device,
    dtype: torch.dtype,
    *,
    routers: bool = False,
    strict: bool = True,
) -> None:
    """Probe products by shape: outputs N, inputs K, whether there is a bias.

    It is the engine's probe, which decides by bits. With `routers`, small products are also probed
    with fp32 results. Without `strict`, a product without defined bits is no error.
    """
    if not is_probed(device, dtype):
        return
    empty = partial(torch.empty, dtype=dtype, device=device)
    products = ((empty(n, k), empty(n) if biased else None) for n, k, biased in shapes)
    define_engine_products(products, routers=routers, strict=strict)
    empty_torch_cache(device)


class LinearAdapter(NamedTuple):
    """An adapter of a linear layer, which adds scale * B (A x)."""

    a: Tensor  # [rank, K]
    b: Tensor  # [N, rank]
    scale: float


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ranks: int = 1,
    adapter: LinearAdapter | None = None,
) -> Tensor:
    """Multiply x [..., K] by the transposed weight [N, K], add the bias [N] and the adapter.

    The product is that of tensor-parallel ranks that share the inner dimension: each rounds its
    part with its part of the adapter, the first adds the bias, and the parts are added in order.
    """
    rows = x.reshape(-1, x.shape[-1])
    if ranks == 1:  # a chunk's gradient is a copy, also of a single chunk
        out = _product(rows, weight, bias, adapter)
    else:
        biases = bias, *[None] * (ranks - 1)
        adapters: Sequence[LinearAdapter | None] = [None] * ranks
        if adapter is not None:
            adapters = [adapter._replace(a=part) for part in adapter.a.chunk(ranks, -1)]
        shares = zip(rows.chunk(ranks, -1), weight.chunk(ranks, -1), biases, adapters, strict=True)
        out = add_parts(starmap(_product, shares))
    return out.view(*x.shape[:-1], weight.shape[0])


def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None, adapter: LinearAdapter | None = None
) -> Tensor:
    """Multiply x [T, K] by the transposed weight [N, K], by the library or by `chain_product`."""
    if product_key(weight, bias, False) in chained:
        out = _Product.apply(x, weight, bias, False)
    else:
        out = engine_linear(x, weight, bias)
    return out if adapter is None else add_adapter(out, x, adapter)


def add_adapter(out: Tensor, x: Tensor, adapter: LinearAdapter, impl: Impl = "auto") -> Tensor:
    """Add an adapter of x [T, K] to the product [T, N], which may be overwritten."""
    a, b, scale = adapter
    if x.is_meta or not use_triton(impl, x.device):
        return add_scaled(out, engine_linear(engine_linear(x, a), b), scale)
    return _AddAdapter.apply(scale, out, x, a, b)


def router_logits(x: Tensor, weight: Tensor, wide: bool) -> Tensor:
    """Multiply x [T, K] by a router's transposed weight [E, K]; with `wide`, in fp32."""
    return _Product.apply(x, weight, None, True) if wide else linear(x, weight, None)


def route(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Select experts int64 [T, k], and compute their weights fp32 [T, k], from logits [T, E]."""
    return _Route.apply(logits, routing)


class ExpertRanks(NamedTuple):
    """How tensor-parallel ranks share a mixture of experts.

    Experts are divided into `parts` of whole experts. The ranks of a part share the inner channels.
    """

    size: int = 1  # ranks
    parts: int = 1  # EngineConfig.expert_parallel


ONE_RANK = ExpertRanks()


def mix_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    impl: Impl = "auto",
    ranks: ExpertRanks = ONE_RANK,
) -> Tensor:
    """Compute the weighted sum of a token's experts, [T, H], by the engine's `mix_experts`.

    Each of `ranks` rounds the sum of what it holds, and the sums are added in order.
    """
    if x.is_meta:
        return torch.empty_like(x)
    inputs = x.contiguous(), ids, weights, gate_up, down
    if use_triton(impl, x.device) and torch.is_grad_enabled():
        return _MixExperts.apply(impl, ranks, *inputs)
    return _mix_by_ranks(*inputs, impl=impl, ranks=ranks)


def _mix_by_ranks(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    impl: Impl,
    ranks: ExpertRanks,
    kept: Tensor | None = None,
) -> Tensor:
    """Compute `mix_experts` of contiguous x. `kept` is that of `expert_products`.

    Products do not depend on which other experts a rank holds, so those of all parts are computed
    at once, by shares of the inner channels.
    """
    shares, parts = ranks.size // ranks.parts, ranks.parts
    summed: list[range | None] = [None]
    if parts > 1:
        summed = [range(*held(len(down), parts, part)) for part in range(parts)]
    rows = gate_up.unflatten(1, (2, shares, -1)).unbind(2)
    columns = down.unflatten(2, (shares, -1)).unbind(2)
    places: Sequence[Any] = [None] * shares
    if kept is not None:
        places = kept.unflatten(1, (2, shares, -1)).unbind(2)
    sums = []
    for gates, inner, place in zip(rows, columns, places, strict=True):
        mine = None if place is None else place.contiguous()
        products = expert_products(x, ids, gates.flatten(1, 2), inner.contiguous(), impl, kept=mine)
        if place is not None:
            place.copy_(mine)  # nothing happens if they are one tensor
        sums.append([weighted_sum(products, weights, ids, impl, summed=part) for part in summed])
    return add_parts(chain.from_iterable(zip(*sums, strict=True)))


@torch.no_grad()
def rotary_rows(
    positions: Tensor, frequencies: Tensor, scale: float, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the rows of the engine's rotary tables at positions [1, T], both [1, T, D].

    They have the dtype of `like`.
    """
    angles = positions[..., None].float() * frequencies.to(like.device)
    cos, sin = ((part * scale).to(like.dtype) for part in (angles.cos(), angles.sin()))
    return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)


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

    @cached_property
    def plan(self) -> TritonPlan:
        """Return the plan of the engine's attention, which has no window."""
        starts, lengths = self.bounds[:-1], self.bounds.diff()
        rows = torch.arange(len(starts), device=starts.device, dtype=torch.int32)
        return TritonPlan(
            req_to_token=self.table,
            meta=torch.stack([rows, starts, lengths, lengths]),
            num_decode=0,
            num_prefill=len(starts),
            num_query_tokens=0,  # set where the queries are known
        )


def attention(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scale: float, window: int | None
) -> Tensor:
    """Compute causal attention within each sequence, [T, Hq, D] of q's dtype.

    Queries are [T, Hq, D], keys and values [T, Hkv, D]. A query sees `window` keys, its own
    included; all of its sequence if None. `scale` is the factor of the scores.
    """
    if q.is_cuda:
        return _Attention.apply(q, k, v, sequences, scale, window)
    out = torch.empty_like(q)
    if q.is_meta:
        return out
    for members in similar_lengths(sequences.lengths):
        longest = sequences.lengths[members[-1]]
        at = sequences.table[members, :longest]
        inside = at < sequences.bounds[1:][members].unsqueeze(1)
        hidden = hidden_keys(longest, longest, window, q.device)
        # Past its end, a sequence reads tokens that it does not see.
        read = at.clamp(max=len(q) - 1)
        queries, keys, values = (part[read].float() for part in (q, k, v))
        rows = attend(queries, keys, values, hidden, scale)
        out = out.index_put((at[inside],), rows[inside].to(q.dtype))
    return out


class _Product(torch.autograd.Function):
    """A product of the engine, for which autograd has no gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, wide: bool = False
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        return engine_linear(x, weight, bias, wide=wide)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (to_x, to_weight, to_bias, *_) = ctx.saved_tensors, ctx.needs_input_grad
        return (
            (grad @ weight.to(grad.dtype)).to(x.dtype) if to_x else None,
            (grad.t() @ x.to(grad.dtype)).to(weight.dtype) if to_weight else None,
            grad.sum(0) if to_bias else None,
            None,
        )


class _AddAdapter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scale: float, *inputs: Tensor) -> Tensor:
        out, x, a, b = (part.contiguous() for part in inputs)
        factors = Factors(a.unsqueeze(0), b.unsqueeze(0), (len(b),))
        choice = Choice.of_all(len(x), scale, x.device)
        parts = low_rank(x, factors, choice)
        assert parts is not None
        low = add_parts(parts.unbind()).to(x.dtype)
        ctx.save_for_backward(x, a, b, low)
        ctx.scale = scale
        return add_low_rank(out.clone(), x, parts, factors, choice)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, a, b, low = ctx.saved_tensors
        slope = grad * ctx.scale
        to_low = slope @ b
        return None, grad, to_low @ a, to_low.t() @ x, slope.t() @ low


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        ids, weights = routing.choose(logits)
        ctx.save_for_backward(logits, ids)
        ctx.routing = routing
        ctx.mark_non_differentiable(ids)
        return ids, weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, ids = ctx.saved_tensors
        with torch.enable_grad():
            logits = logits.detach().requires_grad_()
            weights = ctx.routing.weigh(logits, ids)
        return *torch.autograd.grad(weights, logits, grad), None


class _MixExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, impl: Impl, ranks: ExpertRanks, *inputs: Tensor) -> Tensor:
        _, ids, _, gate_up, _ = inputs
        kept = gate_up.new_empty((ids.numel(), gate_up.shape[1]))
        ctx.save_for_backward(*inputs, kept)
        ctx.impl = impl
        return _mix_by_ranks(*inputs, impl=impl, ranks=ranks, kept=kept)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute all gradients; that of a weight is <down^T grad, activation> of its pair."""
        x, ids, weights, gate_up, down, kept = ctx.saved_tensors
        pairs = sort_pairs(ids, len(down))
        token, ends = pairs.number // ids.shape[1], pairs.ends
        rows, weight = grad[token], weights.flatten()[pairs.number].unsqueeze(-1)
        halves = kept.chunk(2, dim=-1)
        inner, slope = gated(*halves, ctx.impl), F.grouped_mm(rows, down, offs=ends)
        grad_weights = torch.empty_like(weights)
        grad_weights.view(-1)[pairs.number] = (slope.float() * inner).sum(-1).to(weights.dtype)
        grad_down = F.grouped_mm(rows.t(), (inner * weight).to(x.dtype), offs=ends)
        slope = gated_gradient((slope * weight).to(x.dtype), *halves, ctx.impl)
        grad_gate_up = F.grouped_mm(slope.t(), x[token], offs=ends)
        grad_rows = F.grouped_mm(slope, gate_up, offs=ends)
        grad_x = token_sum(grad_rows, pairs.place, None, ctx.impl)
        return None, None, grad_x, None, grad_weights, grad_gate_up, grad_down


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
        plan = replace(sequences.plan, window=window, num_query_tokens=len(q))
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
    """Let torch choose deterministic kernels inside the block.

    Each layer enters it, so it takes the host little time: `torch.use_deterministic_algorithms`
    sets options of torch's compiler, too, and lets each new tensor be filled.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    filling: Any = torch.utils.deterministic  # a module with properties
    filled = filling.fill_uninitialized_memory
    torch._C._set_deterministic_algorithms(True, warn_only=False)
    filling.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(before, warn_only=warn_only)
        filling.fill_uninitialized_memory = filled
