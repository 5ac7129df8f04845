"""The load-balance loss of mixtures of experts, which keeps a router from sending all tokens to a
few.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def routers(model: Any) -> list[nn.Module]:
    """Returns the modules that choose experts, layer by layer; a dense model has none."""
    recorder = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits")
    if recorder is None:
        return []
    return [module for module in model.modules() if type(module) is recorder.target_class]


@contextlib.contextmanager
def router_logits(model: nn.Module) -> Iterator[list[Tensor]]:
    """Inside, a forward pass adds each router's logits [B * L, experts] to the list, with gradient.

    Leave it before the backward pass, which may compute layers again.
    """
    found: list[Tensor] = []
    hooks = [
        router.register_forward_hook(lambda _module, _args, output: found.append(output[0]))
        for router in routers(model)
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def load_balance(logits: Sequence[Tensor], top_k: int, real: Tensor) -> Tensor:
    """Returns what transformers' `load_balancing_loss_func` does, in fp32: experts * the sum over
    experts of (share of the choices) * (mean probability), over tokens of all layers. It is
    `top_k` where all experts are equal.

    logits: [T, experts] of each layer. real: bool [T], False for padding.
    """
    count, weight = logits[0].shape[1], real.float().unsqueeze(1)
    chosen = probability = torch.zeros(count, dtype=torch.float32, device=real.device)
    for layer in logits:
        scores = layer.float().softmax(-1)
        ids = scores.detach().topk(top_k, dim=-1).indices
        chosen = chosen.scatter_add(0, ids.flatten(), weight.expand_as(ids).flatten())
        probability = probability + (scores * weight).sum(0)
    tokens = len(logits) * weight.sum()
    return count * (chosen / tokens * (probability / tokens)).sum()
