"""The names and tensors of adapters in PEFT's files."""

from typing import Any

from torch import Tensor

from trainer_bridge.config import LoraConfig
from trainer_bridge.models.adapters.lora import EXPERTS, STACKS


def peft_config(config: LoraConfig, base: str) -> dict[str, Any]:
    """Return the content of PEFT's adapter_config.json for the base model of this name."""
    targets, stacks = sorted(config.target_modules), [f"{EXPERTS}.{name}" for name in STACKS]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "target_modules": [name for name in targets if name != EXPERTS] or None,
        "target_parameters": stacks if EXPERTS in targets else None,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def peft_tensors(name: str, a: Tensor, b: Tensor) -> dict[str, Tensor]:
    """Return the factors of the adapted parameter `name` by their names in PEFT's files.

    Experts are PEFT's `target_parameters`.
    """
    if a.ndim == 3:
        a, b = a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)
    key = f"base_model.model.{_peft_path(name)}"
    return {f"{key}.lora_A.weight": a.contiguous(), f"{key}.lora_B.weight": b.contiguous()}


def _peft_path(name: str) -> str:
    """Return the path of a parameter's adapters in PEFT, which wraps modules once per parameter."""
    path, _, last = name.rpartition(".")
    return path if last != STACKS[0] else f"{path}.base_layer"
