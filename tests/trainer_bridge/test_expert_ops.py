"""Operations of experts against fp64, values and gradients, in torch and in Triton.

Whole experts are compared with the forward of transformers.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from memsaver.system.devices import Impl
from tests.helpers.case_selection import some
from trainer_bridge.models.moe import mix_experts
from trainer_bridge.ops.exact import ONE_RANK, ExpertRanks
from trainer_bridge.ops.exact import mix_experts as mix_experts_exactly
from trainer_bridge.ops.experts import combine, sort_pairs, spread

# (tokens, choices, experts, width)
SHAPES = some((7, 3, 5, 40), whole=[(1, 1, 1, 8), (40, 8, 128, 2056), (33, 2, 64, 16)])
# Tolerances relative to the largest value. The longest chain is a gate's gradient, with fewer than
# 16 roundings of 2**-24: an exponential (two), a sum and a quotient, its complement, five products
# and a sum. Triton's interpreter truncates bf16.
U = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
DTYPES = some(torch.float32, torch.bfloat16, whole=[torch.float16])


def choices(tokens: int, top_k: int, experts: int, device: str) -> Tensor:
    """Draw different experts for each token; the last expert gets no token if possible."""
    used = max(top_k, experts - 1)
    ids = torch.rand(tokens, used).argsort(-1)[:, :top_k]
    return ids.to(device).contiguous()


def assert_near(actual: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype and actual.shape == exact.shape
    actual, exact = actual.detach().double(), exact.detach()
    assert float((actual - exact).abs().max()) <= U[dtype] * max(1.0, float(exact.abs().max()))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sort_pairs_orders_by_expert_then_token(
    shape: tuple[int, int, int, int], device: str
) -> None:
    tokens, top_k, experts, _ = shape
    ids = choices(tokens, top_k, experts, device)
    pairs = sort_pairs(ids, experts)
    order = ids.flatten()[pairs.number]
    assert torch.equal(order, ids.flatten().sort().values)
    assert torch.equal(pairs.place.flatten()[pairs.number], torch.arange(len(order)).to(device))
    counts = torch.bincount(order, minlength=experts)
    assert torch.equal(pairs.ends, counts.cumsum(0).int())
    for expert in range(experts):
        numbers = pairs.number[order == expert]
        assert torch.equal(numbers, numbers.sort().values)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("dtype", "weighing"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        *some(whole=[(torch.float16, torch.float16), (torch.float16, torch.float32)]),
    ],
)
def test_spread_and_combine_match_fp64(
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    weighing: torch.dtype,
    impl: Impl,
    device: str,
) -> None:
    """Add different values to a token's rows before they are combined."""
    tokens, top_k, experts, width = shape
    ids = choices(tokens, top_k, experts, device)
    x = torch.randn(tokens, width, device=device).to(dtype).requires_grad_()
    more = torch.randn(tokens * top_k, width, device=device).to(dtype).requires_grad_()
    weights = torch.rand(tokens, top_k, device=device).to(weighing).requires_grad_()
    pairs = sort_pairs(ids, experts)
    y = spread(x, pairs, impl) + more
    out = combine(y, weights, pairs, impl)
    slope = torch.randn(out.shape, device=device).to(dtype)
    out.backward(slope)
    wide = y.detach().double().requires_grad_()
    exact_weights = weights.detach().double().requires_grad_()
    exact = (wide[pairs.place] * exact_weights[..., None]).sum(1)
    exact.backward(slope.double())
    assert_near(out, exact, dtype)
    assert weights.grad is not None and more.grad is not None and x.grad is not None
    assert exact_weights.grad is not None and wide.grad is not None
    assert_near(weights.grad, exact_weights.grad, weighing)
    assert_near(more.grad, wide.grad, dtype)
    assert_near(x.grad, more.grad.double()[pairs.place].sum(1), dtype)


@pytest.mark.parametrize("act", ["silu", "gelu", "exact", "exact by ranks"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_mix_experts_and_gradients_match_transformers(
    act: str, dtype: torch.dtype, impl: Impl, device: str
) -> None:
    """Include experts without a token, and compare gradients of all inputs.

    "exact" is the silu of an exact trainer, the only one with a choice of kernels; "by ranks", two
    ranks share the inner channels of each of two parts of the experts.
    """
    config: Any = Qwen3MoeConfig(
        num_experts=6,
        hidden_size=32,
        moe_intermediate_size=16,
        hidden_act="gelu" if act == "gelu" else "silu",
    )
    own = Qwen3MoeExperts(config).to(device, dtype)
    for param in own.parameters():
        torch.nn.init.normal_(param, std=0.2)
    exact_experts = copy.deepcopy(own).double()
    eager = inspect.unwrap(Qwen3MoeExperts.forward)
    ids = choices(11, 2, 6, device)
    x, weights = torch.randn(11, 32, device=device), torch.rand(11, 2, device=device)
    inputs = [tensor.to(dtype).requires_grad_() for tensor in (x, weights)]
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    stacks = own.gate_up_proj, own.down_proj
    if act.startswith("exact"):
        ranks = ExpertRanks(4, 2) if act == "exact by ranks" else ONE_RANK
        out = mix_experts_exactly(inputs[0], ids, inputs[1], *stacks, impl, ranks)
    else:
        out = mix_experts(own, inputs[0], ids, inputs[1])
    expected_out = eager(exact_experts, wide[0], ids, wide[1])
    slope = torch.randn(out.shape, device=device).to(dtype)
    out.backward(slope)
    expected_out.backward(slope.double())
    results = [out, *(tensor.grad for tensor in (*inputs, *own.parameters()))]
    expected = [expected_out, *(tensor.grad for tensor in (*wide, *exact_experts.parameters()))]
    # Eight roundings in a row at most, of sums whose terms add up to twice the largest value or
    # less. Triton's interpreter truncates bf16, always towards zero, so that errors add up.
    size = {torch.float32: 2.0**-18, torch.bfloat16: 2.0**-4, torch.float16: 2.0**-7}[dtype]
    for result, wanted in zip(results, expected, strict=True):
        assert result is not None and wanted is not None and result.dtype == dtype
        apart = (result.detach().double() - wanted.detach()).abs().max()
        assert float(apart) <= size * float(wanted.detach().abs().max())
