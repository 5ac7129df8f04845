"""The load-balance loss of mixtures of experts, which keeps a router from sending all tokens to a
few.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


def routers(model: Any) -> list[nn.Module]:
    """Returns the modules that choose experts, layer by layer; a dense model has none."""
    recorder = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits")
    if recorder is None:
        return []
    return [module for module in model.modules() if type(module) is recorder.target_class]


class LoadBalance:
    """Adds up what routers choose in a forward pass."""

    def __init__(self, top_k: int, real: Tensor) -> None:
        """real: bool [T], False for padding."""
        self._top_k, self._weight = top_k, real.float().unsqueeze(1)
        self._layers = 0
        self._chosen = self._probability = torch.zeros((), device=real.device)

    def add(self, logits: Tensor) -> None:
        """logits: of one router, [T, experts]."""
        scores = logits.float().softmax(-1)
        with torch.no_grad():
            ids = scores.topk(self._top_k, dim=-1).indices
            chosen = torch.zeros_like(scores).scatter_(1, ids, self._weight.expand_as(ids))
            self._chosen = self._chosen + chosen.sum(0)
        self._probability = self._probability + (scores * self._weight).sum(0)
        self._layers += 1

    @property
    def loss(self) -> Tensor:
        """Returns what transformers' `load_balancing_loss_func` does, in fp32: experts * the sum
        over experts of (share of the choices) * (mean probability), over tokens of all layers. It
        is `top_k` where all experts are equal.
        """
        tokens = self._layers * self._weight.sum()
        shares = self._chosen / tokens * (self._probability / tokens)
        return len(self._chosen) * shares.sum()


@contextlib.contextmanager
def load_balance(model: Any, real: Tensor) -> Iterator[LoadBalance]:
    """Inside, a forward pass adds what it routes. The backward pass belongs inside, too: it may
    compute layers again, and has to meet the same operations.

    real: bool [B, L], False for padding.
    """
    balance = LoadBalance(model.config.num_experts_per_tok, real.flatten())
    with contextlib.ExitStack() as undo:
        for router in routers(model):
            hook = router.register_forward_hook(lambda _module, _args, out: balance.add(out[0]))
            undo.callback(hook.remove)
        yield balance
