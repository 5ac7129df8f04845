"""Adapters of tiny models in PEFT's folders, and the models that answer with them."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

SHAPES: list[dict[str, Any]] = [
    {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    {"r": 3, "lora_alpha": 6, "target_modules": ["k_proj", "o_proj", "gate_proj", "up_proj"]},
    {"r": 2, "lora_alpha": 3, "use_rslora": True, "target_modules": "all-linear"},
]
"""Ranks, scales and layers of adapters for dense models, all within a rank of 4."""


def save_adapter(folder: Path, model: PreTrainedModel, seed: int, **config: Any) -> PreTrainedModel:
    """Save a random adapter of a model, and return the model with the adapter."""
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(task_type="CAUSAL_LM", **config))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, factor in adapted.named_parameters():
            if "lora_" in name:
                factor.copy_(torch.randn(factor.shape, generator=generator) * 0.2)
    adapted.save_pretrained(str(folder))
    return adapted.base_model.model


def write_adapter(
    folder: Path, weights: Mapping[str, tuple[int, ...]], rank: int, seed: int
) -> Path:
    """Write a random adapter of the linear layers with these weights, by name and shape."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, (rows, columns) in weights.items():
        path = f"base_model.model.{name.removesuffix('.weight')}"
        a = torch.randn(rank, columns, generator=generator) * columns**-0.5
        b = torch.randn(rows, rank, generator=generator) * rank**-0.5
        tensors |= {f"{path}.lora_A.weight": a.bfloat16(), f"{path}.lora_B.weight": b.bfloat16()}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
