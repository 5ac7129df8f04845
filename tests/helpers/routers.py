"""Record the experts that transformers' routers choose, and force other choices."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer_bridge.models.moe import expert_routers


@torch.no_grad()
def chosen_experts(model: Any, tokens: list[int]) -> Tensor:
    """Return the choices in one forward: int64 [tokens, layers with experts, top_k]."""
    choices: list[Tensor] = []
    hooks = [
        router.register_forward_hook(lambda _module, _args, out: choices.append(out[2]))
        for router in expert_routers(model)
    ]
    model(torch.tensor([tokens], device=model.device))
    for hook in hooks:
        hook.remove()
    return torch.stack(choices, 1).cpu()


@contextlib.contextmanager
def forced(model: Any, experts: list[Tensor]) -> Iterator[None]:
    """Force transformers' routers to choose the given experts.

    Each forward pass, over one sequence, uses the next of `experts`, int64 [tokens, layers with
    experts, top_k], where -1 keeps the router's own choice.
    """
    own, layers = torch.topk, len(expert_routers(model))
    count = expert_routers(model)[0].num_experts
    calls = iter(range(len(experts) * layers))

    def topk(scores: Tensor, k: int, dim: int = -1, sorted: bool = True) -> tuple[Tensor, Tensor]:
        if scores.shape[-1] != count:  # scores of groups of experts
            return own(scores, k, dim=dim)
        call = next(calls)
        wanted = experts[call // layers][:, call % layers]
        ids = torch.where(wanted < 0, own(scores, k, dim=dim).indices, wanted)
        return scores.gather(-1, ids), ids

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "topk", topk)
        yield
    assert next(calls, None) is None, "a router was not called"
