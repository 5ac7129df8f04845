"""Engines over consecutive ranks of torch's default group, as vLLM's external launcher builds."""

from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

_tp: Any = None


def share_engines(size: int) -> None:
    global _tp
    for first in range(0, dist.get_world_size(), size):
        ranks = list(range(first, first + size))
        group = dist.new_group(ranks, backend="gloo")
        if dist.get_rank() in ranks:
            _tp = SimpleNamespace(cpu_group=group, world_size=size)


def get_tp_group() -> Any:
    return _tp
