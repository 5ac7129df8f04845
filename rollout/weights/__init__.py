"""The engine's weights on their tag, and how they are replaced."""

from rollout.weights.messages import (
    CommitReceipt,
    Manifest,
    ModuleTensor,
    PackedBox,
    ParamSlice,
    VerifyReceipt,
    WeightLayout,
    WeightOffer,
    WriteReceipt,
)
from rollout.weights.store import arena_nbytes

__all__ = [
    "CommitReceipt",
    "Manifest",
    "ModuleTensor",
    "PackedBox",
    "ParamSlice",
    "VerifyReceipt",
    "WeightLayout",
    "WeightOffer",
    "WriteReceipt",
    "arena_nbytes",
]
