"""AdamW whose state is made at once, side by side on tag `optim`, instead of tensor by tensor in the first step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from trainer_bridge.config import TrainerConfig
from trainer_bridge.memory import side_by_side
from trainer_bridge.model import like_shard, local_shard
from trainer_bridge.tags import OPTIM

if TYPE_CHECKING:
    from memsaver import MemorySaver


def build_optimizer(
    params: Sequence[nn.Parameter], config: TrainerConfig, device: torch.device, saver: MemorySaver | None
) -> torch.optim.AdamW:
    """AdamW with both moments zero. The step counters (4 bytes a parameter) stay in torch's own memory.

    Fused: the unfused step on a GPU needs temporaries as large as the parameters.
    """
    optimizer = torch.optim.AdamW(
        params,
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
        fused=True,
    )
    specs = [(tuple(local_shard(param).shape), param.dtype) for param in params for _ in range(2)]
    moments = side_by_side(specs, device, saver, OPTIM)
    for param, first, second in zip(params, moments[0::2], moments[1::2], strict=True):
        optimizer.state[param] = {
            "step": torch.zeros((), dtype=torch.float32, device=device),
            "exp_avg": like_shard(first.zero_(), param),
            "exp_avg_sq": like_shard(second.zero_(), param),
        }
    return optimizer
