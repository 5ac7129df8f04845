"""One block of memory for the slots of a pool, all layers and parts of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvcache.ops.move import move_rows
from memsaver import MemorySaver


@dataclass(frozen=True, kw_only=True)
class Part:
    """A tensor of this shape and stored dtype, which a slot holds in every layer."""

    name: str
    row: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.row) * self.dtype.itemsize


class SlotStorage:
    """Tensors `[L, slots, *row]`, one a part, in one uint8 block without gaps.

    The block is on the saver's `tag`, in plain torch memory without a saver. Contents start
    undefined. Nothing here checks slots: on a GPU that would synchronise.

    slot_major: all layers of a slot lie together and the tensors are strided views; the block can
    then be resized at its end. Otherwise parts follow each other.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        num_layers: int,
        slots: int,
        device: torch.device | str,
        saver: MemorySaver | None = None,
        tag: str = "kv_cache",
        slot_major: bool = False,
    ) -> None:
        self.slots = slots
        self.slot_major = slot_major
        self.bytes_per_slot = num_layers * sum(part.nbytes for part in parts)
        widest = max(part.dtype.itemsize for part in parts)
        if slot_major and self.bytes_per_slot % widest:
            raise ValueError(
                f"slot_major needs slots of a multiple of {widest} bytes, "
                f"these take {self.bytes_per_slot}"
            )
        self._saver, self._tag = saver, tag
        self.block = _allocate(
            slots * self.bytes_per_slot, torch.device(device), saver, tag, elastic=slot_major
        )
        self.parts: dict[str, torch.Tensor] = {}
        start = 0
        # widest first: each starts aligned
        for part in sorted(parts, key=lambda part: -part.dtype.itemsize):
            self.parts[part.name] = self._view(part, start, num_layers)
            start += num_layers * part.nbytes * (1 if slot_major else slots)
        self._words = [_as_words(part) for part in self.parts.values()]

    def _view(self, part: Part, start: int, layers: int) -> torch.Tensor:
        if self.slot_major:
            inside = self.block.view(self.slots, self.bytes_per_slot)[
                :, start : start + layers * part.nbytes
            ]
            return inside.view(part.dtype).unflatten(1, (layers, *part.row)).transpose(0, 1)
        inside = self.block[start : start + layers * self.slots * part.nbytes]
        return inside.view(part.dtype).view(layers, self.slots, *part.row)

    @property
    def nbytes(self) -> int:
        """Bytes of the slots that are usable now."""
        return self.slots * self.bytes_per_slot

    def zero_first(self, slots: int) -> None:
        """Zeroes the first slots in every layer."""
        for part in self.parts.values():
            part[:, :slots].zero_()

    def move(self, tgt: torch.Tensor, src: torch.Tensor) -> None:
        """Copies slots src to tgt (int64 [n]) in every layer, all read before any is written."""
        move_rows(self._words, tgt, src)

    def to_host(self, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The slots' content as stored, `[L, n, *row]` a part, in host memory; synchronises."""
        # not index_select: on the CPU that copies the whole of a strided tensor first
        return tuple(part[:, slots].contiguous().cpu() for part in self.parts.values())

    def from_host(self, copies: Sequence[torch.Tensor], slots: torch.Tensor) -> None:
        """Writes what `to_host` gave into other slots."""
        for part, copy in zip(self.parts.values(), copies, strict=True):
            part.index_copy_(1, slots, copy.to(part.device))

    def resize(self, slots: int) -> int:
        """Puts memory behind the first `slots` only; how many are usable now."""
        if self._saver is None or not self.slot_major:
            raise ValueError(
                "only a slot_major pool on a saver's tag can be resized; "
                "say slot_major=True in its config"
            )
        full = len(self.block) // self.bytes_per_slot
        if not 0 < slots <= full:
            raise ValueError(f"can't resize to {slots} slots; the pool was made for 1..{full}")
        end = self._saver.offset_of(self.block) + slots * self.bytes_per_slot
        self._saver.resize(self._tag, end)
        return self.refresh()

    def refresh(self) -> int:
        """Looks up, after a resume with less memory, how many slots are usable now."""
        if self._saver is not None and self.slot_major:
            self.slots = len(self._saver.backed_view(self.block.view(-1, self.bytes_per_slot)))
        return self.slots


def _allocate(
    nbytes: int, device: torch.device, saver: MemorySaver | None, tag: str, elastic: bool
) -> torch.Tensor:
    if saver is None:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    has = saver.device
    if device.type != has.type or (
        device.index is not None and has.index is not None and device.index != has.index
    ):
        raise ValueError(
            f"the config asks for {device}, the saver is on {has}; use one device for both"
        )
    return saver.empty((nbytes,), torch.uint8, tag=tag, elastic=elastic)


def _as_words(part: torch.Tensor) -> torch.Tensor:
    """`[L, slots, words]` of the same memory in the widest integers that fit: fewer steps."""
    rows = part.flatten(2).view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32}[part.element_size()]
    )
    ratio = 8 // rows.element_size()
    if (
        any(n % ratio for n in (rows.shape[2], rows.storage_offset(), *rows.stride()[:2]))
        or rows.data_ptr() % 8
    ):
        return rows
    return rows.view(torch.int64)
