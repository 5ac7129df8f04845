"""The trainer, and the bridge to a rollout on the same device: weight sync and the wake-up cycle.

What brings torch's FSDP, or ray, is loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from trainer_bridge.config import CriticConfig, LoraConfig, TrainerConfig
from trainer_bridge.cycle import Cycle
from trainer_bridge.errors import ActorDied, ActorError, ActorTimeout, CycleError, RankFailed
from trainer_bridge.training.batch import SequenceBatch

if TYPE_CHECKING:
    from trainer_bridge.coordinator import open_inprocess, open_ray
    from trainer_bridge.sync.module import module_sync
    from trainer_bridge.trainer import Trainer

_LATER = {
    "Trainer": "trainer_bridge.trainer",
    "module_sync": "trainer_bridge.sync.module",
    "open_inprocess": "trainer_bridge.coordinator",
    "open_ray": "trainer_bridge.coordinator",
}

__all__ = [
    "ActorDied",
    "ActorError",
    "ActorTimeout",
    "CriticConfig",
    "Cycle",
    "CycleError",
    "LoraConfig",
    "RankFailed",
    "SequenceBatch",
    "Trainer",
    "TrainerConfig",
    "module_sync",
    "open_inprocess",
    "open_ray",
]


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)
