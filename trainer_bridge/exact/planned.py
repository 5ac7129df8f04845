"""The memory of an exact model, in a plan: without its kernels, which need a device."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def plan_exact(model: nn.Module) -> None:
    """Let a planned model take the memory that `make_exact` lets it take.

    Norms keep less than in the plain model. All other memory is that of the plain model.
    """
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_norm, module)


def _norm(norm: Any, x: Tensor) -> Tensor:
    return _Norm.apply(x, norm.weight)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)
