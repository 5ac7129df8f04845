"""AdamW whose state is made at once, side by side on a tag."""

import math
from collections.abc import Sequence
from itertools import chain

import torch
from torch import nn

from memsaver import MemorySaver
from trainer_bridge.config import TrainerConfig
from trainer_bridge.sync.shards import like_shard, local_shard
from trainer_bridge.tags import OPTIM
from trainer_bridge.training.runtime import Runtime, side_by_side
from trainer_bridge.training.streamed import StreamedAdamW


def optimizer_step(optimizer: torch.optim.Optimizer, config: TrainerConfig, done: int) -> float:
    """Makes one clipped step with the learning rate after `done` updates; returns the gradients'
    norm before clipping.

    A norm that is not finite raises a FloatingPointError, and the parameters are unchanged.
    Gradients are dropped.
    """
    params = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
    limit = math.inf if config.max_grad_norm is None else config.max_grad_norm
    norm = torch.nn.utils.clip_grad_norm_(params, limit)
    grad_norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    if not math.isfinite(grad_norm):
        optimizer.zero_grad(set_to_none=True)
        raise FloatingPointError(
            f"the gradient's norm is {grad_norm} in step {done + 1}, parameters are unchanged; "
            "look for NaN in what the batch holds beside its tokens, or lower the learning rate"
        )
    for group in optimizer.param_groups:
        group["lr"] = config.learning_rate_after(done)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return grad_norm


def after_load(optimizer: torch.optim.Optimizer, done: int) -> None:
    """Makes what a loaded state has not: the moments' step counters, and parameters of masters."""
    for state in optimizer.state.values():
        state["step"].fill_(done)
    if isinstance(optimizer, StreamedAdamW):
        optimizer.publish()


def build_optimizer(
    params: Sequence[nn.Parameter],
    config: TrainerConfig,
    runtime: Runtime,
    saver: MemorySaver | None,
    tag: str = OPTIM,
) -> torch.optim.Optimizer:
    """Makes AdamW with both moments zero. The step counters (4 bytes a parameter) stay in torch's
    own memory. With `config.optimizer_offload` nothing is on the tag (`StreamedAdamW`).

    Fused: the unfused step on a GPU needs temporaries as large as the parameters.
    """
    if config.optimizer_offload:
        return StreamedAdamW(params, config, runtime)
    device = runtime.device
    optimizer = torch.optim.AdamW(
        params,
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
        fused=True,
    )
    specs = [(tuple(local_shard(param).shape), param.dtype) for param in params]
    pairs = zip(specs, specs, strict=True)
    moments = side_by_side(list(chain.from_iterable(pairs)), device, saver, tag)
    for param, first, second in zip(params, moments[0::2], moments[1::2], strict=True):
        optimizer.state[param] = {
            "step": torch.zeros((), dtype=torch.float32, device=device),
            "exp_avg": like_shard(first.zero_(), param),
            "exp_avg_sq": like_shard(second.zero_(), param),
        }
    return optimizer
