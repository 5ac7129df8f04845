"""Weights that a PEFT model means, in fp64, and the bf16 values that one rounding may give."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.helpers.rollout.fused import loaded


def randomize(model: Any, seed: int = 0) -> None:
    """Draw all trained parameters and all factors of adapters anew."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.requires_grad or "lora_" in name:
                param.copy_(torch.randn(param.shape, generator=draw) * 0.2)  # drawn on the CPU


def exact_weights(
    model: Any, adapter: str = "default"
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return each merged weight in fp64, and the largest error of its fp32 merge.

    An element of base + s B A with rank r is a sum of r products, a scaling and an addition, each
    rounded to 2^-24 of at most the sum of the terms' absolute values: (r + 2) 2^-24 of them. PEFT's
    module tree is read directly: `base_layer`, `lora_A`, `modules_to_save`.
    """
    merged, errors = {}, {}
    modules: dict[str, Any] = dict(model.base_model.model.named_modules())
    for path, module in modules.items():
        own = dict(module.named_parameters(recurse=False))
        if not own or "lora_" in path or ".original_module" in path:
            continue
        head, kept, tail = path.partition(".modules_to_save.")
        if kept and tail != adapter:
            continue
        name = head.removesuffix(".base_layer")
        for key, param in own.items():
            value = param.detach().double()
            merged[f"{name}.{key}"], errors[f"{name}.{key}"] = value, torch.zeros_like(value)
        if path.endswith(".base_layer"):
            layer = modules[name]
            config = model.peft_config[adapter]
            last = name.rpartition(".")[2]
            rank = config.rank_pattern.get(last, config.r)
            alpha = config.alpha_pattern.get(last, config.lora_alpha)
            scale = alpha / (rank**0.5 if config.use_rslora else rank)
            a = layer.lora_A[adapter].weight.detach().double()
            b = layer.lora_B[adapter].weight.detach().double()
            base, key = merged[f"{name}.weight"], f"{name}.weight"
            terms = base.abs() + scale * b.abs() @ a.abs()
            merged[key], errors[key] = base + scale * b @ a, (rank + 2) * 2**-24 * terms
    return merged, errors


def assert_one_rounding(engine: Any, exact: dict[str, Tensor], errors: dict[str, Tensor]) -> None:
    """Check each stored bf16 value: rounding is monotone, so it lies between two roundings."""
    written = {name: stored.clone() for name, stored in engine.model.named_parameters()}
    low = {name: (value - errors[name]).bfloat16() for name, value in exact.items()}
    high = {name: (value + errors[name]).bfloat16() for name, value in exact.items()}
    least, most = loaded(engine, low), loaded(engine, high)
    for name, stored in written.items():
        assert (least[name] <= stored).all() and (stored <= most[name]).all(), name
