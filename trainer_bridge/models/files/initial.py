"""Initial content of a model: weights from safetensors files, random weights, rebuilt buffers."""

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from memsaver.ops.hash import MASK64, hash_text
from memsaver.ops.rows import digest
from memsaver.system.plain import all_gather_plain
from rollout.model import Stored, open_tensors, spellings, stored_buffers
from trainer_bridge.config import TrainerConfig
from trainer_bridge.errors import Shape, listed, misfits
from trainer_bridge.models.adapters.lora import base_params, is_adapter
from trainer_bridge.sync.shards import Box, local_shard, shard_box, shard_ranks


class CheckpointFiles:
    """The parameters of a model directory, readable box by box.

    The tensors of the files may have other names and parts than the parameters (`spellings`). Files
    are mapped, and only the requested boxes are read.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._files: dict[str, Any] = open_tensors(path)
        self.ways: dict[str, list[Stored]] = {}  # of the checked parameters

    def check(self, shapes: Mapping[str, Shape], ignore: Collection[str] = ()) -> None:
        """Look up all parameters in the files by name and shape, before any box is read.

        A ValueError lists missing and unknown names, and shapes that differ. Names in `ignore` may
        be in the files, too.
        """
        self.ways = {name: self._way(name, shape) for name, shape in shapes.items()}
        parts = chain.from_iterable(self.ways.values())
        wanted = {stored.name: stored.shape for stored in parts}
        named = {name: file for name, file in self._files.items() if name not in ignore}
        stored_shapes = {name: tuple(f.get_slice(name).get_shape()) for name, f in named.items()}
        if problems := misfits(wanted, stored_shapes):
            raise ValueError(
                f"weights in {self.path!r} do not fit its config.json: {listed(problems)}"
            )

    def box(self, name: str, start: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Read a box of a checked parameter to the CPU, in the file's dtype."""
        wanted = Box(tuple(start), tuple(shape))
        parts = [(Box(stored.start, stored.box), stored) for stored in self.ways[name]]
        reads = [(part, box, common) for box, part in parts if (common := box.intersect(wanted))]
        first = self._read(*reads[0])
        if len(reads) == 1:
            return first
        whole = torch.empty(wanted.shape, dtype=first.dtype)
        for stored, box, common in reads:
            whole[common.within(wanted)] = self._read(stored, box, common)
        return whole

    def whole(self, name: str, shape: Sequence[int]) -> Tensor:
        """Read a whole checked parameter to the CPU, in the file's dtype."""
        return self.box(name, [0] * len(shape), shape)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which the files store a checked parameter."""
        first = self.ways[name][0]
        return self._read(
            first, Box(first.start, first.box), Box(first.start, (1,) * len(first.start))
        ).dtype

    def _way(self, name: str, shape: Shape) -> list[Stored]:
        ways = spellings(name, shape)
        return next((way for way in ways if way[0].name in self._files), ways[0])

    def _read(self, stored: Stored, box: Box, common: Box) -> Tensor:
        """Read the elements `common` of a stored tensor, whose box in its parameter is `box`."""
        lacking = len(box.shape) - len(stored.shape)
        read = self._files[stored.name].get_slice(stored.name)[common.within(box)[lacking:]]
        return read.view(common.shape)


def open_weights(model: nn.Module, path: str, created: Collection[str] = ()) -> CheckpointFiles:
    """Open the weights of a directory, and check that they fit the model.

    Parameters whose names are in `created` are not in the files. A ValueError lists what does not
    fit.
    """
    params = {name: param for name, param in base_params(model).items() if name not in created}
    names = {
        name for name, _ in model.named_parameters(remove_duplicate=False) if not is_adapter(name)
    }
    tensors = {**params, **stored_buffers(model)}
    files = CheckpointFiles(path)
    ignored = names - params.keys()  # includes second names of tied parameters
    files.check({name: tuple(tensor.shape) for name, tensor in tensors.items()}, ignore=ignored)
    return files


def weights_digest(model: nn.Module, masters: Mapping[nn.Parameter, Tensor]) -> str:
    """Compute a hexadecimal digest of the model's parameters, without adapters.

    A collective call. The digest covers the values rounded to bf16, so it does not depend on the
    sharding, or on whether the shards are in bf16 or fp32. Each shard is read once, in place.
    `masters` has shards on the host that are read in place of their parameters, because fp16
    parameters would be rounded twice.
    """
    total, first, ranks = 0, 0, 1
    for param in base_params(model).values():
        shard, ranks = local_shard(param), shard_ranks(param)
        read, box = masters.get(param, shard), shard_box(param)
        total += part_digest(read, box.start, param.shape, first, shard.device)
        first += param.numel()
    return _digest_text(sum(all_gather_plain(total)) if ranks > 1 else total)


def files_digest(model: nn.Module, files: CheckpointFiles) -> str:
    """Compute the `weights_digest` that the model would have with the weights of the files."""
    total, first = 0, 0
    for name, param in base_params(model).items():
        whole = files.whole(name, param.shape).to(param.dtype)
        total += part_digest(whole, (0,) * param.ndim, param.shape, first, whole.device)
        first += param.numel()
    return _digest_text(total)


def part_digest(
    part: Tensor, start: Sequence[int], shape: Sequence[int], first: int, device: torch.device
) -> int:
    """Digest on `device` a part of a parameter whose elements are numbered from `first` on."""
    if not part.numel():
        return 0
    if part.shape[1:-1] != tuple(shape[1:-1]):  # the rows of each expert are divided
        pitch = math.prod(shape[1:])
        return sum(
            part_digest(matrix, start[1:], shape[1:], first + number * pitch, device)
            for number, matrix in enumerate(part, start=start[0])
        )
    total, width = 0, shape[-1]
    at = first + start[0] * math.prod(shape[1:])
    at += start[-1] if len(shape) > 1 else 0
    grid = part.flatten(0, -2) if part.ndim > 1 else part[None]
    for rows in grid.split(max(1, DIGEST_ELEMENTS // width)):
        total += digest(rows.to(device).bfloat16(), at, index_pitch=width)
        at += len(rows) * width
    return total


def _digest_text(total: int) -> str:
    return f"{total & MASK64:016x}"


# Elements to cast and digest together, which bounds the temporary.
DIGEST_ELEMENTS = 1 << 25


def rebuild_buffers(model: nn.Module, device: torch.device) -> None:
    """Materialize the buffers of a meta model on a device.

    Buffers that checkpoints contain are fp32 zeros until a checkpoint is read. Others are computed
    on the CPU, for the same bits on every device, by constructing their modules again. A ValueError
    names a module with such buffers that cannot be constructed from its config.
    """
    for name, buffer in stored_buffers(model).items():
        zeros = torch.zeros(buffer.shape, dtype=torch.float32, device=device)
        setattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], zeros)
    for path, module in model.named_modules():
        names = [name for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        if not names:
            continue
        if not hasattr(module, "config") or any(True for _ in module.parameters()):
            text = f"has buffers {names} that this trainer cannot rebuild"
            raise ValueError(f"{path} ({type(module).__name__}) {text}")
        fresh = dict(type(module)(module.config).named_buffers())
        for name in names:
            setattr(module, name, fresh[name].to(device))


def randomise_weights(
    model: nn.Module, config: TrainerConfig, into: Mapping[nn.Parameter, Tensor]
) -> None:
    """Initialize the shards as transformers initializes decoders.

    Matrices are normal, with the deviation `initializer_range` of the model's configuration if it
    has one. Norms are one; biases and the embedding of the padding token are zero. Every rank draws
    each parameter whole, on its device, in the dtype of `config`, and then casts it. On one kind of
    device the bits depend only on the seed, on the parameter's name and shape, and on the dtype of
    the draw.

    `into` has tensors to fill in place of shards, by parameter, on any device.
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
        stream = hash_text(f"{config.seed}/{name}/0")  # draw 0, the only one of the parameter
        generator = torch.Generator(device).manual_seed(stream >> 1)
        whole.normal_(0.0, deviation, generator=generator)
        if (row := padding.get(param)) is not None:
            whole[row] = 0.0
        if not direct:
            shard.copy_(part_of_rank(whole, param))


def part_of_rank(whole: Tensor, param: Tensor) -> Tensor:
    """Return the view of `whole`, a tensor shaped like `param`, that this rank's shard covers."""
    return whole[shard_box(param).slices]
