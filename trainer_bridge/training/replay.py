"""Routers that choose as the rollout's did: the gap between both sides is then of arithmetic alone,
and no token learns through experts that did not make it.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainer_bridge.training.balance import routers

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
            layers, top_k = routers(model), getattr(model.config, "num_experts_per_tok", 0)
            if routed.shape[1:] != (len(layers), top_k):
                got, want = tuple(routed.shape[1:]), (len(layers), top_k)
                raise ValueError(f"routed_experts are {got} a token, the model has {want}")
            for layer, chosen in zip(layers, routed.unbind(1), strict=True):
                hook = layer.register_forward_hook(partial(_follow, model.config, chosen))
                undo.callback(hook.remove)
        yield


def _follow(config: Any, chosen: Tensor, _module: Any, _inputs: Any, own: Routed) -> Routed:
    logits, weights, ids = own
    ids = torch.where(chosen < 0, ids, chosen.to(ids.dtype))
    return logits, _weigh(config, logits, ids).to(weights.dtype), ids


def _weigh(config: Any, logits: Tensor, ids: Tensor) -> Tensor:
    """Computes what transformers' routers do."""
    weights = torch.softmax(logits, -1, dtype=torch.float32).gather(1, ids)
    if config.model_type == "mixtral" or config.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights
