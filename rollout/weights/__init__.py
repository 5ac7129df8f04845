"""The engine's weights on their tag, and the updates that replace them."""

from rollout.weights.adapters import SCALE
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
from rollout.weights.params import held

__all__ = [
    "SCALE",
    "ArenaBox",
    "Manifest",
    "ModuleTensor",
    "PackedBox",
    "ParamSlice",
    "UpdateReceipt",
    "WeightLayout",
    "WeightOffer",
    "WriteReceipt",
    "held",
    "torch_dtype",
]
