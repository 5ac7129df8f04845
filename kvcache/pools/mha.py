"""Keys and values of multi-head (and grouped-query) attention."""

import torch

from kvcache.config import KVCacheConfig
from kvcache.ops.rotary import RotaryTables, rotate, rotate_and_store
from kvcache.pools.base import check_loc
from kvcache.pools.codec import PlainCodec
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
        """Writes k `[n, H, D]` and v `[n, H, Dv]`, of any strides, into slots loc int64 `[n]`; one
        launch on a GPU.

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
        """Keys `[size + ps, H, D]` and values `[size + ps, H, Dv]` of a layer, as views of the
        pool's memory.
        """
        self._check_layer(layer_id)
        return self._views[layer_id]

    def get_rows(self, layer_id: int, loc: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys `[n, H, D]` and values `[n, H, Dv]` as `config.row_dtype`."""
        self._check_layer(layer_id)
        check_loc("loc", loc, self.device)
        k, v = self._layers[layer_id]
        return self._codec.read(layer_id, 0, k, loc), self._codec.read(layer_id, 1, v, loc)


class MHATokenToKVPoolFP4(MHATokenToKVPool):
    """Rows as E2M1: `D / 2` bytes of codes and `D / 16` of block scales a head (`get_stored`); D a
    multiple of 16.
    """

    fp4 = True

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """ValueError: FP4 elements have no views."""
        self._check_layer(layer_id)
        k, v = self._layers[layer_id]
        return self._codec.view(k), self._codec.view(v)
