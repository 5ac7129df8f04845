"""The engine's weights on their tag, and how they are replaced."""

from rollout.weights.messages import (
    ArenaBox,
    Manifest,
    ModuleTensor,
    PackedBox,
    ParamSlice,
    UpdateReceipt,
    WeightLayout,
    WeightOffer,
    WriteReceipt,
    torch_dtype,
)
from rollout.weights.store import arena_nbytes

__all__ = [
    "ArenaBox",
    "Manifest",
    "ModuleTensor",
    "PackedBox",
    "ParamSlice",
    "UpdateReceipt",
    "WeightLayout",
    "WeightOffer",
    "WriteReceipt",
    "arena_nbytes",
    "torch_dtype",
]
