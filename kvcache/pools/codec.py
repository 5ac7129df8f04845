"""Defines how the elements of a row are kept: as they are, as scaled fp8, or as FP4 blocks."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from kvcache.config import FP4_BLOCK, FP4_DTYPE, FP8_DTYPES, TokenConfig, store_dtype
from kvcache.ops.kv_write import set_kv_buffer, set_kv_buffer_fp4, set_kv_buffer_fp8
from kvcache.ops.quant import read_fp4, read_fp8
from kvcache.pools.storage import Part

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
Stored = Sequence[torch.Tensor]  # the parts of one kind of row in one layer, each [N, H, ...]


class Codec(ABC):
    """Writes and reads rows `[n, H, W]` of one pool; two kinds of rows are written at once."""

    accepts: tuple[torch.dtype, ...]

    def __init__(self, config: TokenConfig) -> None:
        self.config = config

    def parts(self, name: str, heads: int, width: int) -> tuple[Part, ...]:
        """Returns what a slot holds for a row of this shape."""
        return (Part(name=name, row=(heads, width), dtype=store_dtype(self.config.dtype)),)

    @abstractmethod
    def write(
        self, layer: int, rows: Sequence[torch.Tensor], into: Sequence[Stored], loc: torch.Tensor
    ) -> None:
        """Two rows a token of one dtype into slots `loc`; checked before."""

    @abstractmethod
    def read(self, layer: int, nth: int, stored: Stored, loc: torch.Tensor) -> torch.Tensor:
        """The rows in slots `loc` as `config.row_dtype`; nth: which kind of row, for its scale."""

    def view(self, stored: Stored) -> torch.Tensor:
        """A whole layer as `[N, H, W]`."""
        return stored[0].view(self.config.dtype)

    def scales(self, layer: int) -> tuple[float, ...]:
        """Returns what values read from the layer are multiplied by, one number a kind of row."""
        return (1.0,) * len(self.config.rows)

    def device_scales(self, layer: int) -> torch.Tensor | None:
        """Returns the scales as fp32 `[2]` on the device, of keys and of values (one kind of row is
        both), always at one address; None where they are 1 for good.
        """
        return None

    def set_scales(self, layer: int, scales: Sequence[float]) -> None:
        raise ValueError(f"a pool of {self.config.dtype} has no layer scales; only fp8 pools do")


class PlainCodec(Codec):
    """Bit for bit."""

    def __init__(self, config: TokenConfig) -> None:
        super().__init__(config)
        self.accepts = (config.dtype,)

    def write(
        self, layer: int, rows: Sequence[torch.Tensor], into: Sequence[Stored], loc: torch.Tensor
    ) -> None:
        set_kv_buffer(rows[0], rows[1], into[0][0], into[1][0], loc)

    def read(self, layer: int, nth: int, stored: Stored, loc: torch.Tensor) -> torch.Tensor:
        return stored[0][loc]


class FP8Codec(Codec):
    """fp8 bytes, and a scale a layer and kind of row; rows that are fp8 already are as scaled.

    The scales are outside the pool's block: a pause keeps them, and kernels read them on the
    device, so that a captured graph sees new ones.
    """

    def __init__(self, config: TokenConfig) -> None:
        super().__init__(config)
        self.accepts = (config.dtype, *_FLOATS)
        kinds = len(config.rows)
        self._scales = [(1.0,) * kinds for _ in range(config.num_layers)]
        # always two: keys and values are read, and two kinds of rows written, at once
        self._device_scales, self._inverse = torch.ones(
            (2, config.num_layers, 2), device=config.device
        )

    def write(
        self, layer: int, rows: Sequence[torch.Tensor], into: Sequence[Stored], loc: torch.Tensor
    ) -> None:
        (k, v), (k_buffer, v_buffer) = rows, (stored[0] for stored in into)
        if k.dtype == self.config.dtype:
            set_kv_buffer(k, v, k_buffer, v_buffer, loc)
        else:
            set_kv_buffer_fp8(
                k, v, k_buffer, v_buffer, loc, self._inverse[layer], self.config.dtype
            )

    def read(self, layer: int, nth: int, stored: Stored, loc: torch.Tensor) -> torch.Tensor:
        config = self.config
        return read_fp8(
            stored[0], loc, self._device_scales[layer, nth], config.dtype, config.row_dtype
        )

    def scales(self, layer: int) -> tuple[float, ...]:
        return self._scales[layer]

    def device_scales(self, layer: int) -> torch.Tensor | None:
        return self._device_scales[layer]

    def set_scales(self, layer: int, scales: Sequence[float]) -> None:
        exact = torch.tensor([float(scale) for scale in scales])  # as fp32
        inverse = 1 / exact
        usable = ((exact > 0) & exact.isfinite() & inverse.isfinite()).all()
        if len(scales) != len(self.config.rows) or not usable:
            names = ", ".join(self.config.rows)
            raise ValueError(
                f"scales {tuple(scales)} of layer {layer} must be one finite number "
                f"> 0 for each of {names}"
            )
        self._scales[layer] = tuple(exact.tolist())
        for nth, at in enumerate((0, len(exact) - 1)):
            # an argument of a launch: nothing waits
            self._inverse[layer, nth].fill_(float(inverse[at]))
            self._device_scales[layer, nth].fill_(float(exact[at]))


class FP4Codec(Codec):
    """E2M1 codes, two a byte, and a scale byte for 16 elements (see `kvcache/ops/quant.py`)."""

    accepts = _FLOATS

    def parts(self, name: str, heads: int, width: int) -> tuple[Part, ...]:
        return (
            Part(name=name, row=(heads, width // 2), dtype=torch.uint8),
            Part(name=f"{name}_scale", row=(heads, width // FP4_BLOCK), dtype=torch.uint8),
        )

    def write(
        self, layer: int, rows: Sequence[torch.Tensor], into: Sequence[Stored], loc: torch.Tensor
    ) -> None:
        set_kv_buffer_fp4(rows[0], rows[1], into[0], into[1], loc)

    def read(self, layer: int, nth: int, stored: Stored, loc: torch.Tensor) -> torch.Tensor:
        return read_fp4(stored[0], stored[1], loc, self.config.row_dtype)

    def view(self, stored: Stored) -> torch.Tensor:
        raise ValueError(
            "FP4 rows can't be viewed; use get_rows(layer, loc), or get_stored(layer) for the bytes"
        )


def make_codec(config: TokenConfig) -> Codec:
    """The codec of the config's dtype."""
    if config.dtype == FP4_DTYPE:
        return FP4Codec(config)
    return FP8Codec(config) if config.dtype in FP8_DTYPES else PlainCodec(config)
