"""Low-rank adapters in a model: its linear layers, and each of its experts, add scale * B A x to
what they are; their own weights are frozen.

Layers of our own, not PEFT's: a weight keeps its name and its place, by which it is loaded, sharded
and synced, and the adapters are made on the meta device as every other parameter is.
"""

import contextlib
import dataclasses
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from memsaver.system.files import replace_text
from trainer_bridge.config import LoraConfig
from trainer_bridge.sync.shards import local_shard, shard_box
from trainer_bridge.sync.writer import LowRank
from trainer_bridge.training import checkpoint

NAMES = ("lora_a", "lora_b")
EXPERTS = "experts"
STACKS = ("gate_up_proj", "down_proj")
"""What `EXPERTS` stands for: [experts, 2 * inner, hidden], [experts, hidden, inner]."""


class LoraLinear(nn.Linear):
    """y = W x + bias + scale * B (A x), or W x + bias alone while `adapted` is False.

    lora_a: A, [rank, in]; lora_b: B, [out, rank]. Weight and bias are those of the layer whose
    place it takes.
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
    """Holds the adapters of a stack of experts' matrices, beside it in its module under
    `stack_name`; that module's forward adds scale * B (A x) while `adapted` is True.

    lora_a: A, [experts, rank, in]; lora_b: B, [experts, out, rank].
    """

    def __init__(self, stack: Tensor, config: LoraConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.lora_a, self.lora_b = _new_factors(stack, config.rank, dtype)
        self.scale, self.adapted = config.scale, True


def _new_factors(weight: Tensor, rank: int, dtype: torch.dtype) -> list[nn.Parameter]:
    """Return A and B, undefined, of a matrix or of each of a stack."""
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
    """Return what the adapters of the stacked parameter `name` are called in its module."""
    return f"{name}_lora"


def add_adapters(model: nn.Module, config: LoraConfig, dtype: torch.dtype) -> None:
    """Freeze the model, and put adapters, undefined, into the linear layers and experts that
    `config` names.

    A ValueError says which names are of no linear layer, or of one whose weight another layer has,
    too.
    """
    if unknown := sorted(set(config.target_modules) - target_names(model)):
        known = ", ".join(sorted(target_names(model)))
        text = f"no linear layer is called {', '.join(unknown)}; there are: {known}"
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
    """Return what `target_modules` may name: last parts of linear layers' names, `EXPERTS`."""
    names = {_last(path) for path in _linear_layers(model)}
    return names | ({EXPERTS} if expert_layers(model) else set())


def adapted_params(model: nn.Module) -> dict[str, Adapter]:
    """Return what is adapted by the parameter's name; empty without adapters."""
    found = {}
    for path, layer in model.named_modules():
        if isinstance(layer, LoraLinear):
            found[f"{path}.weight"] = Adapter(layer.weight, layer.lora_a, layer.lora_b, layer.scale)
        elif isinstance(layer, LoraStack):
            name = path.removesuffix(stack_name(""))
            weight = model.get_parameter(name)
            found[name] = Adapter(weight, layer.lora_a, layer.lora_b, layer.scale)
    return found


def is_adapter(name: str) -> bool:
    """Return whether a parameter of this name is an adapter."""
    return _last(name) in NAMES


def base_params(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by checkpoint name, tied ones once; without adapters."""
    return {name: param for name, param in model.named_parameters() if not is_adapter(name)}


@contextlib.contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Make the model the frozen one inside the block."""
    layers = [each for each in model.modules() if isinstance(each, LoraLinear | LoraStack)]
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
    """Return the modules that hold the matrices of all experts of a layer, and have no biases."""
    return [
        module
        for path, module in model.named_modules()
        if _last(path) == EXPERTS and tuple(dict(module.named_parameters(recurse=False))) == STACKS
    ]


def _last(path: str) -> str:
    return path.rpartition(".")[2]


class Adapters:
    """The adapters of one rank's model. Every rank calls every method: shards are gathered."""

    def __init__(self, model: nn.Module, config: LoraConfig) -> None:
        self._config = config
        self._adapted = adapted_params(model)
        # Of the parameters that are adapted.
        self.names = tuple(self._adapted)

    def factors(self) -> dict[str, LowRank]:
        """Return factors by parameter, for this rank's shard; perhaps no copies: read at once."""
        return {name: _factors(adapter) for name, adapter in self._adapted.items()}

    def identity(self) -> dict[str, Any]:
        """Return what a checkpoint must agree with, plain data."""
        named = {"target_modules": sorted(self._config.target_modules)}
        return dataclasses.asdict(self._config) | named

    def save(self, directory: str, base_path: str) -> None:
        """Write adapter_config.json and adapter_model.safetensors, as PEFT reads them; whole or
        not at all.

        base_path: what the config names as the base model. Tensors are in the adapters' dtype;
        those of experts are PEFT's of `target_parameters`.
        """
        from safetensors.torch import save_file

        tensors: dict[str, Tensor] = {}
        for name, adapter in self._adapted.items():
            a, b = _whole(adapter.a).cpu(), _whole(adapter.b).cpu()
            if a.ndim == 3:
                a, b = a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)
            for letter, factor in (("A", a), ("B", b)):
                key = f"base_model.model.{_peft_path(name)}.lora_{letter}.weight"
                tensors[key] = factor.contiguous()
        with checkpoint.whole_directory(directory) as partial:
            if dist.get_rank() == 0:
                save_file(tensors, Path(partial, "adapter_model.safetensors"), {"format": "pt"})
                text = json.dumps(self._peft_config(base_path), indent=2)
                replace_text(Path(partial, "adapter_config.json"), text)

    def _peft_config(self, base_path: str) -> dict[str, Any]:
        targets, stacks = self._config.target_modules, [f"{EXPERTS}.{name}" for name in STACKS]
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_path,
            "r": self._config.rank,
            "lora_alpha": self._config.alpha,
            "target_modules": [name for name in targets if name != EXPERTS] or None,
            "target_parameters": stacks if EXPERTS in targets else None,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        }


def _factors(adapter: Adapter) -> LowRank:
    """Return the experts, rows of B and columns of A that this rank's shard of the weight has."""
    weight, a, b, scale = adapter
    assert isinstance(weight, DTensor) and isinstance(b, DTensor)
    *experts, rows, columns = (
        slice(start, start + size) for start, size in zip(*shard_box(weight), strict=True)
    )
    alike = b.placements == weight.placements  # all by rows, or by expert
    return LowRank(
        a=local_shard(a) if alike and experts else _whole(a)[*experts, :, columns],
        b=local_shard(b) if alike else _whole(b)[*experts, rows],
        scale=scale,
    )


def _peft_path(name: str) -> str:
    """Return where PEFT has the adapters of a parameter: it wraps a module once for each."""
    path, _, last = name.rpartition(".")
    return path if last != STACKS[0] else f"{path}.base_layer"


def _whole(param: Tensor) -> Tensor:
    assert isinstance(param, DTensor)
    if param.device_mesh.size() == 1:
        return local_shard(param)
    return param.full_tensor().detach()
