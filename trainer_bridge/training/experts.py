"""Experts of transformers' mixtures as the trainer computes them, with or without adapters."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer_bridge.ops.experts import combine, silu_gate, sort_pairs, spread
from trainer_bridge.training.lora import STACKS, expert_layers, stack_name
from trainer_bridge.training.replay import expert_routers

NAME = "memsaver"
"""Transformers' name of `mix_experts`, once it is registered."""


def register_experts() -> None:
    """Makes `mix_experts` known to transformers as `NAME`."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, mix_experts)


def mix_experts(experts: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Returns what `experts`, a module of transformers with stacked weights, makes of tokens, [T,
    H], rounded where its own forward rounds.

    x: [T, H]. ids: int64 [T, k]; weights: [T, k], of x's dtype or fp32. Experts that are no plain
    gated ones go to transformers' own `grouped_mm`.
    """
    if experts.has_bias or experts.is_transposed or not getattr(experts, "has_gate", True):
        from transformers.integrations.moe import grouped_mm_experts_forward

        out: Tensor = grouped_mm_experts_forward(experts, x, ids, weights)
        return out
    pairs = sort_pairs(ids, experts.num_experts)
    gate_up = _product(experts, "gate_up_proj", spread(x, pairs), pairs.ends)
    silu = getattr(experts.config, "hidden_act", None) == "silu"
    inner = silu_gate(gate_up) if silu else experts._apply_gate(gate_up)
    return combine(_product(experts, "down_proj", inner, pairs.ends), weights.contiguous(), pairs)


def _product(experts: nn.Module, name: str, rows: Tensor, ends: Tensor) -> Tensor:
    """Returns each row times its expert's matrix, adapted if it has adapters: [S, in] -> [S,
    out].
    """
    out = _grouped(rows, getattr(experts, name), ends)
    lora = getattr(experts, stack_name(name), None)
    if lora is None or not lora.adapted:
        return out
    low = _grouped(_grouped(rows, lora.lora_a, ends), lora.lora_b, ends)
    return torch.add(out, low, alpha=lora.scale)


def _grouped(rows: Tensor, stack: Tensor, ends: Tensor) -> Tensor:
    """Returns [S, out]. rows: [S, in]. stack: [E, out, in]. ends: int32 [E]."""
    return F.grouped_mm(rows, stack.transpose(-2, -1), offs=ends)


def check_widths(model: nn.Module, dtype: torch.dtype) -> None:
    """ValueError for experts whose rows torch's grouped products of this dtype do not take."""
    step = 16 // dtype.itemsize
    for experts in expert_layers(model):
        widths = {experts.get_parameter(name).shape[-1] for name in STACKS}
        if odd := sorted(width for width in widths if width % step):
            raise ValueError(
                f"experts of rows of {odd[0]} elements: torch's grouped products take rows of "
                f"whole 16 bytes; make hidden_size and moe_intermediate_size multiples of {step}"
            )


def route_in_fp32(model: nn.Module) -> None:
    """Has all routers multiply in fp32, and weigh experts by fp32. ValueError where there are
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
