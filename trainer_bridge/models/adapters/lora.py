"""Low-rank adapters of linear layers and experts, whose own weights are frozen.

An adapted layer adds scale * B A x to its output. The layers are not PEFT's: a weight keeps the
name and the module by which it is loaded, sharded and synced, and adapters are created on the meta
device like all other parameters.
"""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rollout.weights import SCALE
from trainer_bridge.config import LoraConfig
from trainer_bridge.sync.shards import local_shard, shard_box
from trainer_bridge.sync.writer import LowRank, scratch_for

NAMES = ("lora_a", "lora_b")
EXPERTS = "experts"
STACKS = ("gate_up_proj", "down_proj")
"""Parameters that `EXPERTS` adapts: [experts, 2 * inner, hidden] and [experts, hidden, inner]."""


class LoraLinear(nn.Linear):
    """A linear layer with an adapter: y = W x + bias + scale * B (A x).

    It replaces a layer, whose weight and bias it shares. A is `lora_a`, [rank, in], and B is
    `lora_b`, [out, rank]. `adapted` says whether the adapter is enabled.
    """

    def __init__(self, layer: nn.Linear, config: LoraConfig, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self.lora_a, self.lora_b = _new_factors(layer.weight, config.rank, dtype)
        self.scale, self.adapted = config.scale, True

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        if not self.adapted:
            return y
        return torch.add(y, F.linear(F.linear(x, self.lora_a), self.lora_b), alpha=self.scale)


class LoraStack(nn.Module):
    """The adapters of a stack of experts' matrices.

    The experts' module owns it under `stack_name`, and its forward adds scale * B (A x). A is
    `lora_a`, [experts, rank, in], and B is `lora_b`, [experts, out, rank]. `adapted` says whether
    the adapters are enabled.
    """

    def __init__(self, stack: Tensor, config: LoraConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.lora_a, self.lora_b = _new_factors(stack, config.rank, dtype)
        self.scale, self.adapted = config.scale, True


def _new_factors(weight: Tensor, rank: int, dtype: torch.dtype) -> list[nn.Parameter]:
    """Allocate undefined A and B for a matrix or a stack of matrices."""
    *stack, rows, columns = weight.shape
    shapes = [*stack, rank, columns], [*stack, rows, rank]
    return [nn.Parameter(torch.empty(s, dtype=dtype, device=weight.device)) for s in shapes]


class Adapter(NamedTuple):
    """A frozen parameter and its factors: weight + scale * b @ a, matrices or stacks of them."""

    weight: Tensor
    a: Tensor
    b: Tensor
    scale: float


def stack_name(name: str) -> str:
    """Return the name of the `LoraStack` of the stacked parameter `name` in its module."""
    return f"{name}_lora"


def add_adapters(model: nn.Module, config: LoraConfig, dtype: torch.dtype) -> None:
    """Freeze a model, and add undefined adapters to the layers that `config` names.

    A ValueError lists names that match no linear layer, or names a layer that shares its weight
    with another.
    """
    if unknown := sorted(set(config.target_modules) - target_names(model)):
        known = ", ".join(sorted(target_names(model)))
        text = f"no linear layer is named {', '.join(unknown)}; known: {known}"
        raise ValueError(f"LoraConfig.target_modules: {text}")
    uses = Counter(id(param) for _, param in model.named_parameters(remove_duplicate=False))
    model.requires_grad_(False)
    for path, layer in _linear_layers(model).items():
        if _last(path) not in config.target_modules:
            continue
        if uses[id(layer.weight)] > 1:
            text = f"{path} shares its weight with another layer; leave it out"
            raise ValueError(f"LoraConfig.target_modules: {text}")
        parent = model.get_submodule(path.rpartition(".")[0])
        setattr(parent, _last(path), LoraLinear(layer, config, dtype))
    if EXPERTS in config.target_modules:
        for experts in expert_layers(model):
            for name in STACKS:
                stack = LoraStack(experts.get_parameter(name), config, dtype)
                experts.add_module(stack_name(name), stack)


def target_names(model: nn.Module) -> set[str]:
    """Return the valid `target_modules`: last name components of linear layers, and `EXPERTS`."""
    names = {_last(path) for path in _linear_layers(model)}
    return names | ({EXPERTS} if expert_layers(model) else set())


def adapted_params(model: nn.Module) -> dict[str, Adapter]:
    """Return the adapters of a model by the name of the adapted parameter."""
    adapters = {}
    for path, layer in model.named_modules():
        if isinstance(layer, LoraLinear | LoraStack):
            stacked = isinstance(layer, LoraStack)
            name = path.removesuffix(stack_name("")) if stacked else f"{path}.weight"
            weight = model.get_parameter(name)
            adapters[name] = Adapter(weight, layer.lora_a, layer.lora_b, layer.scale)
    return adapters


def is_adapter(name: str) -> bool:
    """Return whether a parameter of this name is an adapter."""
    return _last(name) in NAMES


def base_params(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters without adapters by checkpoint name; tied ones appear once."""
    return {name: param for name, param in model.named_parameters() if not is_adapter(name)}


@contextlib.contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Disable all adapters inside the block."""
    layers = [layer for layer in model.modules() if isinstance(layer, LoraLinear | LoraStack)]
    for layer in layers:
        layer.adapted = False
    try:
        yield
    finally:
        for layer in layers:
            layer.adapted = True


def _linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    return {path: module for path, module in model.named_modules() if type(module) is nn.Linear}


def expert_layers(model: nn.Module) -> list[nn.Module]:
    """Return the modules with the stacked matrices of a layer's experts, without biases."""
    return [
        module
        for path, module in model.named_modules()
        if _last(path) == EXPERTS and tuple(dict(module.named_parameters(recurse=False))) == STACKS
    ]


def _last(path: str) -> str:
    return path.rpartition(".")[2]


class Adapters:
    """The adapters of a sharded model, owned by the trainer.

    All methods are collective calls.
    """

    def __init__(self, model: nn.Module, config: LoraConfig) -> None:
        self._config, self.served_as = config, config.served_as
        self._scale = torch.tensor(config.scale)  # One tensor: a sync keeps tables of addresses.
        self._adapted = adapted_params(model)
        self.names = tuple(self._adapted)  # of the adapted parameters

    def factors(self) -> dict[str, LowRank]:
        """Return the factors of this rank's shards by parameter; valid until the next update."""
        return {name: shard_factors(adapter) for name, adapter in self._adapted.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Return all factors by name, sharded as they are, and the factor of B A."""
        tensors = dict[str, Tensor]()
        for name, (_, a, b, _) in self._adapted.items():
            tensors |= zip(factor_names(name), (a, b), strict=True)
        return tensors | {SCALE: self._scale}

    def scratch(self) -> Tensor:
        """Allocate the memory in which a sync merges the adapters."""
        bases = [local_shard(adapter.weight) for adapter in self._adapted.values()]
        return scratch_for(bases, bases[0].device)

    def identity(self) -> dict[str, Any]:
        """Return plain data by which a checkpoint recognizes the same adapters."""
        identity = dataclasses.asdict(self._config)
        del identity["served_as"]  # the same adapters, however rollouts serve them
        return identity | {"target_modules": sorted(self._config.target_modules)}


def factor_names(name: str) -> tuple[str, str]:
    """Return the names of A and B of the adapted parameter `name`."""
    path = name.removesuffix(".weight") if name.endswith(".weight") else stack_name(name)
    return f"{path}.{NAMES[0]}", f"{path}.{NAMES[1]}"


def shard_factors(adapter: Adapter) -> LowRank:
    """Return the parts of A and B that belong to this rank's shard of the weight."""
    weight, a, b, scale = adapter
    if not isinstance(weight, DTensor):
        return LowRank(a=_whole(a), b=_whole(b), scale=scale)
    *experts, rows, columns = shard_box(weight).slices
    # Weight and B are sharded by rows, or by expert.
    alike = isinstance(b, DTensor) and b.placements == weight.placements
    return LowRank(
        a=local_shard(a) if alike and experts else _whole(a)[*experts, :, columns],
        b=local_shard(b) if alike else _whole(b)[*experts, rows],
        scale=scale,
    )


def _whole(param: Tensor) -> Tensor:
    if not isinstance(param, DTensor):
        return param.detach()
    if param.device_mesh.size() == 1:
        return local_shard(param)
    return param.full_tensor().detach()
