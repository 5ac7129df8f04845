"""Parameters of a PEFT model by checkpoint name, and the factors of its LoRA adapters."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from typing import Any

from torch import Tensor, nn

from rollout.model import stored_buffers
from trainer_bridge.models.adapters.lora import Adapter, shard_factors
from trainer_bridge.sync.module_tensors import WRAPPED
from trainer_bridge.sync.writer import LowRank

_REMEDY = "use TRL's own sync"


class PeftAdapters:
    """The LoRA adapters of a `peft.PeftModel`, one of which is active.

    Supported are adapters of linear layers, with any rank, scale and `use_rslora`, and beside them
    biases (`bias`) and modules that are trained in full (`modules_to_save`).

    Attributes:
        names: Checkpoint names of the adapted weights.
    """

    def __init__(self, model: Any) -> None:
        """Find the adapted layers; a ValueError names the first that a sync cannot merge."""
        self._model, active = model, _active(model)
        uses = Counter(id(param) for _, param in model.named_parameters(remove_duplicate=False))
        self._layers = dict(_adapted_layers(model, active))
        for name, layer in self._layers.items():
            if uses[id(layer.get_base_layer().weight)] > 1:
                raise ValueError(
                    f"{name} is adapted and shares its weight with another module, which is not; "
                    "leave it out of target_modules"
                )
        self.names = frozenset(self._layers)

    def tensors(self) -> dict[str, Tensor]:
        """Return the model's parameters and stored buffers by checkpoint name; tied ones once.

        Adapters are left out. Copies of `modules_to_save` replace the original modules.
        """
        adapter, tensors, seen = _active(self._model), dict[str, Tensor](), set[int]()
        named = self._model.named_parameters(remove_duplicate=False)
        for path, tensor in chain(named, stored_buffers(self._model).items()):
            name = _stored_name(path, adapter)
            if name is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                tensors[name] = tensor
        return tensors

    def trained(self, tensors: Mapping[str, Tensor]) -> Collection[str]:
        """Return the names among `tensors` whose served values change with an update."""
        return self.names | {name for name, tensor in tensors.items() if tensor.requires_grad}

    def factors(self) -> dict[str, LowRank]:
        """Return the factors of this rank's shards by adapted weight; a collective call.

        The factors are valid until the next update.
        """
        active = _active(self._model)
        return {
            name: shard_factors(_adapter(name, layer, active))
            for name, layer in self._layers.items()
        }


def _stored_name(path: str, adapter: str) -> str | None:
    """Return the checkpoint name of a tensor; None if the checkpoint has no such tensor."""
    parts = path.replace(WRAPPED, "").removeprefix("base_model.model.").split(".")
    if "original_module" in parts or any(part.startswith("lora_") for part in parts):
        return None
    if "modules_to_save" in parts:
        at = parts.index("modules_to_save")
        if parts[at + 1] != adapter:
            return None
        del parts[at : at + 2]
    return ".".join(part for part in parts if part != "base_layer")


def _active(model: Any) -> str:
    """Return the name of the active adapter, which must be one of LoRA."""
    import peft

    if not isinstance(model, peft.PeftModel):
        raise ValueError(f"the adapters are in a {type(model).__name__}; use peft.get_peft_model")
    active = model.active_adapters
    if len(active) != 1:
        raise ValueError(
            f"active adapters are {', '.join(active) or 'none'}; activate one by set_adapter, or "
            f"{_REMEDY}"
        )
    config: Any = model.peft_config[active[0]]
    if (kind := config.peft_type.value) != "LORA":
        raise ValueError(f"adapter {active[0]} is {kind}, in-place sync merges LORA; {_REMEDY}")
    return active[0]


def _adapted_layers(model: nn.Module, active: str) -> Iterator[tuple[str, Any]]:
    """Yield the adapted weight's checkpoint name and the layer, for all layers with `active`."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

    for path, module in model.named_modules():
        wrapped = isinstance(module, AuxiliaryTrainingWrapper)
        if wrapped and not isinstance(module, ModulesToSaveWrapper):
            raise ValueError(f"{path}: in-place sync cannot merge trained tokens; {_REMEDY}")
        if not isinstance(module, BaseTunerLayer):
            continue
        name = _stored_name(f"{path}.weight", active)
        assert name is not None
        if (reason := _obstacle(module, active)) is not None:
            raise ValueError(f"{name}: in-place sync cannot merge {reason}; {_REMEDY}")
        if active in getattr(module, "lora_A", {}):
            yield name, module


def _obstacle(layer: Any, active: str) -> str | None:
    """Return what keeps a layer's adapter from being merged as W + scale B A."""
    from peft.tuners.lora import Linear

    if not isinstance(layer, Linear) or type(layer).merge is not Linear.merge:
        return f"{type(layer).__name__} adapters"  # embeddings, experts, quantized layers
    if layer.fan_in_fan_out:
        return "transposed layers (fan_in_fan_out)"
    if active in layer.lora_variant:
        return f"{type(layer.lora_variant[active]).__name__} adapters"  # DoRA and others
    if layer.lora_bias.get(active):
        return "adapters with a bias (lora_bias)"
    return None


def _adapter(name: str, layer: Any, active: str) -> Adapter:
    if layer.disable_adapters:
        raise ValueError(f"the adapter of {name} is off; call enable_adapter_layers() first")
    if layer.merged:
        merged = ", ".join(layer.merged_adapters)
        raise ValueError(f"{name} contains adapter {merged}; call unmerge_adapter() on it first")
    return Adapter(
        weight=layer.get_base_layer().weight,
        a=layer.lora_A[active].weight,
        b=layer.lora_B[active].weight,
        scale=layer.scaling[active],
    )
