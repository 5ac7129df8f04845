"""The weight sync: plan, copies, agreement of all ranks."""

from trainer_bridge.sync.weight_sync import SyncReceipt, WeightSync

__all__ = ["SyncReceipt", "WeightSync"]
