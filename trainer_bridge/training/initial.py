"""Makes what a model begins with where no checkpoint says it: random weights, rebuilt buffers."""

import math
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from memsaver.common.hash import hash_text
from trainer_bridge.sync.boxes import Box
from trainer_bridge.sync.shards import local_shard
from trainer_bridge.training.lora import base_params
from trainer_bridge.training.shards import shard_box

# Random numbers of one generator; a rank that needs some of them draws all.
BLOCK_ELEMENTS = 1 << 22


def rebuild_buffers(model: nn.Module, device: torch.device) -> None:
    """Computes the buffers of the meta model anew on the CPU (the same bits for every device) by
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


def stored_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Returns the buffers that checkpoints hold, by name: DeepSeek-V3's routers add one to scores.
    They are constants here.
    """
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                found[f"{path}.{name}"] = buffer
    return found


def randomise_weights(
    model: nn.Module,
    seed: int,
    drawn_as: torch.dtype | None = None,
    into: Mapping[nn.Parameter, Tensor] | None = None,
) -> None:
    """Fills in what transformers initialises decoders with, on the device, and in place but for a
    block at a time that several ranks share or that is drawn in another dtype.

    Matrices are normal, norms one, biases zero, the embedding of the padding token too. The bits
    are a function of the seed, the parameter's name and the dtype drawn in, on one kind of device:
    a model that is to be a narrower copy of another is drawn as that one. into: tensors, on any
    device, that get the values in place of the parameters' shards.
    """
    into = into or {}
    deviation = getattr(model.config, "initializer_range", None) or 0.02
    for name, param in base_params(model).items():
        shard = into.get(param, local_shard(param))
        if param.ndim > 1:
            _draw(param, shard, deviation, f"{seed}/{name}", drawn_as)
        else:
            shard.fill_(0.0 if name.endswith(".bias") else 1.0)
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            weight = cast(nn.Parameter, module.weight)
            shard = into.get(weight, local_shard(weight))
            row = module.padding_idx - shard_box(module.weight)[0][0]
            if 0 <= row < shard.shape[0]:
                shard[row] = 0.0


def _draw(
    param: Tensor, shard: Tensor, deviation: float, seed: str, drawn_as: torch.dtype | None
) -> None:
    """Draws block by block of rows, each from a generator of its own on the parameter's device, so
    that it does not matter how many ranks draw.
    """
    box, rest, device = shard_box(param), tuple(param.shape[1:]), local_shard(param).device
    rows = max(1, BLOCK_ELEMENTS // math.prod(rest))
    for first in range(box.start[0] // rows * rows, box.start[0] + box.shape[0], rows):
        block = Box((first, *(0 for _ in rest)), (min(rows, param.shape[0] - first), *rest))
        mine = box.intersect(block)
        if mine is None:
            continue
        generator = torch.Generator(device).manual_seed(hash_text(f"{seed}/{first // rows}") >> 1)
        target = shard[mine.within(box)]
        if mine == block and drawn_as in (None, shard.dtype) and shard.device == device:
            target.normal_(0.0, deviation, generator=generator)
        else:
            drawn = torch.empty(block.shape, dtype=drawn_as or shard.dtype, device=device)
            target.copy_(drawn.normal_(0.0, deviation, generator=generator)[mine.within(block)])
