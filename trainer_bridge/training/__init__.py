"""Parts of a training step: model, losses, optimizer, adapters, critic and checkpoints."""

from trainer_bridge.training.adamw_8bit import code_tables
from trainer_bridge.training.checkpoint import read_values
from trainer_bridge.training.correction import k3, mismatch
from trainer_bridge.training.device import Runtime
from trainer_bridge.training.export import export_checkpoint
from trainer_bridge.training.model import check_layout, lora_target_names
from trainer_bridge.training.packing import packed_attention

__all__ = [
    "Runtime",
    "check_layout",
    "code_tables",
    "export_checkpoint",
    "k3",
    "lora_target_names",
    "mismatch",
    "packed_attention",
    "read_values",
]
