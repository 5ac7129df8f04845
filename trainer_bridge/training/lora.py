"""Low-rank adapters in a model: its linear layers add scale * B A x to what they are; their own
weights are frozen.

Layers of our own, not PEFT's: a weight keeps its name and its place, by which it is loaded, sharded
and synced, and the adapters are made on the meta device as every other parameter is.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer_bridge.config import LoraConfig

NAMES = ("lora_a", "lora_b")


class LoraLinear(nn.Linear):
    """y = W x + bias + scale * B (A x), or W x + bias alone while `adapted` is False.

    lora_a: A, [rank, in]; lora_b: B, [out, rank]. Weight and bias are those of the layer whose
    place it takes.
    """

    def __init__(self, layer: nn.Linear, config: LoraConfig, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        device = layer.weight.device
        self.lora_a = nn.Parameter(
            torch.empty(config.rank, layer.in_features, dtype=dtype, device=device)
        )
        self.lora_b = nn.Parameter(
            torch.empty(layer.out_features, config.rank, dtype=dtype, device=device)
        )
        self.scale = config.scale
        self.adapted = True

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        if not self.adapted:
            return y
        return torch.add(y, F.linear(F.linear(x, self.lora_a), self.lora_b), alpha=self.scale)


def add_adapters(model: nn.Module, config: LoraConfig, dtype: torch.dtype) -> None:
    """Freeze the model, and put adapters, undefined, into the linear layers that `config` names.

    A ValueError says which names are of no linear layer, or of one whose weight another layer has,
    too.
    """
    if unknown := sorted(set(config.target_modules) - linear_names(model)):
        known = ", ".join(sorted(linear_names(model)))
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


def linear_names(model: nn.Module) -> set[str]:
    """Returns the last parts of its linear layers' names: what `target_modules` may name."""
    return {_last(path) for path in _linear_layers(model)}


def adapted_layers(model: nn.Module) -> dict[str, LoraLinear]:
    """Returns the adapted layers by path; empty without adapters."""
    return {
        path: module for path, module in model.named_modules() if isinstance(module, LoraLinear)
    }


def is_adapter(name: str) -> bool:
    """Tells whether a parameter of this name is an adapter."""
    return _last(name) in NAMES


def base_params(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters by checkpoint name, tied ones once; without adapters."""
    return {name: param for name, param in model.named_parameters() if not is_adapter(name)}


@contextlib.contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Inside, the model is the frozen one."""
    layers = adapted_layers(model).values()
    for layer in layers:
        layer.adapted = False
    try:
        yield
    finally:
        for layer in layers:
            layer.adapted = True


def _linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    return {path: module for path, module in model.named_modules() if type(module) is nn.Linear}


def _last(path: str) -> str:
    return path.rpartition(".")[2]
