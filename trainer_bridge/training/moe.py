"""Experts of transformers' mixtures as the trainer computes, balances and replays them."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rollout.model import Routing, expert_routing
from trainer_bridge.ops.experts import combine, silu_gate, sort_pairs, spread
from trainer_bridge.training.lora import STACKS, expert_layers, stack_name

NAME = "memsaver"
"""Transformers' name of `mix_experts`, once it is registered."""


def register_experts() -> None:
    """Make `mix_experts` known to transformers as `NAME`."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, mix_experts)


def mix_experts(experts: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Return what `experts`, a module of transformers with stacked weights, makes of tokens, [T,
    H], rounded where its own forward rounds.

    x: [T, H]. ids: int64 [T, k]; weights: [T, k], of x's dtype or fp32. Experts that are no plain
    gated ones go to transformers' own `grouped_mm`.
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
    """Return each row times its expert's matrix, adapted or not: [S, in] -> [S, out]."""
    out = _grouped(rows, getattr(experts, name), ends)
    lora = getattr(experts, stack_name(name), None)
    if lora is None or not lora.adapted:
        return out
    low = _grouped(_grouped(rows, lora.lora_a, ends), lora.lora_b, ends)
    return torch.add(out, low, alpha=lora.scale)


def _grouped(rows: Tensor, stack: Tensor, ends: Tensor) -> Tensor:
    """Return [S, out]. rows: [S, in]. stack: [E, out, in]. ends: int32 [E]."""
    return F.grouped_mm(rows, stack.transpose(-2, -1), offs=ends)


def check_widths(model: nn.Module, dtype: torch.dtype) -> None:
    """Refuse experts whose rows torch's grouped products of this dtype do not take."""
    step = 16 // dtype.itemsize
    for experts in expert_layers(model):
        widths = {experts.get_parameter(name).shape[-1] for name in STACKS}
        if odd := sorted(width for width in widths if width % step):
            raise ValueError(
                f"experts of rows of {odd[0]} elements: torch's grouped products take rows of "
                f"whole 16 bytes; make hidden_size and moe_intermediate_size multiples of {step}"
            )


def route_in_fp32(model: nn.Module) -> None:
    """Have all routers multiply in fp32, and weigh experts by fp32. ValueError where there are
    none.
    """
    routers = expert_routers(model)
    if not routers:
        raise ValueError("fp32_router=True is for mixtures of experts; this model routes nothing")
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
    """Return the modules that choose experts, layer by layer; a dense model has none."""
    return [each for each in model.modules() if type(each).__name__.lower().endswith("topkrouter")]


def _follow(routing: Routing, chosen: Tensor, module: Any, _inputs: Any, own: Routed) -> Routed:
    if isinstance(own, Tensor):
        name = type(module).__name__
        raise ValueError(
            f"routed_experts: {name} tells no experts; install transformers>=5.13 to replay them"
        )
    logits, weights, ids = own
    ids = torch.where(chosen < 0, ids, chosen.to(ids.dtype))
    return logits, routing.weigh(logits, ids).to(weights.dtype), ids


def balanced_routers(model: Any) -> list[nn.Module]:
    """Return the routers of a model that transformers has a load-balance loss for, else none."""
    records = getattr(model, "_can_record_outputs", None) or {}
    return expert_routers(model) if "router_logits" in records else []


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
        """Return what transformers' `load_balancing_loss_func` does, in fp32: experts * the sum
        over experts of (share of the choices) * (mean probability), over tokens of all layers. It
        is `top_k` where all experts are equal.
        """
        tokens = self._layers * self._weight.sum()
        shares = self._chosen / tokens * (self._probability / tokens)
        return len(self._chosen) * shares.sum()


@contextlib.contextmanager
def load_balance(model: Any, real: Tensor | None) -> Iterator[LoadBalance | None]:
    """Inside, a forward pass adds what it routes to the balance that is yielded.

    The backward pass belongs inside, too: it may compute layers again, and has to meet the same
    operations.

    Args:
        model: A mixture of experts of transformers.
        real: bool [B, L], False for padding; None: nothing is added, and None is yielded.
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
