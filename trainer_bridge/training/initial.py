"""Makes what a model begins with: boxes of safetensors files, random weights, rebuilt buffers."""

import math
import os
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from memsaver.ops.hash import MASK64, hash_text
from memsaver.ops.rows import digest
from memsaver.system.plain import all_gather_plain
from rollout.model import (
    Stored,
    checkpoint_files,
    is_unused,
    open_checkpoint,
    spellings,
    stored_buffers,
)
from trainer_bridge.config import TrainerConfig
from trainer_bridge.errors import Shape, listed, misfits
from trainer_bridge.sync.shards import Box, local_shard, shard_box
from trainer_bridge.training.lora import base_params


def check_directory(path: str) -> None:
    """Raise a ValueError unless `path` holds a config.json."""
    if not os.path.isfile(os.path.join(path, "config.json")):
        rule = "is no Hugging Face model directory: no config.json"
        raise ValueError(f"model_path={path!r} {rule}; check the path")


class CheckpointFiles:
    """Boxes of the parameters in `path`, however its tensors are named and cut (`spellings`).

    Files are mapped, not read, until a box is asked for.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._files: dict[str, Any] = {}
        self._ways: dict[str, list[Stored]] = {}
        for file_path in checkpoint_files(path):
            file = open_checkpoint(file_path)
            self._files |= {key: file for key in file.keys() if not is_unused(key)}  # noqa: SIM118

    def check(self, shapes: Mapping[str, Shape], ignore: Collection[str] = ()) -> None:
        """Find these parameters; a ValueError lists names missing, unknown, or of other shapes."""
        self._ways = {name: self._way(name, shape) for name, shape in shapes.items()}
        parts = chain.from_iterable(self._ways.values())
        wanted = {stored.name: stored.shape for stored in parts}
        named = {name: file for name, file in self._files.items() if name not in ignore}
        found = {name: tuple(file.get_slice(name).get_shape()) for name, file in named.items()}
        if problems := misfits(wanted, found):
            raise ValueError(
                f"weights in {self.path!r} do not fit its config.json: {listed(problems)}"
            )

    def box(self, name: str, start: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return a checked parameter's elements from `start`, on the CPU, in the file's dtype."""
        asked = Box(tuple(start), tuple(shape))
        parts = [(Box(stored.start, stored.box), stored) for stored in self._ways[name]]
        mine = [(stored, box, common) for box, stored in parts if (common := box.intersect(asked))]
        first = self._read(*mine[0])
        if len(mine) == 1:
            return first
        whole = torch.empty(asked.shape, dtype=first.dtype)
        for stored, box, common in mine:
            whole[common.within(asked)] = self._read(stored, box, common)
        return whole

    def _way(self, name: str, shape: Shape) -> list[Stored]:
        ways = spellings(name, shape)
        return next((way for way in ways if way[0].name in self._files), ways[0])

    def _read(self, stored: Stored, box: Box, common: Box) -> Tensor:
        """Return what a tensor, whose box in its parameter is `box`, has of `common`."""
        lacking = len(box.shape) - len(stored.shape)
        read = self._files[stored.name].get_slice(stored.name)[common.within(box)[lacking:]]
        return read.view(common.shape)


def weights_digest(model: nn.Module) -> str:
    """Return a digest of the model's own parameters, without adapters, in hexadecimal.

    Every rank calls it; it is the same however they are sharded and in which dtype they are held,
    as it is of the values in bf16. Each shard is read once where it lies.
    """
    total, first = 0, 0
    for param in base_params(model).values():
        local, width = local_shard(param), param.shape[-1]
        if local.numel():
            start, _ = shard_box(param)
            assert not any(start[1:-1])  # by rows, by experts or by columns
            at = first + start[0] * math.prod(param.shape[1:])
            at += start[-1] if param.ndim > 1 else 0
            grid = local.flatten(0, -2) if param.ndim > 1 else local[None]
            for rows in grid.split(max(1, DIGEST_ELEMENTS // width)):
                total += digest(rows.bfloat16(), at, index_pitch=width)
                at += len(rows) * width
        first += param.numel()
    return f"{sum(all_gather_plain(total)) & MASK64:016x}"


# What is cast to be digested at once, so that no large temporary is made.
DIGEST_ELEMENTS = 1 << 25


def rebuild_buffers(model: nn.Module, device: torch.device) -> None:
    """Compute the buffers of the meta model anew on the CPU (the same bits for every device) by
    modules made again. Those that checkpoints hold are fp32 zeros, until a checkpoint is read.
    """
    for name, buffer in stored_buffers(model).items():
        zeros = torch.zeros(buffer.shape, dtype=torch.float32, device=device)
        setattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], zeros)
    for path, module in model.named_modules():
        names = [name for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        if not names:
            continue
        if not hasattr(module, "config") or any(True for _ in module.parameters()):
            text = f"has buffers {names} that this trainer cannot make anew"
            raise ValueError(f"{path} ({type(module).__name__}) {text}")
        fresh = dict(type(module)(module.config).named_buffers())
        for name in names:
            setattr(module, name, fresh[name].to(device))


def randomise_weights(
    model: nn.Module, config: TrainerConfig, into: Mapping[nn.Parameter, Tensor]
) -> None:
    """Fill the shards with what transformers initializes decoders with.

    Matrices are normal, norms one, biases zero, the embedding of the padding token too. Every rank
    draws each parameter whole, on its device: the bits are a function of the seed, the parameter's
    name and shape and the dtype drawn in, on one kind of device.

    Args:
        model: Sharded; its configuration may have an `initializer_range`.
        config: Has the seed of all parameters, and the dtype of the draw, which is then cast.
        into: Tensors, on any device, that get the values in place of the parameters' shards.
    """
    deviation = getattr(model.config, "initializer_range", None) or 0.02
    embeddings = (module for module in model.modules() if isinstance(module, nn.Embedding))
    padding = {module.weight: module.padding_idx for module in embeddings}
    for name, param in base_params(model).items():
        shard = into.get(param, local_shard(param))
        if param.ndim == 1:
            shard.fill_(0.0 if name.endswith(".bias") else 1.0)
            continue
        device, dtype = local_shard(param).device, config.torch_dtype
        direct = shard.shape == param.shape and (shard.device, shard.dtype) == (device, dtype)
        whole = shard if direct else torch.empty(param.shape, dtype=dtype, device=device)
        stream = hash_text(f"{config.seed}/{name}/0")  # 0: there is one draw a parameter
        generator = torch.Generator(device).manual_seed(stream >> 1)
        whole.normal_(0.0, deviation, generator=generator)
        if (row := padding.get(param)) is not None:
            whole[row] = 0.0
        if not direct:
            shard.copy_(part_of_rank(whole, param))


def part_of_rank(whole: Tensor, param: Tensor) -> Tensor:
    """Return what this rank's shard of `param` has of a tensor of its shape, as a view."""
    start, shape = shard_box(param)
    return whole[*(slice(first, first + size) for first, size in zip(start, shape, strict=True))]
