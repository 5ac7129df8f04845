"""A trainer's adapters as others need them: factors for the sync, a PEFT directory, their base."""

import json
import math
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from memsaver.common.digest import Digest, Part
from memsaver.common.machine import replace_text
from memsaver.common.plain import all_gather_plain
from trainer_bridge.config import LoraConfig
from trainer_bridge.sync.lora_merge import LowRank
from trainer_bridge.sync.shards import local_shard, shard_box
from trainer_bridge.training import checkpoint
from trainer_bridge.training.lora import EXPERTS, STACKS, Adapter, adapted_params, base_params

_MASK64 = (1 << 64) - 1


class Adapters:
    """The adapters of one rank's model. Every rank calls every method: shards are gathered."""

    def __init__(self, model: nn.Module, config: LoraConfig) -> None:
        self._config = config
        self._adapted = adapted_params(model)
        self._base = base_params(model)
        self._digest: int | None = None
        # Of the parameters that are adapted.
        self.names = tuple(self._adapted)

    def factors(self) -> dict[str, LowRank]:
        """Returns factors by parameter, for this rank's shard; perhaps no copies: read at once."""
        return {name: _factors(adapter) for name, adapter in self._adapted.items()}

    def identity(self) -> dict[str, Any]:
        """Returns what a checkpoint must agree with, plain data. base: a digest in hexadecimal."""
        return {
            "rank": self._config.rank,
            "alpha": self._config.alpha,
            "target_modules": sorted(self._config.target_modules),
            "base": f"{self._base_digest():016x}",
        }

    def save(self, directory: str, base_path: str) -> None:
        """Writes adapter_config.json and adapter_model.safetensors, as PEFT reads them; whole or
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
            **self._peft_targets(),
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        }

    def _peft_targets(self) -> dict[str, list[str] | None]:
        targets = [name for name in self._config.target_modules if name != EXPERTS]
        if EXPERTS not in self._config.target_modules:
            return {"target_modules": targets}
        stacks = [f"{EXPERTS}.{name}" for name in STACKS]
        return {"target_modules": targets or None, "target_parameters": stacks}

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


def _factors(adapter: Adapter) -> LowRank:
    """Returns the experts, rows of B and columns of A that this rank's shard of the weight has."""
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
    """Returns where PEFT has the adapters of a parameter: it wraps a module once for each."""
    path, _, last = name.rpartition(".")
    return path if last != STACKS[0] else f"{path}.base_layer"


def _whole(param: Tensor) -> Tensor:
    assert isinstance(param, DTensor)
    if param.device_mesh.size() == 1:
        return local_shard(param)
    gathered: Tensor = param.full_tensor()
    return gathered.detach()


def _part(param: Tensor, first: int) -> Part:
    """Returns this rank's shard, numbered; `first` is the number of the parameter's first one."""
    start, _ = shard_box(param)
    local, first = local_shard(param), first + start[0] * math.prod(param.shape[1:])
    if param.ndim == 1:
        return local, first
    assert not any(start[1:-1])  # by rows, by experts or by columns
    return local.flatten(0, -2), first + start[-1], param.shape[-1]
