"""Routers that choose as the rollout's did: the gap between both sides is then of arithmetic alone,
and no token learns through experts that did not make it.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rollout.model import Routing, expert_routing

Routed = tuple[Tensor, Tensor, Tensor]
"""A router's logits [T, experts], weights and experts [T, top_k]."""


@contextlib.contextmanager
def replay(model: Any, routed: Tensor | None) -> Iterator[None]:
    """Inside, tokens go to the experts `routed`, weighed by the model's own scores of these, so
    that routers learn as ever. The backward pass belongs inside, too: it may compute layers again.

    routed: integers [T, layers with experts, top_k], -1 where the model chooses itself; None: it
    does so everywhere. ValueError: they are of another model.
    """
    with contextlib.ExitStack() as undo:
        if routed is not None:
            layers, top_k = expert_routers(model), getattr(model.config, "num_experts_per_tok", 0)
            if routed.shape[1:] != (len(layers), top_k):
                got, want = tuple(routed.shape[1:]), (len(layers), top_k)
                raise ValueError(f"routed_experts are {got} a token, the model has {want}")
            routing = expert_routing(model.config)
            for layer, chosen in zip(layers, routed.unbind(1), strict=True):
                hook = layer.register_forward_hook(partial(_follow, routing, chosen))
                undo.callback(hook.remove)
        yield


def expert_routers(model: nn.Module) -> list[nn.Module]:
    """Returns the modules that choose experts, layer by layer; a dense model has none."""
    return [each for each in model.modules() if type(each).__name__.lower().endswith("topkrouter")]


def _follow(routing: Routing, chosen: Tensor, _module: Any, _inputs: Any, own: Routed) -> Routed:
    logits, weights, ids = own
    ids = torch.where(chosen < 0, ids, chosen.to(ids.dtype))
    return logits, routing.weigh(logits, ids).to(weights.dtype), ids
