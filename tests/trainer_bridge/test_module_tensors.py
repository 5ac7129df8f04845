"""Tensors of a module by checkpoint name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from trainer_bridge.sync.module_tensors import named_tensors


def test_stored_tensors_have_checkpoint_names_and_come_once() -> None:
    model: Any = nn.Module()
    model.layers = nn.ModuleList([checkpoint_wrapper(nn.Linear(2, 2)), nn.BatchNorm1d(2)])
    model.head = nn.Linear(2, 2, bias=False)
    model.head.weight = model.layers[0].weight
    model.register_buffer("computed", torch.ones(1), persistent=False)
    model.register_buffer("absent", None)
    named = named_tensors(model)
    assert {*named} == {f"layers.0.{name}" for name in ("weight", "bias")} | {
        f"layers.1.{name}"
        for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    }
    assert named["layers.0.weight"] is model.head.weight
    assert named["layers.1.running_mean"] is model.layers[1].running_mean


def test_replaced_tensor_is_read() -> None:
    model = nn.Linear(2, 2)
    before = named_tensors(model)["weight"]
    model.weight = nn.Parameter(torch.ones(2, 2))
    assert named_tensors(model)["weight"] is model.weight is not before
