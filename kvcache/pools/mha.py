"""Keys and values of multi-head (and grouped-query) attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvcache.config import KVCacheConfig
from kvcache.ops.kv_write import set_kv_buffer
from kvcache.pools.base import KVPool, store_dtype

if TYPE_CHECKING:
    from memsaver import MemorySaver


class MHATokenToKVPool(KVPool):
    """One storage block: keys `[L, size + ps, H, D]`, then values `[L, size + ps, H, Dv]`.

    The block is on the saver's `tag` (contents discarded by a pause unless the tag says otherwise), in plain torch
    memory without a saver. Slots other than page 0 start undefined.
    """

    def __init__(self, config: KVCacheConfig, saver: MemorySaver | None = None, tag: str = "kv_cache") -> None:
        self.config = config
        self.size = config.size
        self.page_size = config.page_size
        self.dtype = config.dtype
        slots = config.size + config.page_size
        k_shape = (config.num_layers, slots, config.num_kv_heads, config.head_dim)
        v_shape = (config.num_layers, slots, config.num_kv_heads, config.value_dim)
        elements = config.nbytes // config.dtype.itemsize
        if saver is None:
            self._block = torch.empty(elements, dtype=store_dtype(config.dtype), device=config.device)
        else:
            _check_same_device(torch.device(config.device), saver.device)
            self._block = saver.empty((elements,), store_dtype(config.dtype), tag=tag)
        self.device = self._block.device
        k_elements = k_shape[0] * k_shape[1] * k_shape[2] * k_shape[3]
        self._k = self._block[:k_elements].view(k_shape)
        self._v = self._block[k_elements:].view(v_shape)
        self._views = [(k.view(config.dtype), v.view(config.dtype)) for k, v in zip(self._k, self._v, strict=True)]
        self.on_resume()

    @property
    def nbytes(self) -> int:
        return self._block.numel() * self._block.element_size()

    @property
    def bytes_per_token(self) -> int:
        return self.config.bytes_per_token

    def set_kv_buffer(self, layer_id: int, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Writes k `[n, H, D]` and v `[n, H, Dv]`, of the pool's dtype and any strides, into slots loc int64 `[n]`.

        Bit-exact; ValueError for a wrong layer, dtype, shape or device. Slots are not range-checked on a GPU.
        """
        k_buffer, v_buffer = self.get_kv_buffer(layer_id)
        if loc.dtype != torch.int64 or loc.ndim != 1:
            raise ValueError(f"loc must be int64 [n], got {loc.dtype} of shape {tuple(loc.shape)}")
        self._check_rows("k", k, loc, k_buffer)
        self._check_rows("v", v, loc, v_buffer)
        set_kv_buffer(k, v, k_buffer, v_buffer, loc)

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys `[size + ps, H, D]` and values `[size + ps, H, Dv]` of a layer, as views of the pool's memory."""
        if not 0 <= layer_id < len(self._views):
            raise ValueError(f"layer {layer_id} is not in this pool; it holds layers 0..{len(self._views) - 1}")
        return self._views[layer_id]

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        if tgt_loc.shape != src_loc.shape:
            raise ValueError(f"{tuple(tgt_loc.shape)} target slots for {tuple(src_loc.shape)} source slots; pair them")
        # indexing on the right makes a copy, so overlapping slots are safe
        self._k[:, tgt_loc] = self._k[:, src_loc]
        self._v[:, tgt_loc] = self._v[:, src_loc]

    def on_resume(self) -> None:
        self._k[:, : self.page_size].zero_()
        self._v[:, : self.page_size].zero_()

    def _check_rows(self, name: str, rows: torch.Tensor, loc: torch.Tensor, buffer: torch.Tensor) -> None:
        if rows.dtype != self.dtype:
            raise ValueError(f"{name} is {rows.dtype}, the pool stores {self.dtype}; convert {name} before writing it")
        if rows.shape != (loc.shape[0], *buffer.shape[1:]):
            raise ValueError(
                f"{name} has shape {tuple(rows.shape)}, needed {(loc.shape[0], *buffer.shape[1:])}: "
                f"[tokens, KV heads, head dim]"
            )
        if rows.device != buffer.device or loc.device != buffer.device:
            raise ValueError(f"{name} on {rows.device} and loc on {loc.device} must be on the pool's {buffer.device}")


def _check_same_device(wanted: torch.device, has: torch.device) -> None:
    if wanted.type != has.type or (wanted.index is not None and has.index is not None and wanted.index != has.index):
        raise ValueError(f"the config asks for {wanted}, the saver is on {has}; use one device for both")
