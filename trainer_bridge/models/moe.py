"""Computation, load balance and replay of the experts of transformers' mixtures."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rollout.model import Routing, expert_routing
from trainer_bridge.models.adapters.lora import STACKS, expert_layers, stack_name
from trainer_bridge.ops.decoder_ops import silu_gate
from trainer_bridge.ops.experts import combine, sort_pairs, spread

NAME = "memsaver"
"""Name under which `register_experts` registers `mix_experts` with transformers."""


def register_experts() -> None:
    """Register `mix_experts` with transformers as `NAME`."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, mix_experts)


def mix_experts(experts: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Compute the weighted outputs, [T, H], of the experts chosen for each token.

    The tokens `x` are [T, H], their experts `ids` int64 [T, k], and `weights` [T, k] of x's dtype
    or fp32. `experts` is a module of transformers with stacked weights. Intermediate results are
    rounded as in the module's own forward. Experts other than plain gated ones use transformers'
    own `grouped_mm`.
    """
    if experts.has_bias or experts.is_transposed or not getattr(experts, "has_gate", True):
        from transformers.integrations.moe import grouped_mm_experts_forward

        return grouped_mm_experts_forward(experts, x, ids, weights)
    pairs = sort_pairs(ids, experts.num_experts)
    gate_up = _product(experts, "gate_up_proj", spread(x, pairs), pairs.ends)
    silu = getattr(experts.config, "hidden_act", None) == "silu"
    inner = silu_gate(gate_up) if silu else experts._apply_gate(gate_up)
    return combine(_product(experts, "down_proj", inner, pairs.ends), weights.contiguous(), pairs)


def _product(experts: nn.Module, name: str, rows: Tensor, ends: Tensor) -> Tensor:
    """Multiply each row by its expert's matrix, with adapters if enabled: [S, in] -> [S, out]."""
    out = _grouped(rows, getattr(experts, name), ends)
    lora = getattr(experts, stack_name(name), None)
    if lora is None or not lora.adapted:
        return out
    low = _grouped(_grouped(rows, lora.lora_a, ends), lora.lora_b, ends)
    return torch.add(out, low, alpha=lora.scale)


def _grouped(rows: Tensor, stack: Tensor, ends: Tensor) -> Tensor:
    """Multiply rows [S, in], which end at `ends` [E] for each matrix of `stack` [E, out, in]."""
    return F.grouped_mm(rows, stack.transpose(-2, -1), offs=ends)


def check_widths(model: nn.Module, dtype: torch.dtype) -> None:
    """Raise a ValueError if torch's grouped products do not support the width of expert rows."""
    step = 16 // dtype.itemsize
    for experts in expert_layers(model):
        widths = {experts.get_parameter(name).shape[-1] for name in STACKS}
        if odd := sorted(width for width in widths if width % step):
            raise ValueError(
                f"experts have rows of {odd[0]} elements: torch's grouped products need rows of "
                f"whole 16 bytes; make hidden_size and moe_intermediate_size multiples of {step}"
            )


def route_in_fp32(model: nn.Module) -> None:
    """Patch all routers to compute logits and weights in fp32; ValueError if there is no router."""
    routers = expert_routers(model)
    if not routers:
        raise ValueError("fp32_router=True is for mixtures of experts; this model has no router")
    for router in routers:
        router.forward = partial(_in_fp32, router, router.forward)


def _in_fp32(router: nn.Module, forward: Callable[..., Any], x: Tensor) -> Any:
    weight = router.weight
    router._parameters["weight"] = weight.float()  # type: ignore[assignment, operator]
    try:
        return forward(x.float())
    finally:
        router._parameters["weight"] = weight  # type: ignore[assignment]


Routed = tuple[Tensor, Tensor, Tensor]
"""The output of a router: logits [T, experts], weights [T, top_k], experts [T, top_k]."""


@contextlib.contextmanager
def replay(model: Any, routed: Tensor | None) -> Iterator[None]:
    """Route tokens to given experts inside the block.

    `routed` has integers [T, layers with experts, top_k]. The model chooses where they are -1, or
    everywhere if `routed` is None. The experts are weighted by the model's own scores, so routers
    are trained as without replay. Run the backward pass inside the block, too, because it may
    recompute layers.

    A shape that does not fit the model raises a ValueError. So does the forward pass of routers
    that do not return their experts.
    """
    with contextlib.ExitStack() as undo:
        if routed is not None:
            layers, top_k = expert_routers(model), getattr(model.config, "num_experts_per_tok", 0)
            if routed.shape[1:] != (len(layers), top_k):
                got, want = tuple(routed.shape[1:]), (len(layers), top_k)
                raise ValueError(f"routed_experts are {got} per token, the model has {want}")
            routing = expert_routing(model.config)
            for layer, chosen in zip(layers, routed.unbind(1), strict=True):
                hook = layer.register_forward_hook(partial(_follow, routing, chosen))
                undo.callback(hook.remove)
        yield


def expert_routers(model: nn.Module) -> list[nn.Module]:
    """Return the routers of all layers, in order; a dense model has none."""
    names = ((module, type(module).__name__.lower()) for module in model.modules())
    return [module for module, name in names if name.endswith("topkrouter")]


def _follow(routing: Routing, chosen: Tensor, module: Any, _inputs: Any, own: Routed) -> Routed:
    if isinstance(own, Tensor):
        name = type(module).__name__
        raise ValueError(
            f"routed_experts: {name} returns no experts; install transformers>=5.13 to replay them"
        )
    logits, weights, ids = own
    given = torch.where(chosen < 0, ids, chosen.to(ids.dtype))
    own_choice = (given == ids).all(-1, keepdim=True)
    weights = torch.where(own_choice, weights, routing.weigh(logits, given).to(weights.dtype))
    return logits, weights, given


def balanced_routers(model: Any) -> list[nn.Module]:
    """Return the routers if transformers has a load-balance loss for the model, else none."""
    records = getattr(model, "_can_record_outputs", None) or {}
    return expert_routers(model) if "router_logits" in records else []


class LoadBalance:
    """The choices of all routers in a forward pass, summed up for the load-balance loss."""

    def __init__(self, top_k: int, real: Tensor) -> None:
        """Create an empty balance of `top_k` choices for tokens that are `real`, bool [T]."""
        self._top_k, self._weight = top_k, real.float().unsqueeze(1)
        self._layers = 0
        self._chosen = self._probability = torch.zeros((), device=real.device)

    def add(self, logits: Tensor) -> None:
        """Add the choices of one router, from its logits [T, experts]."""
        scores = logits.float().softmax(-1)
        with torch.no_grad():
            ids = scores.topk(self._top_k, dim=-1).indices
            chosen = torch.zeros_like(scores).scatter_(1, ids, self._weight.expand_as(ids))
            self._chosen = self._chosen + chosen.sum(0)
        self._probability = self._probability + (scores * self._weight).sum(0)
        self._layers += 1

    @property
    def loss(self) -> Tensor:
        """Return the load-balance loss, as of transformers' `load_balancing_loss_func`, in fp32.

        It is the number of experts times the sum over experts of (share of the choices) * (mean
        probability), over the tokens of all layers. It is `top_k` if all experts are used equally.
        """
        tokens = self._layers * self._weight.sum()
        shares = self._chosen / tokens * (self._probability / tokens)
        return len(self._chosen) * shares.sum()


@contextlib.contextmanager
def load_balance(model: Any, real: Tensor | None) -> Iterator[LoadBalance | None]:
    """Record the routing of forward passes inside the block, and yield their balance.

    `real` is bool [B, L], False for padding; None records nothing and yields None. Run the backward
    pass inside the block, too: if it recomputes layers, they must run the same operations again.
    """
    if real is None:
        yield None
        return
    balance = LoadBalance(model.config.num_experts_per_tok, real.flatten())
    with contextlib.ExitStack() as undo:
        for router in balanced_routers(model):
            hook = router.register_forward_hook(lambda _module, _args, out: balance.add(out[0]))
            undo.callback(hook.remove)
        yield balance
