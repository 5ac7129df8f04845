"""The trainer and its bridge to a rollout on the same device; ray is imported on first use."""

from memsaver.system.hidden_packages import refuse_hidden

refuse_hidden("kvcache", "rollout")
from trainer_bridge.config import (
    CorrectionConfig,
    CriticConfig,
    LoraConfig,
    PolicyLoss,
    Schedule,
    TrainerConfig,
)
from trainer_bridge.coordinator import open_inprocess, open_ray
from trainer_bridge.cycle import Cycle
from trainer_bridge.errors import ActorDied, ActorError, ActorTimeout, CycleError, RankFailed
from trainer_bridge.learning.batch import SequenceBatch
from trainer_bridge.learning.correction import Correction, correct
from trainer_bridge.sync.weight_sync import module_sync
from trainer_bridge.trainer import Trainer

__all__ = [
    "ActorDied",
    "ActorError",
    "ActorTimeout",
    "Correction",
    "CorrectionConfig",
    "CriticConfig",
    "Cycle",
    "CycleError",
    "LoraConfig",
    "PolicyLoss",
    "RankFailed",
    "Schedule",
    "SequenceBatch",
    "Trainer",
    "TrainerConfig",
    "correct",
    "module_sync",
    "open_inprocess",
    "open_ray",
]
