"""Parts of a training step: model, losses, optimizer, adapters, critic and checkpoints."""

from trainer_bridge.training.adamw_8bit import code_tables
from trainer_bridge.training.checkpoint import read_values
from trainer_bridge.training.correction import k3, mismatch, reference_figures
from trainer_bridge.training.device import Runtime
from trainer_bridge.training.exact import why_not_exact
from trainer_bridge.training.export import export_checkpoint
from trainer_bridge.training.model import check_layout, lora_target_names
from trainer_bridge.training.packing import FLASH, packed_attention
from trainer_bridge.training.planned_exact import plan_exact
from trainer_bridge.training.token_numbers import Numbers, PerToken, by_answer, flat, log_ratios

__all__ = [
    "FLASH",
    "Numbers",
    "PerToken",
    "Runtime",
    "by_answer",
    "check_layout",
    "code_tables",
    "export_checkpoint",
    "flat",
    "k3",
    "log_ratios",
    "lora_target_names",
    "mismatch",
    "packed_attention",
    "plan_exact",
    "read_values",
    "reference_figures",
    "why_not_exact",
]
