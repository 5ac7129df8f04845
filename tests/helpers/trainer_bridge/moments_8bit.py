"""Moments in 8 bits: a model that has them, their values, and the error of their tables."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainer_bridge import Trainer
from trainer_bridge.models.files.moments_8bit import code_tables
from trainer_bridge.sync.shards import local_shard

EIGHT: dict[str, Any] = {"optimizer": "adamw_8bit"}
# Matrices of 128 x 64 and 64 x 64, whose halves begin at a block; those of the MLP, of 101 rows or
# columns, whose last block and halves are odd; and two that are too small.
SHAPE = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 101, "num_hidden_layers": 1}


def state(side: Any) -> dict[str, Tensor]:
    """Copy this rank's trained shards and moments of a policy or a critic to the CPU."""
    held, model = {}, getattr(side, "policy", side)
    for name, param in model.module.named_parameters():
        if param.requires_grad:
            moments = model.optimizer.state[param].items()
            held |= {f"{name}.{key}": tensor for key, tensor in moments if key != "step"}
            held[name] = param
    return {name: local_shard(tensor).cpu().clone() for name, tensor in held.items()}


def dequantized(codes: Tensor, scales: Tensor, moment: str) -> tuple[Tensor, Tensor]:
    """Return the values of a shard's codes, and the scale of each."""
    of_elements = scales.flatten().repeat_interleave(256)[: codes.numel()].view(codes.shape)
    return torch.tensor(code_tables()[moment])[codes.int()] * of_elements, of_elements


def moments(trainer: Trainer) -> dict[str, tuple[Tensor, Tensor]]:
    """Return this rank's quantized moments by name, as from `dequantized`."""
    held = state(trainer)
    names = [name.removesuffix("_codes") for name in held if name.endswith("_codes")]
    return {
        name: dequantized(held[f"{name}_codes"], held[f"{name}_scales"], name.rpartition(".")[2])
        for name in names
    }


def half_gap(moment: str) -> float:
    """Return the largest distance to the nearest value of a table, as a share of the scale.

    The table of the first moment ends before -1. On the CPU, the value that bitsandbytes chooses is
    the nearest one within 3e-5, as measured.
    """
    values = torch.tensor(code_tables()[moment], dtype=torch.float64)
    ends = [float(values[0]) + 1] if moment == "exp_avg" else []
    return max([float(values.diff().max()) / 2, *ends]) + 5e-5
