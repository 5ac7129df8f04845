"""The interface of KV pools, and the pools of attention layers.

There are pools for keys and values, for keys and values with labels (double sparsity), and for
latent rows (MLA).
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
    """Device memory for the keys and values of tokens, addressed by slot.

    A pool owns storage only; a `KVAllocator` decides which slots are in use. Page 0 receives the
    writes of padded tokens.

    While the pool's memsaver tag is paused, its memory is not mapped, and only the byte counts may
    be used. After a resume, the contents of all pages but page 0 are undefined unless the tag
    saves its content.

    Slots `loc` are int64 `[n]` on the pool's device. On a GPU they are not range-checked, because
    that would synchronize. Methods raise ValueError for a wrong layer, dtype, shape or device
    before they write anything.
    """

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Return the bytes of the usable slots, including the padding page."""

    @property
    @abstractmethod
    def bytes_per_token(self) -> int:
        """Return the bytes of one token over all layers."""

    @abstractmethod
    def set_kv_buffer(self, layer_id: int, loc: Tensor, k: Tensor, v: Tensor) -> None:
        """Write the keys and values of tokens to slots; k and v are never modified.

        Args:
            layer_id: Layer of the model.
            loc: Target slots, int64 `[n]`. If a slot is listed twice, it contains either of the
                rows afterwards.
            k: Keys `[n, heads, width]`.
            v: Values `[n, heads, width]`, of the same dtype.

        Raises:
            ValueError: The layer is not in this pool, or a tensor does not fit it.
        """

    @abstractmethod
    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        """Return writable views of a layer's keys and values, valid while the pool exists.

        Args:
            layer_id: Layer of the model.

        Returns:
            Keys and values `[slots, heads, width]` as stored. In an fp8 pool, they still have to be
            multiplied by the scales.

        Raises:
            ValueError: The layer is not in this pool, or the pool is FP4 and has no such views.
        """

    @abstractmethod
    def get_rows(self, layer_id: int, loc: Tensor) -> tuple[Tensor, Tensor]:
        """Copy the keys and values in the given slots, with scales applied.

        Args:
            layer_id: Layer of the model.
            loc: Slots to read, int64 `[n]`.

        Returns:
            Keys and values `[n, heads, width]`.

        Raises:
            ValueError: The layer is not in this pool, or `loc` does not fit it.
        """

    @abstractmethod
    def scales(self, layer_id: int) -> tuple[float, ...]:
        """Return the factors by which a read multiplies stored values.

        Args:
            layer_id: Layer of the model.

        Returns:
            One factor for each kind of row: of keys and values, or of latent rows.

        Raises:
            ValueError: The layer is not in this pool.
        """

    @abstractmethod
    def set_scales(self, layer_id: int, *scales: float) -> None:
        """Set the scales of a layer of an fp8 pool; rows written before are not rescaled.

        Args:
            layer_id: Layer of the model.
            *scales: One positive factor for each kind of row, rounded to fp32.

        Raises:
            ValueError: The layer is not in this pool, the pool is not fp8, or the scales are not a
                positive finite number for each kind of row.
        """

    @abstractmethod
    def device_scales(self, layer_id: int) -> Tensor | None:
        """Return the scales of a layer on the device, at an address that never changes.

        A captured CUDA graph that reads the tensor thus sees new scales.

        Args:
            layer_id: Layer of the model.

        Returns:
            The scales of keys and values, fp32 `[2]`, equal in a pool with one kind of row. None
            for a pool without scales.

        Raises:
            ValueError: The layer is not in this pool.
        """

    @abstractmethod
    def move_kv_cache(self, tgt_loc: Tensor, src_loc: Tensor) -> None:
        """Copy slots in every layer, reading all of them before writing any.

        Args:
            tgt_loc: Target slots, int64 `[n]`. If a slot is listed twice, it contains either of its
                rows afterwards.
            src_loc: Source slots, int64 `[n]`.

        Raises:
            ValueError: A tensor has another dtype, shape or device.
        """

    @abstractmethod
    def on_resume(self) -> None:
        """Zero the padding page. Call this method after every resume and graph capture.

        Attention weighs padded tokens with 0, but 0 times NaN is NaN. A `TokenPool` also updates
        its `size`, because a resume may have mapped less memory.
        """


class TokenPool(KVPool):
    """A pool with one storage block: rows `[L, size + ps, H, W]` for every kind of row.

    The block is on the saver's `tag`, or in plain torch memory without a saver. A pause discards
    the contents unless the tag saves its content. Slots outside page 0 are undefined at first.
    `size` is the number of usable tokens: `config.size`, unless the pool was resized or its tag was
    resumed with less memory.
    """

    def __init__(
        self, config: TokenConfig, saver: MemorySaver | None = None, tag: str = "kv_cache"
    ) -> None:
        self.config = config
        self.size = config.size
        self.page_size = config.page_size
        self.dtype = config.dtype
        self.fp4 = config.dtype == FP4_DTYPE  # FP4 rows have no views
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
        """Return the additional parts of a subclass."""
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
        """Return views of all stored parts, name -> `[L, N, *row]` with contiguous rows.

        An FP4 pool also has parts for the block scales.
        """
        return self._storage.parts

    def format(self) -> tuple[object, ...]:
        """Return a description of the stored bytes; pools with equal formats can exchange pages.

        Returns:
            Dtype, number of layers, shapes of the parts, and in an fp8 pool the scales.
        """
        config, layers = self.config, range(self.config.num_layers)
        shapes = tuple((name, *part.shape[2:]) for name, part in self._storage.parts.items())
        scales = map(self._codec.scales, layers if self._codec.scaled else ())
        return (config.dtype, config.num_layers, shapes, tuple(scales))

    def on_resume(self) -> None:
        usable = max(0, self._storage.refresh() - self.page_size)
        self.size = usable // self.page_size * self.page_size
        self._storage.zero_first(self.page_size)

    def resize(self, tokens: int) -> int:
        """Shrink or grow the memory of the pool to `tokens` tokens.

        The pool must be `slot_major` and the last allocation on its saver's tag. Addresses do not
        change, and slots that remain keep their contents. New slots are undefined. Slots past the
        new size must not be accessed, so remove their pages from the ledger first. If the saver
        raises, nothing has changed.

        Args:
            tokens: Tokens to keep memory for, 1 to `config.size`.

        Returns:
            `size`, the usable tokens; on a GPU the saver rounds up to whole extents.

        Raises:
            ValueError: `tokens` is out of range.
        """
        if not 0 < tokens <= self.config.size:
            raise ValueError(f"can't resize to {tokens} tokens; use 1 to {self.config.size}")
        self._storage.resize(tokens + self.page_size)
        self.size = (self._storage.slots - self.page_size) // self.page_size * self.page_size
        return self.size

    def _layer(self, layer_id: int) -> list[tuple[Tensor, ...]]:
        """Return the stored parts of a layer for each kind of row; raise ValueError if unknown."""
        if not 0 <= layer_id < len(self._layers):
            raise ValueError(
                f"layer {layer_id} is not in this pool; it holds layers 0..{len(self._layers) - 1}"
            )
        return self._layers[layer_id]

    def _check_rows(self, loc: Tensor, **rows: tuple[Tensor, tuple[int | None, int]]) -> None:
        """Raise ValueError unless all rows fit the pool and `loc` and have the same dtype.

        `rows` maps a name to the tensor and its required heads and width.
        """
        check_loc("loc", loc, self.device)
        dtypes = self._codec.accepts
        for name, (row, shape) in rows.items():
            check_tensor(name, row, (len(loc), *shape), dtypes, self.device)
            dtypes = (row.dtype,)


class MHATokenToKVPool(TokenPool):
    """Pool for multi-head and grouped-query attention.

    It stores keys `[L, size + ps, H, D]` and values `[L, size + ps, H, Dv]`. An FP4 pool stores
    `D / 2` bytes of codes and `D / 16` bytes of scales per head, to be read with `get_rows`.

    Args:
        config: Shape, size and dtypes.
        saver: Saver on whose tag the pool is allocated; None uses plain torch memory.
        tag: Tag of the pool.

    Raises:
        ValueError: The saver is on another device than `config.device`.
    """

    config: KVCacheConfig

    def set_kv_buffer(self, layer_id: int, loc: Tensor, k: Tensor, v: Tensor) -> None:
        """Write the keys and values of tokens to slots, in one launch on a GPU.

        Rows of the pool's dtype are stored bit-exact. An fp8 pool also accepts float32, float16 and
        bfloat16 rows, an FP4 pool only these. They are divided by the layer's scale (fp8) or the
        block's scale (FP4), rounded and saturated, so none is stored as NaN or infinite.

        Args:
            layer_id: Layer of the pool.
            loc: Target slots, int64 `[n]`.
            k: Keys `[n, H, D]`.
            v: Values `[n, H, Dv]`.

        Raises:
            ValueError: The layer is not in this pool, or a tensor does not fit it.
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
        """Rotate queries and keys, and write the rotated keys and the values to slots.

        On a GPU, this is one launch if the pool stores rows unchanged. The inputs are never
        modified.

        Args:
            layer_id: Layer of the pool.
            loc: Target slots, contiguous int64 `[n]`.
            q: Queries `[n, Hq, D]` with contiguous heads; q, k and v have one dtype.
            k: Keys `[n, H, D]` with contiguous heads.
            v: Values `[n, H, Dv]` with contiguous heads.
            positions: Contiguous int64 `[n]`.
            rotary: Tables of the rotary embedding.

        Returns:
            The rotated queries, contiguous `[n, Hq, D]`.

        Raises:
            ValueError: The layer is not in this pool, or a tensor does not fit it.
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
        """Return views of a layer's keys `[size + ps, H, D]` and values `[size + ps, H, Dv]`.

        Args:
            layer_id: Layer of the pool.

        Returns:
            Keys and values as stored, writable.

        Raises:
            ValueError: The layer is not in this pool, or the pool is FP4 and has no such views.
        """
        k, v = self._layer(layer_id)
        return self._codec.view(k), self._codec.view(v)

    def get_rows(self, layer_id: int, loc: Tensor) -> tuple[Tensor, Tensor]:
        """Copy keys `[n, H, D]` and values `[n, H, Dv]` of slots, as `config.row_dtype`.

        Args:
            layer_id: Layer of the pool.
            loc: Slots to read, int64 `[n]`.

        Returns:
            Keys and values, with scales applied.

        Raises:
            ValueError: The layer is not in this pool, or `loc` does not fit it.
        """
        k, v = self._layer(layer_id)
        check_loc("loc", loc, self.device)
        return self._codec.read(layer_id, 0, k, loc), self._codec.read(layer_id, 1, v, loc)


class MLATokenToKVPool(TokenPool):
    """Pool for multi-head latent attention, `[L, size + ps, 1, kv_lora_rank + qk_rope_head_dim]`.

    A row is the key; its first `kv_lora_rank` elements, the latent, are the value. An fp8 pool has
    one scale per layer. An FP4 pool stores codes and block scales, to be read with `get_rows`.

    Args:
        config: Shape, size and dtypes.
        saver: Saver on whose tag the pool is allocated; None uses plain torch memory.
        tag: Tag of the pool.

    Raises:
        ValueError: The saver is on another device than `config.device`.
    """

    config: MLACacheConfig

    def __init__(
        self, config: MLACacheConfig, saver: MemorySaver | None = None, tag: str = "kv_cache"
    ) -> None:
        super().__init__(config, saver, tag)
        self._sides = [self._split(stored) for (stored,) in self._layers]

    def set_kv_buffer(self, layer_id: int, loc: Tensor, k: Tensor, v: Tensor | None = None) -> None:
        """Write rows of tokens to slots.

        Args:
            layer_id: Layer of the pool.
            loc: Target slots, int64 `[n]`.
            k: Rows `[n, 1, rank + rope]`.
            v: Ignored, because the value is a part of the row; if given, `[n, 1, rank]`.

        Raises:
            ValueError: The layer is not in this pool, or a tensor does not fit it.
        """
        self._layer(layer_id)
        rank = self.config.kv_lora_rank
        value = {} if v is None else {"v": (v, (1, rank))}
        self._check_rows(loc, k=(k, self._rows["kv"]), **value)
        self._write(layer_id, loc, k[..., :rank], k[..., rank:])

    def set_mla_kv_buffer(self, layer_id: int, loc: Tensor, latent: Tensor, rope: Tensor) -> None:
        """Write rows given as latent and rotary key, without concatenating them first.

        Args:
            layer_id: Layer of the pool.
            loc: Target slots, int64 `[n]`.
            latent: Latents `[n, 1, rank]`.
            rope: Rotary keys `[n, 1, rope]`.

        Raises:
            ValueError: The layer is not in this pool, or a tensor does not fit it.
        """
        self._layer(layer_id)
        shapes = (1, self.config.kv_lora_rank), (1, self.config.qk_rope_head_dim)
        self._check_rows(loc, latent=(latent, shapes[0]), rope=(rope, shapes[1]))
        self._write(layer_id, loc, latent, rope)

    def _write(self, layer_id: int, loc: Tensor, latent: Tensor, rope: Tensor) -> None:
        self._codec.write(layer_id, (latent, rope), self._sides[layer_id], loc)

    def _split(self, stored: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], ...]:
        """Split each stored part into its latent and its rotary side."""
        rank = self.config.kv_lora_rank
        cuts = [rank] if len(stored) == 1 else [rank // 2, rank // FP4_BLOCK]
        sides = (part.tensor_split([cut], -1) for part, cut in zip(stored, cuts, strict=True))
        return tuple(zip(*sides, strict=True))

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        """Return views of a layer's keys `[size + ps, 1, rank + rope]` and values `[..., :rank]`.

        Args:
            layer_id: Layer of the pool.

        Returns:
            Keys and values as stored; the values are a view of the keys.

        Raises:
            ValueError: The layer is not in this pool, or the pool is FP4 and has no such views.
        """
        k = self._codec.view(self._layer(layer_id)[0])
        return k, k[..., : self.config.kv_lora_rank]

    def get_rows(self, layer_id: int, loc: Tensor) -> tuple[Tensor, Tensor]:
        """Copy keys `[n, 1, rank + rope]` and values `[..., :rank]`, as `config.row_dtype`.

        Args:
            layer_id: Layer of the pool.
            loc: Slots to read, int64 `[n]`.

        Returns:
            Keys and values with scales applied; the values are a view of the keys.

        Raises:
            ValueError: The layer is not in this pool, or `loc` does not fit it.
        """
        (stored,) = self._layer(layer_id)
        check_loc("loc", loc, self.device)
        k = self._codec.read(layer_id, 0, stored, loc)
        return k, k[..., : self.config.kv_lora_rank]


class DoubleSparseTokenToKVPool(MHATokenToKVPool):
    """Pool for double sparsity: keys, values and labels `[L, size + ps, H, heavy_channel_num]`.

    Labels are of `config.row_dtype`. `heavy_channel_num` is 1 to `config.head_dim`.

    Raises:
        ValueError: `heavy_channel_num` is out of range, the saver is on another device, or the
            bytes of a `slot_major` slot are not a multiple of a label's element.
    """

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
        """Write labels `[n, H, heavy_channel_num]` of `config.row_dtype` to slots, int64 `[n]`.

        Raises:
            ValueError: The layer is not in this pool, or a tensor does not fit it.
        """
        buffer = self.get_label_buffer(layer_id)
        check_loc("loc", loc, self.device)
        check_tensor("label", label, (len(loc), *buffer.shape[1:]), (buffer.dtype,), self.device)
        set_rows(label, buffer, loc)

    def get_label_buffer(self, layer_id: int) -> Tensor:
        """Return a view of a layer's labels, `[size + ps, H, heavy_channel_num]`.

        Raises:
            ValueError: The layer is not in this pool.
        """
        self._layer(layer_id)
        return self._storage.parts["label"][layer_id]


def check_tensor(
    name: str,
    tensor: Tensor,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> None:
    """Raise ValueError unless a tensor has this shape, dtype and device; None matches any size."""
    sizes = zip(shape, tensor.shape, strict=False)
    fits = tensor.ndim == len(shape) and all(want in (None, size) for want, size in sizes)
    if not fits or tensor.dtype not in dtypes or tensor.device != device:
        lengths = ", ".join("n" if length is None else str(length) for length in shape)
        raise ValueError(
            f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; "
            f"the pool takes only {' or '.join(map(str, dtypes))} [{lengths}] on {device}"
        )


def check_loc(name: str, loc: Tensor, device: torch.device, count: int | None = None) -> None:
    """Raise ValueError unless `loc` is int64 `[count]` on `device`."""
    check_tensor(name, loc, (count,), (torch.int64,), device)
