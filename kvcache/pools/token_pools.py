"""The interface of pools of keys and values, and the pools of attention layers: keys and values,
both with labels (double sparsity), latent rows.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvcache.config import FP4_BLOCK, FP4_DTYPE, KVCacheConfig, MLACacheConfig, TokenConfig
from kvcache.ops.kv_write import set_rows
from kvcache.ops.rotary import RotaryTables, rotate, rotate_and_store
from kvcache.pools.storage import PlainCodec, PoolPart, SlotStorage, make_codec
from memsaver import MemorySaver


class KVPool(ABC):
    """Device memory for keys and values by token id; page 0 takes the writes of padded tokens.

    A pool owns storage only, never the decision who uses a slot. While its memsaver tag is paused
    no method but the byte counts may be called: the memory is not mapped. After a resume contents
    are undefined but for page 0. Slots `loc` are int64 `[n]` on the pool's device; on a GPU they
    are not range-checked, that would synchronize. A wrong layer, dtype, shape or device raises
    ValueError that names it, before anything is written.
    """

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Return the bytes of the storage that is usable now, the padding page included."""

    @property
    @abstractmethod
    def bytes_per_token(self) -> int:
        """Return the bytes that one token takes over all layers."""

    @abstractmethod
    def set_kv_buffer(self, layer_id: int, loc: Tensor, k: Tensor, v: Tensor) -> None:
        """Write one token's key and value a row into the slots `loc`; never modify k and v."""

    @abstractmethod
    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        """Return views of a layer's keys and values, to read and write, valid as long as the pool.

        fp8: as stored, to be multiplied by the scales. ValueError for FP4, without views.
        """

    @abstractmethod
    def get_rows(self, layer_id: int, loc: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of the keys and values in slots `loc`, scales applied; reads these only."""

    @abstractmethod
    def scales(self, layer_id: int) -> tuple[float, ...]:
        """Return what stored values of the layer are multiplied by, a number a kind of row."""

    @abstractmethod
    def set_scales(self, layer_id: int, *scales: float) -> None:
        """Set the scales of an fp8 layer, a number a kind of row, as fp32; rows written before are
        not rescaled.
        """

    @abstractmethod
    def device_scales(self, layer_id: int) -> Tensor | None:
        """Return `scales` of keys and values, fp32 `[2]` on the device (one kind of row is both),
        always at one address, so that a captured graph sees new ones; None where they are 1 for
        good.
        """

    @abstractmethod
    def move_kv_cache(self, tgt_loc: Tensor, src_loc: Tensor) -> None:
        """Copy slots `src_loc` to `tgt_loc` in every layer, all read before any is written."""

    @abstractmethod
    def on_resume(self) -> None:
        """Zero page 0, as 0 x NaN spreads; to be called after every resume and graph capture."""


class TokenPool(KVPool):
    """Token rows `[L, size + ps, H, W]` for every kind of row of the config, in one storage block.

    The block is on the saver's `tag` (contents discarded by a pause unless the tag says otherwise),
    in plain torch memory without a saver. Slots other than page 0 start undefined. `size` is what
    is usable now: `config.size`, unless the pool was resized or its tag resumed with less.
    """

    def __init__(
        self, config: TokenConfig, saver: MemorySaver | None = None, tag: str = "kv_cache"
    ) -> None:
        self.config = config
        self.size = config.size
        self.page_size = config.page_size
        self.dtype = config.dtype
        self.fp4 = config.dtype == FP4_DTYPE  # then rows have no views
        self._rows = config.rows
        self._codec = make_codec(config)
        by_row = [self._codec.parts(name, *shape) for name, shape in self._rows.items()]
        self._storage = SlotStorage(
            [*itertools.chain.from_iterable(by_row), *self._extra_parts()],
            num_layers=config.num_layers,
            slots=config.size + config.page_size,
            device=config.device,
            saver=saver,
            tag=tag,
            slot_major=config.slot_major,
        )
        self.device = self._storage.block.device
        self._layers: list[list[tuple[Tensor, ...]]] = []
        for layer in range(config.num_layers):
            self._layers.append([self._stored(parts, layer) for parts in by_row])
        self.on_resume()

    def _stored(self, parts: Sequence[PoolPart], layer: int) -> tuple[Tensor, ...]:
        return tuple(self._storage.parts[part.name][layer] for part in parts)

    def _extra_parts(self) -> Sequence[PoolPart]:
        """Return parts beside the rows, for subclasses."""
        return ()

    @property
    def nbytes(self) -> int:
        return self._storage.nbytes

    @property
    def bytes_per_token(self) -> int:
        return self._storage.bytes_per_slot

    def scales(self, layer_id: int) -> tuple[float, ...]:
        self._layer(layer_id)
        return self._codec.scales(layer_id)

    def device_scales(self, layer_id: int) -> Tensor | None:
        self._layer(layer_id)
        return self._codec.device_scales(layer_id)

    def set_scales(self, layer_id: int, *scales: float) -> None:
        self._layer(layer_id)
        self._codec.set_scales(layer_id, scales)

    def move_kv_cache(self, tgt_loc: Tensor, src_loc: Tensor) -> None:
        check_loc("tgt_loc", tgt_loc, self.device)
        check_loc("src_loc", src_loc, self.device, len(tgt_loc))
        self._storage.move(tgt_loc, src_loc)

    @property
    def stored(self) -> Mapping[str, Tensor]:
        """Return all that a slot holds, `[L, N, *row]` a part: views of the memory, rows
        contiguous; elements, and with FP4 their block scales.
        """
        return self._storage.parts

    def format(self) -> tuple[object, ...]:
        """Return what two pools must have in common so that one can take the other's bytes."""
        config = self.config
        shapes = tuple((name, *part.shape[2:]) for name, part in self._storage.parts.items())
        scales = tuple(self._codec.scales(layer) for layer in range(config.num_layers))
        return (config.dtype, config.num_layers, shapes, scales)

    def on_resume(self) -> None:
        usable = max(0, self._storage.refresh() - self.page_size)
        self.size = usable // self.page_size * self.page_size
        self._storage.zero_first(self.page_size)

    def resize(self, tokens: int) -> int:
        """Give memory back, or take it again, past `tokens`; return `size`, usable now.

        For a `slot_major` pool that is the last allocation on its saver's tag. Addresses stay, so
        do contents of the slots that stay; slots that come are undefined, and slots that went must
        not be touched: their pages have to be out of the ledger before. ValueError past
        `config.size`; the saver's errors leave everything as it was.
        """
        if not 0 < tokens <= self.config.size:
            raise ValueError(f"can't resize to {tokens} tokens; use 1 to {self.config.size}")
        self._storage.resize(tokens + self.page_size)
        # on a GPU the saver rounds up to whole extents
        self.size = (self._storage.slots - self.page_size) // self.page_size * self.page_size
        return self.size

    def _layer(self, layer_id: int) -> list[tuple[Tensor, ...]]:
        """Return the stored parts of each kind of row of a layer."""
        if not 0 <= layer_id < len(self._layers):
            raise ValueError(
                f"layer {layer_id} is not in this pool; it holds layers 0..{len(self._layers) - 1}"
            )
        return self._layers[layer_id]

    def _check_rows(self, loc: Tensor, **rows: tuple[Tensor, tuple[int | None, int]]) -> None:
        """Raise ValueError unless all rows fit and have one dtype. rows: name -> (tensor, its heads
        and width).
        """
        check_loc("loc", loc, self.device)
        dtypes = self._codec.accepts
        for name, (row, shape) in rows.items():
            check_tensor(name, row, (len(loc), *shape), dtypes, self.device)
            dtypes = (row.dtype,)


class MHATokenToKVPool(TokenPool):
    """One storage block: keys `[L, size + ps, H, D]`, then values `[L, size + ps, H, Dv]`.

    FP4: `D / 2` bytes of codes and `D / 16` of scales a head instead, to be read by `get_rows`.
    """

    config: KVCacheConfig

    def set_kv_buffer(self, layer_id: int, loc: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k `[n, H, D]` and v `[n, H, Dv]` into slots loc int64 `[n]`; one launch on a GPU.

        Of the pool's dtype: bit-exact. Into fp8 and FP4 also from float32, float16 and bfloat16:
        divided by the layer's scale (fp8) or the block's (FP4), rounded and saturated as
        `kvcache/ops/quant.py` says, never NaN or infinite.
        """
        stored = self._layer(layer_id)
        self._check_rows(loc, k=(k, self._rows["k"]), v=(v, self._rows["v"]))
        self._codec.write(layer_id, (k, v), stored, loc)

    def set_rotated_kv_buffer(
        self,
        layer_id: int,
        loc: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        rotary: RotaryTables,
    ) -> Tensor:
        """Write k and v as `set_kv_buffer` does, the keys rotated on the way; return q rotated.

        q `[n, Hq, D]`, k `[n, H, D]` and v `[n, H, Dv]` are of one floating dtype, their heads
        contiguous; they are never modified. loc and positions are contiguous int64 `[n]`, what is
        returned is contiguous `[n, Hq, D]`. One launch on a GPU where rows are stored as they are.
        """
        stored, tables = self._layer(layer_id), (rotary.cos, rotary.sin)
        width = self._rows["k"][1]
        self._check_rows(loc, k=(k, self._rows["k"]), v=(v, self._rows["v"]), q=(q, (None, width)))
        check_loc("positions", positions, self.device, len(loc))
        if isinstance(self._codec, PlainCodec):
            (k_buffer,), (v_buffer,) = stored
            return rotate_and_store(q, k, v, positions, loc, *tables, k_buffer, v_buffer)
        q, k = rotate(q, k, positions, *tables)
        self._codec.write(layer_id, (k, v), stored, loc)
        return q

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        """Return keys `[size + ps, H, D]` and values `[size + ps, H, Dv]`, views of the memory."""
        k, v = self._layer(layer_id)
        return self._codec.view(k), self._codec.view(v)

    def get_rows(self, layer_id: int, loc: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys `[n, H, D]` and values `[n, H, Dv]` as `config.row_dtype`."""
        k, v = self._layer(layer_id)
        check_loc("loc", loc, self.device)
        return self._codec.read(layer_id, 0, k, loc), self._codec.read(layer_id, 1, v, loc)


class MLATokenToKVPool(TokenPool):
    """One storage block `[L, size + ps, 1, kv_lora_rank + qk_rope_head_dim]`, latent first.

    The whole row is the key, its first `kv_lora_rank` elements the value. fp8: a scale a layer.
    FP4: codes and block scales instead, to be read by `get_rows`.
    """

    config: MLACacheConfig

    def __init__(
        self, config: MLACacheConfig, saver: MemorySaver | None = None, tag: str = "kv_cache"
    ) -> None:
        super().__init__(config, saver, tag)
        self._sides = [self._split(stored) for (stored,) in self._layers]

    def set_kv_buffer(self, layer_id: int, loc: Tensor, k: Tensor, v: Tensor | None = None) -> None:
        """Write k `[n, 1, rank + rope]`; v, if given, is its first `rank` elements."""
        self._layer(layer_id)
        rank = self.config.kv_lora_rank
        value = {} if v is None else {"v": (v, (1, rank))}
        self._check_rows(loc, k=(k, self._rows["kv"]), **value)
        self._write(layer_id, loc, k[..., :rank], k[..., rank:])

    def set_mla_kv_buffer(self, layer_id: int, loc: Tensor, latent: Tensor, rope: Tensor) -> None:
        """Write latent `[n, 1, rank]` and rope `[n, 1, rope]` side by side, without joining."""
        self._layer(layer_id)
        shapes = (1, self.config.kv_lora_rank), (1, self.config.qk_rope_head_dim)
        self._check_rows(loc, latent=(latent, shapes[0]), rope=(rope, shapes[1]))
        self._write(layer_id, loc, latent, rope)

    def _write(self, layer_id: int, loc: Tensor, latent: Tensor, rope: Tensor) -> None:
        self._codec.write(layer_id, (latent, rope), self._sides[layer_id], loc)

    def _split(self, stored: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], ...]:
        """Return the latent and the rotary side of each stored part."""
        rank = self.config.kv_lora_rank
        cuts = [rank] if len(stored) == 1 else [rank // 2, rank // FP4_BLOCK]
        sides = (part.tensor_split([cut], -1) for part, cut in zip(stored, cuts, strict=True))
        return tuple(zip(*sides, strict=True))

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        """Return keys `[size + ps, 1, rank + rope]` and values, a view of their first `rank`
        elements.
        """
        k = self._codec.view(self._layer(layer_id)[0])
        return k, k[..., : self.config.kv_lora_rank]

    def get_rows(self, layer_id: int, loc: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys `[n, 1, rank + rope]` as `config.row_dtype`, and values: their first `rank`
        elements.
        """
        (stored,) = self._layer(layer_id)
        check_loc("loc", loc, self.device)
        k = self._codec.read(layer_id, 0, stored, loc)
        return k, k[..., : self.config.kv_lora_rank]


class DoubleSparseTokenToKVPool(MHATokenToKVPool):
    """K and V, and labels `[L, size + ps, H, heavy_channel_num]` of `config.row_dtype`."""

    def __init__(
        self,
        config: KVCacheConfig,
        heavy_channel_num: int,
        saver: MemorySaver | None = None,
        tag: str = "kv_cache",
    ) -> None:
        if not 1 <= heavy_channel_num <= config.head_dim:
            raise ValueError(f"heavy_channel_num={heavy_channel_num}; use 1 to {config.head_dim}")
        self.heavy_channel_num = heavy_channel_num
        super().__init__(config, saver, tag)

    def _extra_parts(self) -> Sequence[PoolPart]:
        shape = (self.config.num_kv_heads, self.heavy_channel_num)
        return (PoolPart(name="label", row=shape, dtype=self.config.row_dtype),)

    def set_label_buffer(self, layer_id: int, loc: Tensor, label: Tensor) -> None:
        """Write label `[n, H, heavy_channel_num]` of `config.row_dtype` into slots loc `[n]`."""
        buffer = self.get_label_buffer(layer_id)
        check_loc("loc", loc, self.device)
        check_tensor("label", label, (len(loc), *buffer.shape[1:]), (buffer.dtype,), self.device)
        set_rows(label, buffer, loc)

    def get_label_buffer(self, layer_id: int) -> Tensor:
        """Return labels `[size + ps, H, heavy_channel_num]` of a layer, a view of the memory."""
        self._layer(layer_id)
        return self._storage.parts["label"][layer_id]


def check_tensor(
    name: str,
    tensor: Tensor,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> None:
    """Raise ValueError unless a tensor has this shape (None: any length), device and dtype."""
    sizes = zip(shape, tensor.shape, strict=False)
    fits = tensor.ndim == len(shape) and all(want in (None, size) for want, size in sizes)
    if not fits or tensor.dtype not in dtypes or tensor.device != device:
        lengths = ", ".join("n" if length is None else str(length) for length in shape)
        raise ValueError(
            f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; the pool takes "
            f"{' or '.join(map(str, dtypes))} [{lengths}] on {device}"
        )


def check_loc(name: str, loc: Tensor, device: torch.device, count: int | None = None) -> None:
    """Raise ValueError unless `loc` is int64 `[count]` on `device`."""
    check_tensor(name, loc, (count,), (torch.int64,), device)
