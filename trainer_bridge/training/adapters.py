"""A trainer's adapters as others need them: factors for the sync, a PEFT directory, and which base
they are for.
"""

import json
import math
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from memsaver.common.digest import Digest, Part
from memsaver.common.files import replace_text
from memsaver.common.plain import all_gather_plain
from trainer_bridge.config import LoraConfig
from trainer_bridge.sync.lora_merge import LowRank
from trainer_bridge.sync.shards import local_shard
from trainer_bridge.training import checkpoint
from trainer_bridge.training.lora import LoraLinear, adapted_layers, base_params
from trainer_bridge.training.shards import shard_box

_MASK64 = (1 << 64) - 1


class Adapters:
    """The adapters of one rank's model. Every rank calls every method: shards are gathered."""

    def __init__(self, model: nn.Module, config: LoraConfig) -> None:
        self._config = config
        self._layers = adapted_layers(model)
        self._base = base_params(model)
        self._digest: int | None = None
        # Of the parameters that are adapted.
        self.names = tuple(f"{path}.weight" for path in self._layers)

    def factors(self) -> dict[str, LowRank]:
        """Returns the factors by parameter, for this rank's shard of it.

        They are no copies where ranks need not gather; read them at once.
        """
        return {f"{path}.weight": _factors(layer) for path, layer in self._layers.items()}

    def identity(self) -> dict[str, Any]:
        """Returns what a checkpoint's adapters must agree with, plain data.

        base: of all frozen parameters, in hexadecimal.
        """
        return {
            "rank": self._config.rank,
            "alpha": self._config.alpha,
            "target_modules": sorted(self._config.target_modules),
            "base": f"{self._base_digest():016x}",
        }

    def save(self, directory: str, base_path: str) -> None:
        """Writes adapter_config.json and adapter_model.safetensors, as PEFT reads them; whole or
        not at all.

        base_path: what the config names as the base model. Tensors are in the adapters' dtype.
        """
        from safetensors.torch import save_file

        tensors: dict[str, Tensor] = {}
        for path, layer in self._layers.items():
            for name, param in (("lora_A", layer.lora_a), ("lora_B", layer.lora_b)):
                tensors[f"base_model.model.{path}.{name}.weight"] = _whole(param).cpu().contiguous()
        with checkpoint.whole_directory(directory) as partial:
            if dist.get_rank() == 0:
                save_file(
                    tensors, os.path.join(partial, "adapter_model.safetensors"), {"format": "pt"}
                )
                replace_text(
                    Path(partial, "adapter_config.json"),
                    json.dumps(self._peft_config(base_path), indent=2),
                )

    def _peft_config(self, base_path: str) -> dict[str, Any]:
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_path,
            "r": self._config.rank,
            "lora_alpha": self._config.alpha,
            "target_modules": list(self._config.target_modules),
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        }

    def _base_digest(self) -> int:
        """Digests the frozen bits, however they are sharded, once: they never change."""
        if self._digest is None:
            parts, first = [], 0
            for param in self._base.values():
                if local_shard(param).numel():
                    parts.append(_part(param, first))
                first += param.numel()
            self._digest = sum(all_gather_plain(Digest(parts).run())) & _MASK64
        return self._digest


def _factors(layer: LoraLinear) -> LowRank:
    """Returns the rows of B and columns of A that this rank's shard of the weight has."""
    (row, column), (rows, columns) = shard_box(layer.weight)
    assert isinstance(layer.weight, DTensor) and isinstance(layer.lora_b, DTensor)
    if layer.lora_b.placements == layer.weight.placements:  # both by rows
        b = local_shard(layer.lora_b)
    else:
        b = _whole(layer.lora_b)[row : row + rows]
    return LowRank(a=_whole(layer.lora_a)[:, column : column + columns], b=b, scale=layer.scale)


def _whole(param: Tensor) -> Tensor:
    assert isinstance(param, DTensor)
    if param.device_mesh.size() == 1:
        return local_shard(param)
    gathered: Tensor = param.full_tensor()
    return gathered.detach()


def _part(param: Tensor, first: int) -> Part:
    """Returns this rank's shard with the numbers of its elements; `first` is that of the
    parameter's first one.
    """
    start, shape = shard_box(param)
    width = math.prod(param.shape[1:])
    if len(shape) == 2:
        return local_shard(param), first + start[0] * width + start[1], width
    assert not any(start[1:])
    return local_shard(param), first + start[0] * width
