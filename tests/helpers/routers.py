"""What transformers' routers choose, and how they are made to choose something else."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer_bridge.training.moe import expert_routers


@torch.no_grad()
def chosen_experts(model: Any, tokens: list[int]) -> Tensor:
    """int64 [tokens, layers with experts, top_k], of one forward."""
    found: list[Tensor] = []
    hooks = [
        router.register_forward_hook(lambda _module, _args, out: found.append(out[2]))
        for router in expert_routers(model)
    ]
    model(torch.tensor([tokens], device=model.device))
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1).cpu()


@contextlib.contextmanager
def forced(model: Any, experts: list[Tensor]) -> Iterator[None]:
    """Inside, transformers' own routers find these to be the likeliest: forward passes over one
    sequence each take `experts` one by one, int64 [tokens, layers with experts, top_k], -1 for what
    they really find.
    """
    own, layers = torch.topk, len(expert_routers(model))
    count = expert_routers(model)[0].num_experts
    calls = iter(range(len(experts) * layers))

    def topk(scores: Tensor, k: int, dim: int = -1, sorted: bool = True) -> tuple[Tensor, Tensor]:
        if scores.shape[-1] != count:  # of groups of experts
            return own(scores, k, dim=dim)
        call = next(calls)
        told = experts[call // layers][:, call % layers]
        ids = torch.where(told < 0, own(scores, k, dim=dim).indices, told)
        return scores.gather(-1, ids), ids

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "topk", topk)
        yield
    assert next(calls, None) is None, "a router was not called"
