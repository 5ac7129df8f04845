"""Pool of the recurrent states of Mamba and linear-attention layers, one slot per request."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcache.config import check_counts
from kvcache.pools.storage import FLOATS, PoolPart, SlotStorage
from memsaver import MemorySaver


@dataclass(frozen=True, kw_only=True)
class MambaConfig:
    """Configuration of a `MambaPool`. Dtypes are float32, float16 or bfloat16.

    Raises:
        ValueError: `num_layers` or `size` is not a positive integer.
    """

    num_layers: int  # linear layers of the model
    size: int  # requests whose states fit; the pool adds one padding slot
    conv_shapes: tuple[tuple[int, ...], ...]  # of a layer, each such as (channels, kernel - 1)
    temporal_shape: tuple[int, ...]  # of a layer, such as (heads, head dim, state dim)
    conv_dtype: torch.dtype
    temporal_dtype: torch.dtype = torch.float32
    device: torch.device | str

    def __post_init__(self) -> None:
        check_counts(self, "num_layers", "size")
        shapes = (*self.conv_shapes, self.temporal_shape)
        assert all(min(shape) >= 1 for shape in shapes), f"states of shapes {shapes}"
        dtypes = {self.conv_dtype, self.temporal_dtype}
        assert dtypes <= {*FLOATS}, f"states of {dtypes}; use float32, float16 or bfloat16"

    @property
    def parts(self) -> tuple[PoolPart, ...]:
        """Return the tensors that a slot consists of in each layer."""
        shapes = {f"conv{i}": shape for i, shape in enumerate(self.conv_shapes)}
        convs = (PoolPart(name=n, row=s, dtype=self.conv_dtype) for n, s in shapes.items())
        temporal = PoolPart(name="temporal", row=self.temporal_shape, dtype=self.temporal_dtype)
        return (*convs, temporal)

    @property
    def bytes_per_slot(self) -> int:
        """Return the bytes of one request's states over all layers."""
        return self.num_layers * sum(part.nbytes for part in self.parts)


class MambaPool:
    """Pool of the states of linear layers, with the list of free slots.

    `conv` is a list of tensors `[L, size + 1, *shape]`, and `temporal` one such tensor. Slot 0 is
    for padded requests.

    The states are in one block on the saver's `tag` (without a saver, in plain torch memory) and
    are undefined after a resume, except for slot 0 and for slots allocated during the pause, which
    `on_resume` zeroes. The list of slots is on the CPU and survives a pause, so slots can be
    allocated and freed while the tag is paused. Their states can't be copied then. No method waits
    for the device. Not thread-safe.
    """

    def __init__(
        self, config: MambaConfig, saver: MemorySaver | None = None, tag: str = "kv_cache"
    ) -> None:
        self.config = config
        self.size = config.size
        self._storage = SlotStorage(
            config.parts,
            num_layers=config.num_layers,
            slots=config.size + 1,
            device=config.device,
            saver=saver,
            tag=tag,
        )
        self._saver, self._tag = saver, tag
        self.device = self._storage.block.device
        self.conv = [self._storage.parts[f"conv{i}"] for i in range(len(config.conv_shapes))]
        self.temporal = self._storage.parts["temporal"]
        self._free = list(range(config.size, 0, -1))
        self._held: set[int] = set()
        self._to_zero: set[int] = set()  # allocated while the tag was paused
        self.on_resume()

    @property
    def nbytes(self) -> int:
        """Return the bytes of all slots, including the padding slot."""
        return self._storage.nbytes

    @property
    def bytes_per_slot(self) -> int:
        """Return the bytes of one request's states over all layers."""
        return self._storage.bytes_per_slot

    def available_size(self) -> int:
        """Return the number of free slots."""
        return len(self._free)

    def alloc(self) -> int | None:
        """Allocate a slot with zeroed states, or return None if no slot is free."""
        return self._take(self._zero)

    def clone(self, source: int) -> int | None:
        """Allocate a slot with a copy of a slot's states, or return None if no slot is free."""
        return self._take(lambda slot: self.copy(slot, source))

    def copy(self, target: int, source: int) -> None:
        """Copy the states of one allocated slot to another."""
        assert {target, source} <= self._held
        assert not self._paused(), f"states can't be copied while tag {self._tag!r} is paused"
        for part in self._storage.parts.values():
            part[:, target] = part[:, source]

    def free(self, slot: int) -> None:
        """Free a slot; raise KeyError if it is not allocated."""
        self._held.remove(slot)
        self._to_zero.discard(slot)
        self._free.append(slot)

    def states(self, layer: int) -> tuple[list[Tensor], Tensor]:
        """Return a layer's convolution states and recurrent state, views `[size + 1, *shape]`.

        `layer` is an index among the linear layers.
        """
        return [conv[layer] for conv in self.conv], self.temporal[layer]

    def on_resume(self) -> None:
        """Zero slot 0 and the slots allocated during the pause. Call it after every resume."""
        self._storage.zero_first(1)
        late, self._to_zero = self._to_zero, set()
        for slot in sorted(late):
            self._zero(slot)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every slot but slot 0 is either free or allocated, once."""
        assert len(set(self._free)) == len(self._free), f"a slot is free twice: {self._free}"
        assert not self._held & set(self._free), "a slot is both free and allocated"
        assert self._held | set(self._free) == set(range(1, self.size + 1)), "slots were lost"
        assert self._to_zero <= self._held, "a free slot is marked to be zeroed"

    def _take(self, fill: Callable[[int], None]) -> int | None:
        if not self._free:
            return None
        slot = self._free.pop()
        self._held.add(slot)
        try:
            fill(slot)
        except BaseException:  # for example, the device is out of memory
            self.free(slot)
            raise
        return slot

    def _zero(self, slot: int) -> None:
        if self._paused():  # no memory is mapped: on_resume zeroes the slot
            self._to_zero.add(slot)
            return
        for part in self._storage.parts.values():
            part[:, slot].zero_()

    def _paused(self) -> bool:
        return self._saver is not None and self._saver.is_paused(self._tag)
