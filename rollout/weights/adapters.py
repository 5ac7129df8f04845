"""Slots of adapters on one tag, which kernels read as stacks."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from memsaver import MemorySaver
from rollout.ops.low_rank import Factors
from rollout.tag_names import ADAPTER_SLOTS
from rollout.weights.params import ParamGroup
from rollout.weights.store import WeightStore, arena_nbytes

SCALE = "scale"
"""Name of the buffer of a slot that has the factor of B A."""


@dataclass(frozen=True, eq=False)
class ServedAdapter:
    """A version of an adapter, which its requests keep to their ends.

    Attributes:
        name: Name of the adapter.
        slot: Number of its slot, from 1 on.
        version: Number of the version.
        key: Number that no other version of any adapter has, by which prefixes are cached.
    """

    name: str
    slot: int
    version: int
    key: int


class AdapterPages:
    """Adapters of an engine's products: all slots have one manifest, that of slot 1.

    Their content is on tag `adapter_slots`, which keeps it in a sleep.

    Args:
        groups: Parameters of an adapter, as this rank stores them, A and B of a product in turn.
        slots: Number of slots.
        dtype: Dtype of the factors.
        saver: Saver of the tag.

    Attributes:
        nbytes: Bytes of a slot.
        stores: The slots, of which number 0 is slot 1.
        scales: fp32 [1 + slots], the factor of each slot's products; slot 0 is none.
        shapes: Shapes of the factors that an adapter can have, by name.
        stream: Stream of a GPU for launches beside the products.
    """

    def __init__(
        self, groups: Sequence[ParamGroup], slots: int, dtype: torch.dtype, saver: MemorySaver
    ) -> None:
        self.nbytes = arena_nbytes(groups, dtype)
        arena = saver.empty((slots, self.nbytes), torch.uint8, tag=ADAPTER_SLOTS)
        base = saver.offset_of(arena)
        self.stores = [WeightStore(groups, {}, dtype, saver, part, base) for part in arena]
        self.scales = torch.zeros(1 + slots, device=saver.device)
        for store, scale in zip(self.stores, self.scales[1:], strict=True):
            store.buffers[SCALE] = scale
        self.shapes = {name: shape for name, shape in self.stores[0].shapes.items() if shape[0]}
        on_gpu = saver.device.type == "cuda"
        self.stream = torch.cuda.Stream(saver.device) if on_gpu else None
        self._ends: dict[str, tuple[int, ...]] = {}
        for group in groups[1::2]:
            rows = accumulate(param.shape[0] for param in group.params)
            assert group.fused is not None
            self._ends[group.fused.removesuffix(".lora_b")] = tuple(rows)

    def factors(self, layer: str) -> Factors | None:
        """Return the adapters of a layer in all slots; None for a layer without adapters."""
        if layer not in self._ends:
            return None
        first = (self.stores[0].tensor(f"{layer}.{factor}") for factor in ("lora_a", "lora_b"))
        slots = len(self.stores)
        a, b = (
            part.as_strided((slots, *part.shape), (self.nbytes // part.itemsize, *part.stride()))
            for part in first
        )
        return Factors(a, b, self._ends[layer])
