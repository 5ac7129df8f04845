"""States of Mamba and linear-attention layers: one slot a request, whatever its length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvcache.config import check_device, check_positive
from kvcache.pools.storage import PoolPart, SlotStorage
from kvcache.requests import ReqHandle, ReqToTokenPool

if TYPE_CHECKING:
    from memsaver import MemorySaver


@dataclass(frozen=True, kw_only=True)
class MambaConfig:
    """`size` slots for `num_layers` layers, and one padding slot.

    conv_shapes: the state of each convolution of a layer, such as (channels, kernel - 1).
    temporal_shape: the recurrent state, such as (heads, head dim, state dim), usually in float32.
    """

    num_layers: int
    size: int
    conv_shapes: tuple[tuple[int, ...], ...]
    temporal_shape: tuple[int, ...]
    conv_dtype: torch.dtype
    temporal_dtype: torch.dtype = torch.float32
    device: torch.device | str

    def __post_init__(self) -> None:
        check_positive("MambaConfig.num_layers", self.num_layers)
        check_positive("MambaConfig.size", self.size)
        for name, shape in (
            *(("conv_shapes", s) for s in self.conv_shapes),
            ("temporal_shape", self.temporal_shape),
        ):
            for length in shape:
                check_positive(f"MambaConfig.{name} {shape}", length)
        for name in ("conv_dtype", "temporal_dtype"):
            if getattr(self, name) not in (torch.float32, torch.float16, torch.bfloat16):
                raise ValueError(
                    f"MambaConfig.{name} {getattr(self, name)} must be float32, float16 or bfloat16"
                )
        check_device("MambaConfig", self.device)

    @property
    def parts(self) -> tuple[PoolPart, ...]:
        """Returns what a slot holds in each layer."""
        convs = (
            PoolPart(name=f"conv{i}", row=s, dtype=self.conv_dtype)
            for i, s in enumerate(self.conv_shapes)
        )
        return (
            *convs,
            PoolPart(name="temporal", row=self.temporal_shape, dtype=self.temporal_dtype),
        )

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one request's states over all layers."""
        return self.num_layers * sum(part.nbytes for part in self.parts)


class MambaPool:
    """`conv`: a list of `[L, size + 1, *shape]`; `temporal`: one; slot 0 is for padded requests.

    Who holds a slot is decided on the CPU and outlives a pause; states are in one block on the
    saver's `tag` and are undefined after a resume, but for slot 0 and slots taken during the pause,
    which `on_resume` zeroes. While it is paused slots may come and go.
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
        self._to_zero: set[int] = set()  # taken while the tag was paused
        self.on_resume()

    @property
    def nbytes(self) -> int:
        return self._storage.nbytes

    @property
    def bytes_per_slot(self) -> int:
        return self._storage.bytes_per_slot

    def available_size(self) -> int:
        """Slots that can still be handed out."""
        return len(self._free)

    def alloc(self, count: int) -> list[int] | None:
        """Slots with zeroed states, or None with nothing changed. Nothing waits for the device."""
        slots = self._take(count)
        if slots is None:
            return None
        try:
            self._zero(slots)
        except BaseException:
            self.free(slots)
            raise
        return slots

    def clone(self, sources: Sequence[int]) -> list[int] | None:
        """New slots with copies of held ones' states, or None with nothing changed."""
        self._check_held(sources)
        self._check_active(sources)
        slots = self._take(len(sources))
        if slots is None:
            return None
        try:
            self._storage.move(self._index(slots), self._index(sources))
        except BaseException:
            self.free(slots)
            raise
        return slots

    def copy(self, targets: Sequence[int], sources: Sequence[int]) -> None:
        """Copies the states of held slots into others, all read before any is written."""
        self._check_held([*targets, *sources])
        if len(targets) != len(sources):
            raise ValueError(
                f"{len(targets)} target slots for {len(sources)} source slots; pair them"
            )
        self._check_active(sources)
        self._storage.move(self._index(targets), self._index(sources))

    def free(self, slots: Sequence[int]) -> None:
        """Gives slots back; ValueError, and nothing changed, if one is not held or named twice."""
        self._check_held(slots)
        if len(set(slots)) != len(slots):
            raise ValueError(f"slots {sorted(slots)} name one twice; free each once")
        self._held -= set(slots)
        self._to_zero -= set(slots)
        self._free += reversed(slots)

    def states(self, layer: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Views of a layer's convolution states and of its recurrent one: `[size + 1, *shape]`."""
        if not 0 <= layer < self.config.num_layers:
            raise ValueError(
                f"layer {layer} is not in this pool; "
                f"it holds layers 0..{self.config.num_layers - 1}"
            )
        return [conv[layer] for conv in self.conv], self.temporal[layer]

    def on_resume(self) -> None:
        """Must be called after every resume of the tag."""
        self._storage.zero_first(1)
        if self._to_zero:
            late, self._to_zero = sorted(self._to_zero), set()
            self._zero(late)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every slot but 0 is either free or held, once."""
        assert len(set(self._free)) == len(self._free), (
            f"a slot is free twice: {sorted(self._free)}"
        )
        assert not self._held & set(self._free), "a free slot is held"
        assert self._held | set(self._free) == set(range(1, self.size + 1)), "slots were lost"
        assert self._to_zero <= self._held, "a slot that nobody holds waits to be zeroed"

    def _take(self, count: int) -> list[int] | None:
        if count < 0:
            raise ValueError(f"can't take {count} slots")
        if count > len(self._free):
            return None
        slots = [self._free.pop() for _ in range(count)]
        self._held.update(slots)
        return slots

    def _zero(self, slots: Sequence[int]) -> None:
        if not slots:
            return
        if self._paused():  # no memory to zero: remember it
            self._to_zero.update(slots)
            return
        at = self._index(slots)
        for part in self._storage.parts.values():
            part.index_fill_(1, at, 0)

    def _index(self, slots: Sequence[int]) -> torch.Tensor:
        # from pageable memory CUDA stages the bytes before it returns: nothing waits for the device
        return torch.tensor(slots, dtype=torch.int64).to(self.device, non_blocking=True)

    def _paused(self) -> bool:
        return self._saver is not None and self._saver.is_paused(self._tag)

    def _check_active(self, slots: Sequence[int]) -> None:
        if self._paused():
            raise ValueError(
                f"states of slots {list(slots)} can't be copied while tag {self._tag!r} is paused"
            )

    def _check_held(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if slot not in self._held:
                raise ValueError(f"slot {slot} is not held; it was freed or never handed out")


class HybridReqToTokenPool(ReqToTokenPool):
    """A `ReqToTokenPool` whose rows hold one slot of `mamba` each, as long as they live.

    `req_to_mamba` int32 `[size + 1]` on the device: row -> slot, 0 for row 0 and free rows.
    """

    def __init__(
        self, size: int, max_context_len: int, device: torch.device | str, mamba: MambaPool
    ) -> None:
        super().__init__(size, max_context_len, device)
        if mamba.device != self.device:
            raise ValueError(
                f"the table is on {self.device}, the state pool on {mamba.device}; use one device"
            )
        self.mamba = mamba
        self.req_to_mamba = torch.zeros(size + 1, dtype=torch.int32, device=device)
        self._slot_of = [0] * (size + 1)

    def alloc(self, reqs: Sequence[ReqHandle | None]) -> list[ReqHandle] | None:
        """Allocates as the base does; new rows come with zeroed states.

        Returns None, and changes nothing, if rows or slots are short.
        """
        handles = super().alloc(reqs)
        if handles is None:
            return None
        fresh = [handle for handle, req in zip(handles, reqs, strict=True) if req is None]
        try:
            slots = self.mamba.alloc(len(fresh))
            assert slots is not None, "slots were counted before"
            for handle, slot in zip(fresh, slots, strict=True):
                self._slot_of[handle.row] = slot
            self._map([handle.row for handle in fresh], slots)
        except BaseException:  # such as the device being out of memory
            for handle in fresh:
                self._drop(handle.row)
            raise
        return handles

    def _fits(self, count: int) -> bool:
        return super()._fits(count) and count <= self.mamba.available_size()

    def _drop(self, row: int) -> None:
        slot, self._slot_of[row] = self._slot_of[row], 0
        super()._drop(row)
        if slot:
            self.mamba.free([slot])
            self._map([row], [0])

    def mamba_slot(self, handle: ReqHandle) -> int:
        """The state slot of a live handle; ValueError for a stale one."""
        return self._slot_of[self.row(handle)]

    def copy_states(self, target: ReqHandle, source: ReqHandle) -> None:
        """Gives `target` the states that `source` has now, as after a fork."""
        self.mamba.copy([self.mamba_slot(target)], [self.mamba_slot(source)])

    def check_integrity(self) -> None:
        """Checks as the base does, and the map on the device against the slots held; waits."""
        super().check_integrity()
        self.mamba.check_integrity()
        assert self.req_to_mamba.tolist() == self._slot_of, (
            "req_to_mamba differs from the slots held"
        )
        live = [slot for slot in self._slot_of if slot]
        assert len(live) == self.size - self.available_size() == len(set(live)), (
            "a live row has no slot of its own"
        )

    def _map(self, rows: Sequence[int], slots: Sequence[int]) -> None:
        pairs = torch.tensor([rows, slots], dtype=torch.int64).to(self.device, non_blocking=True)
        self.req_to_mamba.index_copy_(0, pairs[0], pairs[1].to(torch.int32))
