"""Models as FSDP2 shards, their adapters, and their files."""

from trainer_bridge.models.adapters.lora import Adapters
from trainer_bridge.models.files.checkpoint import read_values
from trainer_bridge.models.files.export import export_checkpoint
from trainer_bridge.models.files.moments_8bit import code_tables
from trainer_bridge.models.layer_graphs import why_no_graphs
from trainer_bridge.models.packing import FLASH, packed_attention
from trainer_bridge.models.runtime import GraphMemory, HostGraphs, Runtime, group_bytes
from trainer_bridge.models.sharded_model import check_layout, lora_target_names

__all__ = [
    "FLASH",
    "Adapters",
    "GraphMemory",
    "HostGraphs",
    "Runtime",
    "check_layout",
    "code_tables",
    "export_checkpoint",
    "group_bytes",
    "lora_target_names",
    "packed_attention",
    "read_values",
    "why_no_graphs",
]
