"""AdamW with both moments in 8 bits: the kernels of bitsandbytes on the memory of a tag.

Codes and scales follow Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2022,
arXiv:2110.02861). A block is `BLOCK` consecutive elements of a rank's flattened shard. An element
of a moment is its block's scale times the entry of a table that its code selects.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import max_pool1d

from memsaver import MemorySaver
from trainer_bridge.config import TrainerConfig
from trainer_bridge.sync.shards import Box, Ints, chunk, like_shard, local_shard, shard_box
from trainer_bridge.training.device import Runtime, side_by_side

BLOCK = 256  # elements; fixed in the kernels
CHUNK = 1 << 24  # elements in a call, whole blocks; a call on the CPU takes 20 bytes for each
_LEAST = 4096  # elements of the smallest matrix that is quantized, as in bitsandbytes
FIRST, SECOND = _MOMENTS = "exp_avg", "exp_avg_sq"
_CODES, _SCALES = "_codes", "_scales"
Spec = tuple[Ints, torch.dtype]


@functools.cache
def code_tables() -> dict[str, tuple[float, ...]]:
    """Import bitsandbytes, and return the 256 values that codes stand for, by moment.

    Under a dispatch mode without content, call it before the mode begins.
    """
    # On some CPUs, the import warns that a kernel for 4-bit inference is missing.
    logging.getLogger("bitsandbytes.backends.cpu").setLevel(logging.ERROR)
    from bitsandbytes.functional import create_dynamic_map

    return {name: tuple(create_dynamic_map(signed=name == FIRST).tolist()) for name in _MOMENTS}


def moment_specs(shape: Ints, local: Ints, parts: Ints) -> dict[str, Spec]:
    """Return the shapes and dtypes of one rank's part of both moments, by name.

    Moments of vectors and of small matrices are stored in fp32.

    Args:
        shape: Shape of the whole parameter.
        local: Shape of the rank's shard.
        parts: Number of shards along each dimension.

    Returns:
        For a quantized parameter: codes in the shard's shape, and scales of as many blocks as the
        largest shard has, in a shape with a leading 1 for each of the parameter's dimensions.
    """
    if len(shape) < 2 or math.prod(shape) < _LEAST:
        return dict.fromkeys(_MOMENTS, (local, torch.float32))
    largest = math.prod(-(-size // count) for size, count in zip(shape, parts, strict=True))
    scales = (*[1] * len(shape), -(-largest // BLOCK))
    specs: dict[str, Spec] = {}
    for name in _MOMENTS:
        specs[f"{name}{_CODES}"] = local, torch.uint8
        specs[f"{name}{_SCALES}"] = scales, torch.float32
    return specs


class AdamW8bit(torch.optim.Optimizer):
    """AdamW whose moments take a byte each per element, and 4 bytes per block.

    `state[param]` has the count of steps and the tensors of `moment_specs`, as shards. The whole of
    all scales has the shards' grid as its leading dimensions, so its shape tells how a checkpoint
    was sharded. Parameters and gradients have one dtype, fp32 or bf16. On a GPU a step takes no
    further memory.

    Attributes:
        whole: Whether all parameters and moments belong to the same step. It stays False if a step
            is interrupted.
    """

    def __init__(
        self,
        params: Iterable[Any],
        config: TrainerConfig,
        runtime: Runtime,
        saver: MemorySaver,
        tag: str,
    ) -> None:
        """Allocate zero moments on a tag for parameters or groups of parameters, DTensors.

        Raises:
            ValueError: bitsandbytes has no kernels for this version of CUDA.
        """
        self._tables = {
            name: torch.tensor(values, dtype=torch.float32, device=runtime.device)
            for name, values in code_tables().items()
        }
        _check_kernels(runtime.device)
        defaults = {"lr": config.learning_rate, "betas": config.betas}
        super().__init__(
            params, defaults | {"eps": config.adam_eps, "weight_decay": config.weight_decay}
        )
        self.whole = True
        self._step = torch.zeros((), dtype=torch.float32)
        params = list(itertools.chain.from_iterable(g["params"] for g in self.param_groups))
        named = [
            moment_specs(tuple(param.shape), tuple(local_shard(param).shape), _parts(param))
            for param in params
        ]
        flat = itertools.chain.from_iterable(specs.values() for specs in named)
        tensors = iter(side_by_side(list(flat), saver, tag))
        for param, specs in zip(params, named, strict=True):
            shards = {name: _sharded(name, next(tensors).zero_(), param) for name in specs}
            self.state[param] = {"step": self._step, **shards}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Run one update; parameters without a gradient do not change."""
        self.whole = False
        self._step += 1
        with _on_default_stream(self._tables[FIRST].device):
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        self._update(param, group)
        self.whole = True

    def _update(self, param: nn.Parameter, group: Mapping[str, Any]) -> None:
        from bitsandbytes import functional as kernels

        assert param.grad is not None
        weights, grads = local_shard(param).view(-1), local_shard(param.grad).view(-1)
        state = self.state[param].items()
        held = {name: local_shard(tensor).view(-1) for name, tensor in state if name != "step"}
        how: dict[str, Any] = {name: group[name] for name in ("lr", "eps", "weight_decay")}
        how |= {"step": int(self._step), "beta1": group["betas"][0], "beta2": group["betas"][1]}
        if FIRST in held:
            how |= {"state1": held[FIRST], "state2": held[SECOND]}
            if weights.numel():
                kernels.optimizer_update_32bit("adam", grads, weights, **how)
            return
        for start in range(0, weights.numel(), CHUNK):
            part = slice(start, start + CHUNK)
            blocks = slice(start // BLOCK, (start + CHUNK) // BLOCK)
            moments: dict[str, Any] = {"beta3": 0.0, "alpha": 0.0}  # of another optimizer
            for number, name in enumerate((FIRST, SECOND), 1):
                moments[f"state{number}"] = held[f"{name}{_CODES}"][part]
                moments[f"absmax{number}"] = held[f"{name}{_SCALES}"][blocks]
                moments[f"qmap{number}"] = self._tables[name]
            kernels.optimizer_update_8bit_blockwise(
                "adam", grads[part], weights[part], **moments, **how
            )


def is_scales(name: str) -> bool:
    """Return whether a checkpoint's tensor has scales, whose shape depends on the sharding."""
    return any(f".{moment}{_SCALES}." in name for moment in _MOMENTS)


def requantize(tensors: Mapping[str, Tensor], name: str, stored: Tensor) -> None:
    """Adapt loaded codes of a moment to this rank's blocks, and set the blocks' scales.

    A block whose elements had one scale keeps its bits. Other blocks are quantized again.

    Args:
        tensors: This rank's shards by name; codes have been loaded and scales have not.
        name: Name of the scales.
        stored: All scales of the checkpoint, which belong to other shards.
    """
    from bitsandbytes import functional as kernels

    moment = next(moment for moment in _MOMENTS if f".{moment}{_SCALES}." in name)
    table = torch.tensor(code_tables()[moment], dtype=torch.float32)
    codes = tensors[name.replace(f".{moment}{_SCALES}.", f".{moment}{_CODES}.", 1)]
    own, scales = local_shard(codes).view(-1), local_shard(tensors[name]).view(-1)
    old_scales = _scale_of_each(stored, tuple(codes.shape), shard_box(codes))
    for start in range(0, own.numel(), CHUNK):
        scale = old_scales[start : start + CHUNK]
        before = own[start : start + CHUNK].cpu()
        values = table[before.int()] * scale
        after, quantized = kernels.quantize_blockwise(values, code=table, blocksize=BLOCK)
        high, low = _maxima(scale), -_maxima(-scale)
        keep = high == low
        kept = keep.repeat_interleave(BLOCK)[: len(before)]
        own[start : start + CHUNK] = torch.where(kept, before, after).to(own.device)
        first = start // BLOCK
        scales[first : first + len(keep)] = torch.where(keep, high, quantized.absmax).to(own.device)


def _scale_of_each(stored: Tensor, shape: Ints, mine: Box) -> Tensor:
    """Return the stored scale of every element of a box of a parameter, flattened."""
    parts = stored.shape[:-1]
    out = torch.empty(mine.shape)
    for place in itertools.product(*map(range, parts)):
        sides = [chunk(*side) for side in zip(shape, parts, place, strict=True)]
        box = Box(tuple(first for first, _ in sides), tuple(size for _, size in sides))
        if both := box.intersect(mine):
            spread = stored[place].repeat_interleave(BLOCK)[: box.volume].view(box.shape)
            out[both.within(mine)] = spread[both.within(box)]
    return out.view(-1)


def _maxima(values: Tensor) -> Tensor:
    """Return the maximum of every block; the last block may be shorter."""
    return max_pool1d(values.view(1, 1, -1), BLOCK, ceil_mode=True).view(-1)


def _parts(param: Tensor) -> Ints:
    """Return the number of shards along each dimension of a parameter."""
    assert isinstance(param, DTensor)
    parts = [1] * param.ndim
    for place, ranks in zip(param.placements, param.device_mesh.shape, strict=True):
        if isinstance(place, Shard):
            parts[place.dim] *= ranks
    return tuple(parts)


def _sharded(name: str, local: Tensor, param: Tensor) -> DTensor:
    """Wrap a tensor of `moment_specs` as this rank's shard."""
    if not name.endswith(_SCALES):
        return like_shard(local, param)
    assert isinstance(param, DTensor)
    shape = torch.Size((*_parts(param), local.shape[-1]))
    stride = torch.empty(shape, device="meta").stride()
    mesh, places = param.device_mesh, param.placements
    return DTensor.from_local(local, mesh, places, run_check=False, shape=shape, stride=stride)


def _check_kernels(device: torch.device) -> None:
    from bitsandbytes.cextension import lib

    if device.type == "cuda" and not lib.compiled_with_cuda:
        rule = f"bitsandbytes has no kernels for CUDA {torch.version.cuda} (python -m bitsandbytes)"
        text = "install another version of it, or set optimizer='adamw'"
        raise ValueError(f"TrainerConfig.optimizer='adamw_8bit': {rule}; {text}")


@contextlib.contextmanager
def _on_default_stream(device: torch.device) -> Iterator[None]:
    """Order the kernels, which run on the default stream, with the current one."""
    if device.type != "cuda":
        yield
        return
    current, default = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
    default.wait_stream(current)
    try:
        yield
    finally:
        current.wait_stream(default)
