"""Parameters of adapters as an engine stores them, and adapters in PEFT's folders."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout.config import AdapterSlots
from rollout.model.decoder import ModelConfig, all_splits, parameter_groups
from rollout.model.model_folder import open_checkpoint, read_json
from rollout.weights.adapters import SCALE
from rollout.weights.params import Param, ParamGroup, Split, shard_groups

_ADAPTED = (
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
)  # fmt: skip
_PREFIX, _FILE = "base_model.model.", "adapter_model.safetensors"
_FACTORS = {".lora_A.weight": ".lora_a", ".lora_B.weight": ".lora_b"}
# What must have this value in a folder, or be left out: its adapter would be another function.
_PLAIN: Mapping[str, Any] = {
    "peft_type": "LORA", "use_dora": False, "bias": "none", "lora_bias": False,
    "fan_in_fan_out": False, "rank_pattern": {}, "alpha_pattern": {}, "modules_to_save": None,
    "target_parameters": None,
}  # fmt: skip


def adaptable(model: ModelConfig) -> list[str]:
    """Return the linear layers that adapters may have: last parts of names, in the model's order.

    A model with other mixers than plain attention has none.
    """
    if not model.is_plain:
        return []
    parts = chain.from_iterable(_layers(group)[0] for group in parameter_groups(model))
    return [*dict.fromkeys(part for part in parts if part in _ADAPTED)]


def adapter_groups(
    model: ModelConfig, slots: AdapterSlots, rank: int, size: int, experts: int = 1
) -> list[ParamGroup]:
    """Return the parameters of an adapter as one tensor-parallel rank stores them.

    A product has a stack of A and one of B, of all layers that it fuses; those of layers that no
    adapter has are zero. Ranks share the columns of A and the rows of B as they share columns and
    rows of the weight. Other arguments are those of `rank_groups`.
    """
    wanted, groups = {*(slots.target_modules or adaptable(model))}, []
    for group in parameter_groups(model):
        parts, layers = _layers(group)
        if not {*parts} & wanted:
            continue
        fused = (group.fused or group.params[0].name).removesuffix(".weight")
        a, b = [], []
        for part, layer, param in zip(parts, layers, group.params, strict=True):
            rows, columns = param.shape
            a.append(_factor(f"{layer}.lora_a", (slots.rank, columns), part in wanted))
            b.append(_factor(f"{layer}.lora_b", (rows, slots.rank), part in wanted))
        groups.append(ParamGroup(params=tuple(a), fused=f"{fused}.lora_a"))
        groups.append(ParamGroup(params=tuple(b), fused=f"{fused}.lora_b"))
    splits = dict[str, Sequence[Split]]()
    for name, rules in all_splits(model, size, experts).items():
        path = name.removesuffix(".weight")
        splits[f"{path}.lora_a"] = [rule for rule in rules if rule.dim == 1]
        splits[f"{path}.lora_b"] = [rule for rule in rules if rule.dim == 0]
    return shard_groups(groups, splits, rank, size)


def _factor(name: str, shape: tuple[int, int], adapted: bool) -> Param:
    """Return a factor; of a layer without adapters it is zeros, which no file or sync has."""
    param = Param.of(name, shape)
    return param if adapted else replace(param, whole=(0, shape[1]), pieces=())


def _layers(group: ParamGroup) -> tuple[list[str], list[str]]:
    """Return last parts and whole names of the layers of a group of matrices; else nothing."""
    names = [param.name for param in group.params if len(param.shape) == 2]
    layers = [name.removesuffix(".weight") for name in names if name.endswith(".weight")]
    return [layer.rpartition(".")[2] for layer in layers], layers


class AdapterFolder(NamedTuple):
    """An adapter in a folder of PEFT."""

    path: Path
    rank: int
    scale: float  # of B A

    @classmethod
    def open(cls, path: str | Path) -> "AdapterFolder":
        """Read the configuration of an adapter.

        Raises:
            ValueError: A file is missing or damaged, or the adapter is of another kind than LoRA of
                linear layers; names the key.
        """
        folder = Path(path)
        config = read_json(folder / "adapter_config.json")
        for key, plain in _PLAIN.items():
            if (value := config.get(key)) and value != plain:
                rule = f"is not supported; supported: {plain!r}"
                raise ValueError(f"{folder}/adapter_config.json: {key}={value!r} {rule}")
        rank, alpha = config.get("r"), config.get("lora_alpha")
        if not isinstance(rank, int) or not isinstance(alpha, int | float) or rank < 1:
            rule = "r and lora_alpha must be numbers, r at least 1"
            raise ValueError(f"{folder}/adapter_config.json: {rule}; got {rank!r} and {alpha!r}")
        return cls(folder, rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))

    def check(self, shapes: Mapping[str, tuple[int, ...]], most: int) -> None:
        """Check that the adapter fits a slot.

        Args:
            shapes: Shapes of all factors of a slot, by the engine's names.
            most: Rank of the slots.

        Raises:
            ValueError: The file is missing or damaged, the rank exceeds that of the slots, a layer
                has no place in the slots, or a shape is that of another base.
        """
        if self.rank > most:
            rule = f"has rank {self.rank}, and the engine's slots rank {most}"
            raise ValueError(f"{self.path} {rule}; raise EngineConfig.adapters.rank")
        file, names = self._open()
        if strays := sorted(names.keys() - shapes.keys()):
            rule = f"has {len(strays)} factors without a place in the engine's slots, such as"
            remedy = "name its layers in EngineConfig.adapters.target_modules"
            raise ValueError(f"{self.path} {rule} {strays[0]}; {remedy}")
        if not names:
            raise ValueError(f"{self.path}/{_FILE} has no factors; save the adapter again")
        for name, stored in names.items():
            rows, columns = shapes[name]
            down = name.endswith("lora_a")
            want = [self.rank, columns] if down else [rows, self.rank]
            if (shape := file.get_slice(stored).get_shape()) != want:
                rule = f"{stored} has shape {shape}, and this base needs {want}"
                raise ValueError(f"{self.path}: {rule}; it is an adapter of another base")

    def tensors(
        self, shapes: Mapping[str, tuple[int, ...]], most: int
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the factors of a slot that the adapter fits, by the engine's names.

        Rows of A and columns of B beyond the adapter's rank are zero, and so are the factors of
        layers that the adapter does not have. Arguments are those of `check`.
        """
        file, names = self._open()
        spare = most - self.rank
        for name, shape in shapes.items():
            if name in names:
                padding = (0, 0, 0, spare) if name.endswith("lora_a") else (0, spare)
                yield name, F.pad(file.get_tensor(names[name]), padding)
            else:
                yield name, torch.zeros(shape)
        yield SCALE, torch.tensor(self.scale)

    def _open(self) -> tuple[Any, dict[str, str]]:
        """Return the open file, and the names of its factors by the engine's names."""
        file = open_checkpoint(self.path / _FILE)
        return file, {_engine_name(name): name for name in file.keys()}  # noqa: SIM118


def _engine_name(name: str) -> str:
    """Return the engine's name of a factor in a folder of PEFT."""
    for suffix, own in _FACTORS.items():
        if name.endswith(suffix):
            return name.removeprefix(_PREFIX).removesuffix(suffix) + own
    return name
