"""Tensors of a module that are read without a walk, against a walk after each kind of change."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from trainer_bridge.sync import module_tensors
from trainer_bridge.sync.module_tensors import ModuleTensors, named_tensors


def build() -> Any:
    model: Any = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(2, 2), nn.BatchNorm1d(2)])
    model.head = nn.Linear(2, 2, bias=False)
    model.head.weight = model.layers[0].weight
    return model


def rename(model: Any) -> None:
    params = vars(model.layers[0])["_parameters"]
    params["offset"] = params.pop("bias")


def replace_layer(model: Any) -> None:
    model.layers[0] = nn.Linear(2, 2)


@pytest.mark.parametrize(
    "change",
    [
        rename,
        replace_layer,
        lambda model: model.layers.append(nn.Linear(2, 2)),
        lambda model: model.layers.pop(1),
        lambda model: model.head.register_parameter("weight", nn.Parameter(torch.ones(2, 2))),
        lambda model: model.layers[0].register_parameter("bias", None),
        lambda model: setattr(model.layers[1], "running_mean", torch.ones(2)),
        lambda model: model.register_buffer("scale", torch.ones(1)),
    ],
)
def test_each_change_of_a_module_is_read(change: Callable[[Any], Any]) -> None:
    model = build()
    read = ModuleTensors(model)
    read()
    change(model)
    wanted, found = named_tensors(model), read()
    assert [*found] == [*wanted]
    assert all(found[name] is tensor for name, tensor in wanted.items())


def test_unchanged_module_is_walked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    walks: list[Any] = []

    def counted(module: nn.Module) -> Any:
        walks.append(module)
        return named_tensors(module)

    monkeypatch.setattr(module_tensors, "named_tensors", counted)
    model = build()
    read = ModuleTensors(model)
    assert read() == read() == read() and len(walks) == 1


def test_replaced_tensor_is_not_kept_alive() -> None:
    model = build()
    read = ModuleTensors(model)
    read()
    before = weakref.ref(model.layers[0].bias)
    model.layers[0].bias = nn.Parameter(torch.ones(2))
    assert before() is None
