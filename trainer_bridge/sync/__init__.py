"""The weight sync: its plan, its copies, and the agreement of all ranks."""

from trainer_bridge.sync.relay import MESSAGE_BYTES, RELAY_BYTES
from trainer_bridge.sync.weight_sync import SyncReceipt, WeightSync

__all__ = ["MESSAGE_BYTES", "RELAY_BYTES", "SyncReceipt", "WeightSync"]
