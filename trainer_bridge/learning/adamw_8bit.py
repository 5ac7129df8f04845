"""AdamW with both moments in 8 bits: the kernels of bitsandbytes on the memory of a tag."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from memsaver import MemorySaver
from trainer_bridge.models.files.moments_8bit import (
    BLOCK,
    CHUNK,
    CODES,
    FIRST,
    SCALES,
    SECOND,
    code_tables,
    moment_specs,
    zero_code,
)
from trainer_bridge.models.runtime import Runtime, side_by_side
from trainer_bridge.sync.shards import Ints, like_shard, local_shard


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
        groups: list[dict[str, Any]],
        options: Mapping[str, Any],
        runtime: Runtime,
        saver: MemorySaver,
        tag: str,
    ) -> None:
        """Allocate zero moments on a tag for groups of parameters, DTensors.

        `options` has the learning rate, the betas and eps; each group has its weight decay.

        Raises:
            ValueError: bitsandbytes has no kernels for this version of CUDA.
        """
        self._tables = {
            name: torch.tensor(values, dtype=torch.float32, device=runtime.device)
            for name, values in code_tables().items()
        }
        _check_kernels(runtime.device)
        super().__init__(groups, dict(options))
        self.whole = True
        self._step = torch.zeros((), dtype=torch.float32)
        params = list(itertools.chain.from_iterable(group["params"] for group in groups))
        named = [
            moment_specs(tuple(param.shape), tuple(local_shard(param).shape), _parts(param))
            for param in params
        ]
        flat = itertools.chain.from_iterable(specs.values() for specs in named)
        tensors = iter(side_by_side(list(flat), saver, tag))
        for param, specs in zip(params, named, strict=True):
            zeros = ((name, next(tensors).fill_(_zero(name))) for name in specs)
            shards = {name: _sharded(name, local, param) for name, local in zeros}
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
        how = kernel_options(group) | {"step": int(self._step)}
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
                moments[f"state{number}"] = held[f"{name}{CODES}"][part]
                moments[f"absmax{number}"] = held[f"{name}{SCALES}"][blocks]
                moments[f"qmap{number}"] = self._tables[name]
            with _kept_zeros(grads[part], moments):
                kernels.optimizer_update_8bit_blockwise(
                    "adam", grads[part], weights[part], **moments, **how
                )


def kernel_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group as AdamW's kernels name them."""
    beta1, beta2 = group["betas"]
    names = ("lr", "weight_decay", "eps")
    return {name: group[name] for name in names} | {"beta1": beta1, "beta2": beta2}


def _zero(name: str) -> int:
    """Return what a tensor of `moment_specs` holds where the moment is 0.

    The GPU's kernel gives a code the sign of its moment. Code 0 is negative, so that it and a
    gradient of -0.0 would become a small negative moment.
    """
    return zero_code(name.removesuffix(CODES)) if name.endswith(CODES) else 0


@contextlib.contextmanager
def _kept_zeros(grads: Tensor, moments: Mapping[str, Any]) -> Iterator[None]:
    """Keep moments at 0 where they are 0 and gradients are, as in rows of tokens never seen.

    The kernel of the CPU codes 0 as 2e-5 of a block's scale, which would move these weights.
    """
    if grads.is_cuda:
        yield
        return
    kept = []
    for number, name in enumerate((FIRST, SECOND), 1):
        codes, zero = moments[f"state{number}"], zero_code(name)
        scales = moments[f"absmax{number}"].repeat_interleave(BLOCK)[: len(codes)]
        kept.append((codes, (grads == 0) & ((codes == zero) | (scales == 0)), zero))
    yield
    for codes, zeros, zero in kept:
        codes.masked_fill_(zeros, zero)


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
    if not name.endswith(SCALES):
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
