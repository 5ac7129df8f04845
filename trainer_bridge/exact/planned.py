"""The memory of an exact model, in a plan: without its kernels, which need a device."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainer_bridge.exact.model import exchange_layers
from trainer_bridge.models.sharded_model import total_gradients
from trainer_bridge.ops.gradient_sums import Totals, totals_of


def plan_exact(model: nn.Module, batch_invariant: bool) -> None:
    """Let a planned model take the memory that `make_exact` lets it take.

    Besides norms and, with `batch_invariant`, the gradients of weights, it is that of the plain
    model.
    """
    if batch_invariant:
        exchange_layers(model, 1)
        total_gradients(model)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_norm, module)


def _norm(norm: Any, x: Tensor) -> Tensor:
    return _Norm.apply(x, norm.weight, totals_of(norm))


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, totals: Totals | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.totals = totals
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if ctx.totals is None:
            return torch.empty_like(x), torch.empty_like(weight), None
        ctx.totals["weight"].apply(lambda total: total)
        return torch.empty_like(x), None, None
