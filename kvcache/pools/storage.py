"""Storage of a pool: one block for all slots, and codecs for plain, fp8 and FP4 rows."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcache.config import FP4_BLOCK, FP4_DTYPE, FP8_DTYPES, TokenConfig, store_dtype
from kvcache.ops.kv_write import move_rows, set_kv_buffer, set_kv_buffer_fp4, set_kv_buffer_fp8
from kvcache.ops.quant import read_fp4, read_fp8
from memsaver import MemorySaver

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
Tensors = Sequence[Tensor]  # rows, or the stored parts of a kind of row in a layer, [N, H, ...]


@dataclass(frozen=True, kw_only=True)
class PoolPart:
    """A tensor that a slot stores in every layer."""

    name: str  # such as "k"
    row: tuple[int, ...]  # shape in a slot
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.row) * self.dtype.itemsize


class SlotStorage:
    """Memory of a pool: a tensor `[layers, slots, *row]` per part, in one uint8 block without gaps.

    The block is on the saver's `tag`, or in plain torch memory without a saver. `slots` includes
    the padding page. If `slot_major`, all layers of a slot are adjacent: the tensors are strided
    views, and the block can be resized at its end. Otherwise the parts follow one another.

    The contents are undefined at first. Slots are not range-checked, because that would synchronize
    on a GPU.
    """

    def __init__(
        self,
        parts: Sequence[PoolPart],
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
                f"slot_major needs a multiple of {widest} bytes per slot, got {self.bytes_per_slot}"
            )
        self._saver, self._tag = saver, tag
        self.block = _allocate(
            slots * self.bytes_per_slot, torch.device(device), saver, tag, elastic=slot_major
        )
        self.parts: dict[str, Tensor] = {}
        start = 0
        # Widest element first, so that every part starts aligned.
        for part in sorted(parts, key=lambda part: -part.dtype.itemsize):
            self.parts[part.name] = self._view(part, start, num_layers)
            start += num_layers * part.nbytes * (1 if slot_major else slots)
        self._words = [_as_words(part) for part in self.parts.values()]

    def _view(self, part: PoolPart, start: int, layers: int) -> Tensor:
        if self.slot_major:
            inside = self.block.view(self.slots, self.bytes_per_slot)[
                :, start : start + layers * part.nbytes
            ]
            return inside.view(part.dtype).unflatten(1, (layers, *part.row)).transpose(0, 1)
        inside = self.block[start : start + layers * self.slots * part.nbytes]
        return inside.view(part.dtype).view(layers, self.slots, *part.row)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the slots that are backed by memory now."""
        return self.slots * self.bytes_per_slot

    def zero_first(self, slots: int) -> None:
        """Zero the first slots in every layer."""
        for part in self.parts.values():
            part[:, :slots].zero_()

    def move(self, tgt: Tensor, src: Tensor) -> None:
        """Copy slots `src` to `tgt` (int64 `[n]`) in every layer; all reads precede all writes."""
        move_rows(self._words, tgt, src)

    def resize(self, slots: int) -> int:
        """Map memory behind the first `slots` slots only; return the number of usable slots."""
        assert self._saver is not None and self.slot_major, "resize needs slot_major and a tag"
        end = self._saver.offset_of(self.block) + slots * self.bytes_per_slot
        self._saver.resize(self._tag, end)
        return self.refresh()

    def refresh(self) -> int:
        """Update the number of usable slots after a resume or resize, and return it."""
        if self._saver is not None and self.slot_major:
            self.slots = len(self._saver.backed_view(self.block.view(-1, self.bytes_per_slot)))
        return self.slots


def _allocate(
    nbytes: int, device: torch.device, saver: MemorySaver | None, tag: str, elastic: bool
) -> Tensor:
    if saver is None:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    has = saver.device
    same = None in (device.index, has.index) or device.index == has.index
    if device.type != has.type or not same:
        raise ValueError(f"the config is for {device}, the saver on {has}; use one device for both")
    return saver.empty((nbytes,), torch.uint8, tag=tag, elastic=elastic)


def _as_words(part: Tensor) -> Tensor:
    """View a part as `[L, slots, words]` of the widest integers that fit, for faster copies."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    rows = part.flatten(2).view(integers[part.element_size()])
    ratio = 8 // rows.element_size()
    strides = rows.shape[2], rows.storage_offset(), *rows.stride()[:2]
    fits = rows.data_ptr() % 8 == 0 and not any(stride % ratio for stride in strides)
    return rows.view(torch.int64) if fits else rows


class Codec(ABC):
    """Conversion between rows `[n, H, W]` and the stored parts of one pool."""

    scaled = False  # whether layers have scales, which may change

    def __init__(self, config: TokenConfig) -> None:
        self.config = config
        self.accepts: tuple[torch.dtype, ...] = (config.dtype,)

    def parts(self, name: str, heads: int, width: int) -> tuple[PoolPart, ...]:
        """Return the parts that store a row of this shape in a slot."""
        return (PoolPart(name=name, row=(heads, width), dtype=store_dtype(self.config.dtype)),)

    @abstractmethod
    def write(self, layer: int, rows: Tensors, into: Sequence[Tensors], loc: Tensor) -> None:
        """Write two rows per token to slots `loc`.

        `rows` are the two tensors of rows, of one dtype and already validated, and `into` the
        stored parts of the two kinds of rows.
        """

    @abstractmethod
    def read(self, layer: int, nth: int, stored: Tensors, loc: Tensor) -> Tensor:
        """Return the rows in slots `loc` as `config.row_dtype`, for kind of row number `nth`."""

    def view(self, stored: Tensors) -> Tensor:
        """Return a view of all rows of a layer, `[N, H, W]`."""
        return stored[0].view(self.config.dtype)

    def scales(self, layer: int) -> tuple[float, ...]:
        """Return the factor of stored values for each kind of row of a layer."""
        return (1.0,) * len(self.config.rows)

    def device_scales(self, layer: int) -> Tensor | None:
        """Return the scales of a layer as `KVPool.device_scales` does."""
        return None

    def set_scales(self, layer: int, scales: Sequence[float]) -> None:
        raise ValueError(f"a pool of {self.config.dtype} has no layer scales; only fp8 pools do")


class PlainCodec(Codec):
    """Codec of float32, float16 and bfloat16 pools, which store rows bit-exact."""

    def write(self, layer: int, rows: Tensors, into: Sequence[Tensors], loc: Tensor) -> None:
        set_kv_buffer(rows[0], rows[1], into[0][0], into[1][0], loc)

    def read(self, layer: int, nth: int, stored: Tensors, loc: Tensor) -> Tensor:
        return stored[0][loc]


class FP8Codec(Codec):
    """Codec of fp8 pools, with a scale per layer and kind of row.

    Rows given in fp8 are stored unchanged, as already scaled. The scales are outside the pool's
    block, so a pause keeps them. Kernels read them on the device, so a captured graph sees changes.
    """

    scaled = True

    def __init__(self, config: TokenConfig) -> None:
        super().__init__(config)
        self.accepts = (config.dtype, *FLOATS)
        self._scales = [(1.0,) * len(config.rows) for _ in range(config.num_layers)]
        # Always two scales, because reads and writes process two kinds of rows together.
        shape = (2, config.num_layers, 2)
        self._device_scales, self._inverse = torch.ones(shape, device=config.device)

    def write(self, layer: int, rows: Tensors, into: Sequence[Tensors], loc: Tensor) -> None:
        (k, v), (k_buffer, v_buffer) = rows, (stored[0] for stored in into)
        if k.dtype == self.config.dtype:
            set_kv_buffer(k, v, k_buffer, v_buffer, loc)
        else:
            scales = self._inverse[layer]
            set_kv_buffer_fp8(k, v, k_buffer, v_buffer, loc, scales, self.config.dtype)

    def read(self, layer: int, nth: int, stored: Tensors, loc: Tensor) -> Tensor:
        config, scale = self.config, self._device_scales[layer, nth]
        return read_fp8(stored[0], loc, scale, config.dtype, config.row_dtype)

    def scales(self, layer: int) -> tuple[float, ...]:
        return self._scales[layer]

    def device_scales(self, layer: int) -> Tensor | None:
        return self._device_scales[layer]

    def set_scales(self, layer: int, scales: Sequence[float]) -> None:
        exact = torch.tensor([float(scale) for scale in scales])  # as fp32
        inverse = 1 / exact
        usable = ((exact > 0) & exact.isfinite() & inverse.isfinite()).all()
        if len(scales) != len(self.config.rows) or not usable:
            names = ", ".join(self.config.rows)
            raise ValueError(f"scales of layer {layer}: one finite number > 0 for each of {names}")
        self._scales[layer] = tuple(exact.tolist())
        for nth, at in enumerate((0, len(exact) - 1)):
            # A fill passes the number as a launch argument, so nothing waits.
            self._inverse[layer, nth].fill_(float(inverse[at]))
            self._device_scales[layer, nth].fill_(float(exact[at]))


class FP4Codec(Codec):
    """Codec of FP4 pools: two E2M1 codes per byte and a scale byte per 16 elements.

    `kvcache/ops/quant.py` defines the format.
    """

    def __init__(self, config: TokenConfig) -> None:
        super().__init__(config)
        self.accepts = FLOATS

    def parts(self, name: str, heads: int, width: int) -> tuple[PoolPart, ...]:
        return (
            PoolPart(name=name, row=(heads, width // 2), dtype=torch.uint8),
            PoolPart(name=f"{name}_scale", row=(heads, width // FP4_BLOCK), dtype=torch.uint8),
        )

    def write(self, layer: int, rows: Tensors, into: Sequence[Tensors], loc: Tensor) -> None:
        set_kv_buffer_fp4(rows[0], rows[1], into[0], into[1], loc)

    def read(self, layer: int, nth: int, stored: Tensors, loc: Tensor) -> Tensor:
        return read_fp4(stored[0], stored[1], loc, self.config.row_dtype)

    def view(self, stored: Tensors) -> Tensor:
        raise ValueError("FP4 rows can't be viewed; use get_rows, or `stored` for the bytes")


def make_codec(config: TokenConfig) -> Codec:
    """Create the codec for the config's dtype."""
    if config.dtype == FP4_DTYPE:
        return FP4Codec(config)
    return FP8Codec(config) if config.dtype in FP8_DTYPES else PlainCodec(config)
