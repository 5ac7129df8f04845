"""The engine's weights on their tag, and how they are replaced."""

from rollout.weights.messages import (
    Manifest,
    ModuleTensor,
    PackedBox,
    ParamSlice,
    UpdateReceipt,
    WeightLayout,
    WeightOffer,
    WriteReceipt,
)
from rollout.weights.store import arena_nbytes

__all__ = [
    "Manifest",
    "ModuleTensor",
    "PackedBox",
    "ParamSlice",
    "UpdateReceipt",
    "WeightLayout",
    "WeightOffer",
    "WriteReceipt",
    "arena_nbytes",
]
