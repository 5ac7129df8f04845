"""Pools of attention layers: keys and values, both with labels (double sparsity), latent rows."""

from collections.abc import Sequence

import torch

from kvcache.config import FP4_BLOCK, KVCacheConfig, MLACacheConfig, check_positive
from kvcache.ops.kv_write import set_rows
from kvcache.ops.rotary import RotaryTables, rotate, rotate_and_store
from kvcache.pools.base import check_loc
from kvcache.pools.storage import Part, PlainCodec
from kvcache.pools.token import TokenPool
from memsaver import MemorySaver


class MHATokenToKVPool(TokenPool):
    """One storage block: keys `[L, size + ps, H, D]`, then values `[L, size + ps, H, Dv]`."""

    def __init__(
        self, config: KVCacheConfig, saver: MemorySaver | None = None, tag: str = "kv_cache"
    ) -> None:
        self.config = config
        super().__init__(config, saver, tag)
        view = self._codec.view
        self._views = [] if self.fp4 else [(view(k), view(v)) for k, v in self._layers]

    def set_kv_buffer(
        self, layer_id: int, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Writes k `[n, H, D]` and v `[n, H, Dv]` into slots loc int64 `[n]`; one launch on a GPU.

        Of the pool's dtype: bit-exact. Into fp8 and FP4 also from float32, float16 and bfloat16:
        divided by the layer's scale (fp8) or the block's (FP4), rounded and saturated as
        `kvcache/ops/quant.py` says, never NaN or infinite.
        """
        self._check_layer(layer_id)
        rows = self.config.rows
        self._check_rows(loc, k=(k, rows["k"]), v=(v, rows["v"]))
        self._codec.write(layer_id, (k, v), self._layers[layer_id], loc)

    def set_rotated_kv_buffer(
        self,
        layer_id: int,
        loc: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
        rotary: RotaryTables,
    ) -> torch.Tensor:
        """Writes k and v as `set_kv_buffer` does, the keys rotated on the way; returns q rotated.

        q `[n, Hq, D]`, k `[n, H, D]` and v `[n, H, Dv]` are of one floating dtype, their heads
        contiguous; they are never modified. loc and positions are contiguous int64 `[n]`, what is
        returned is contiguous `[n, Hq, D]`. One launch on a GPU where rows are stored as they are.
        """
        self._check_layer(layer_id)
        rows = self.config.rows
        queries = (q.shape[1] if q.ndim == 3 else 0, self.config.head_dim)
        self._check_rows(loc, k=(k, rows["k"]), v=(v, rows["v"]), q=(q, queries))
        check_loc("positions", positions, self.device)
        if positions.shape != loc.shape:
            raise ValueError(f"{len(positions)} positions for {len(loc)} slots; pair them")
        stored, tables = self._layers[layer_id], (rotary.cos, rotary.sin)
        if isinstance(self._codec, PlainCodec):
            (k_buffer,), (v_buffer,) = stored
            return rotate_and_store(q, k, v, positions, loc, *tables, k_buffer, v_buffer)
        q, k = rotate(q, k, positions, *tables)
        self._codec.write(layer_id, (k, v), stored, loc)
        return q

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys `[size + ps, H, D]` and values `[size + ps, H, Dv]`, views of the pool's memory."""
        self._check_layer(layer_id)
        return self._views[layer_id]

    def get_rows(self, layer_id: int, loc: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys `[n, H, D]` and values `[n, H, Dv]` as `config.row_dtype`."""
        self._check_layer(layer_id)
        check_loc("loc", loc, self.device)
        k, v = self._layers[layer_id]
        return self._codec.read(layer_id, 0, k, loc), self._codec.read(layer_id, 1, v, loc)


class MHATokenToKVPoolFP4(MHATokenToKVPool):
    """Rows as E2M1: `D / 2` bytes of codes, `D / 16` of scales a head; D a multiple of 16."""

    fp4 = True

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """ValueError: FP4 elements have no views."""
        self._check_layer(layer_id)
        k, v = self._layers[layer_id]
        return self._codec.view(k), self._codec.view(v)


class MLATokenToKVPool(TokenPool):
    """One storage block `[L, size + ps, 1, kv_lora_rank + qk_rope_head_dim]`, latent first.

    The whole row is the key, its first `kv_lora_rank` elements the value. fp8: a scale a layer.
    """

    def __init__(
        self, config: MLACacheConfig, saver: MemorySaver | None = None, tag: str = "kv_cache"
    ) -> None:
        self.config = config
        super().__init__(config, saver, tag)
        self._sides = [self._split(stored) for (stored,) in self._layers]

    def set_kv_buffer(
        self, layer_id: int, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None = None
    ) -> None:
        """Writes k `[n, 1, rank + rope]`; v, if given, is its first `rank` elements."""
        rank, width = self.config.kv_lora_rank, self.config.rows["kv"][1]
        self._check_layer(layer_id)
        self._check_rows(loc, k=(k, (1, width)), **({} if v is None else {"v": (v, (1, rank))}))
        self._write(layer_id, loc, k[..., :rank], k[..., rank:])

    def set_mla_kv_buffer(
        self, layer_id: int, loc: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor
    ) -> None:
        """Writes latent `[n, 1, rank]` and rope `[n, 1, rope]` side by side, without joining."""
        self._check_layer(layer_id)
        shapes = (1, self.config.kv_lora_rank), (1, self.config.qk_rope_head_dim)
        self._check_rows(loc, latent=(latent, shapes[0]), rope=(rope, shapes[1]))
        self._write(layer_id, loc, latent, rope)

    def _write(
        self, layer_id: int, loc: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor
    ) -> None:
        self._codec.write(layer_id, (latent, rope), self._sides[layer_id], loc)

    def _split(self, stored: tuple[torch.Tensor, ...]) -> tuple[tuple[torch.Tensor, ...], ...]:
        """The latent and the rotary side of each stored part."""
        rank = self.config.kv_lora_rank
        cuts = [rank] if len(stored) == 1 else [rank // 2, rank // FP4_BLOCK]
        sides = (part.tensor_split([cut], -1) for part, cut in zip(stored, cuts, strict=True))
        return tuple(zip(*sides, strict=True))

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys `[size + ps, 1, rank + rope]` and values, a view of their first `rank` elements."""
        self._check_layer(layer_id)
        k = self._codec.view(self._layers[layer_id][0])
        return k, k[..., : self.config.kv_lora_rank]

    def get_rows(self, layer_id: int, loc: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys `[n, 1, rank + rope]` as `config.row_dtype`; values: their first `rank` elements."""
        self._check_layer(layer_id)
        check_loc("loc", loc, self.device)
        k = self._codec.read(layer_id, 0, self._layers[layer_id][0], loc)
        return k, k[..., : self.config.kv_lora_rank]


class MLATokenToKVPoolFP4(MLATokenToKVPool):
    """Latent rows as E2M1, to be read by `get_rows`; rank, rank + rope: multiples of 16."""

    fp4 = True


class DoubleSparseTokenToKVPool(MHATokenToKVPool):
    """K and V, and labels `[L, size + ps, H, heavy_channel_num]` of `config.row_dtype`."""

    def __init__(
        self,
        config: KVCacheConfig,
        heavy_channel_num: int,
        saver: MemorySaver | None = None,
        tag: str = "kv_cache",
    ) -> None:
        check_positive("heavy_channel_num", heavy_channel_num)
        if heavy_channel_num > config.head_dim:
            raise ValueError(
                f"heavy_channel_num {heavy_channel_num} is more than the head's "
                f"{config.head_dim} channels"
            )
        self.heavy_channel_num = heavy_channel_num
        super().__init__(config, saver, tag)

    def _extra_parts(self) -> Sequence[Part]:
        shape = (self.config.num_kv_heads, self.heavy_channel_num)
        return (Part(name="label", row=shape, dtype=self.config.row_dtype),)

    def set_label_buffer(self, layer_id: int, loc: torch.Tensor, label: torch.Tensor) -> None:
        """Writes label `[n, H, heavy_channel_num]` of `config.row_dtype` into slots loc `[n]`."""
        buffer = self.get_label_buffer(layer_id)
        if label.dtype != buffer.dtype:
            raise ValueError(
                f"label is {label.dtype}, the pool stores {buffer.dtype} labels; convert it before"
            )
        check_loc("loc", loc, self.device)
        shape = (self.config.num_kv_heads, self.heavy_channel_num)
        self._check_shape("label", label, (len(loc), *shape))
        set_rows(label, buffer, loc)

    def get_label_buffer(self, layer_id: int) -> torch.Tensor:
        """Labels `[size + ps, H, heavy_channel_num]` of a layer, as a view of the pool's memory."""
        self._check_layer(layer_id)
        return self._storage.parts["label"][layer_id]
