"""Keys, values and labels for double sparsity: attention picks its tokens by a few heavy channels
of the keys.
"""

from collections.abc import Sequence

import torch

from kvcache.config import KVCacheConfig, check_positive
from kvcache.ops.kv_write import set_rows
from kvcache.pools.base import check_loc
from kvcache.pools.mha import MHATokenToKVPool
from kvcache.pools.storage import Part
from memsaver import MemorySaver


class DoubleSparseTokenToKVPool(MHATokenToKVPool):
    """K and V, and in the same block labels `[L, size + ps, H, heavy_channel_num]` of
    `config.row_dtype`.
    """

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
        """Writes label `[n, H, heavy_channel_num]` of `config.row_dtype`, any strides, into slots
        loc int64 `[n]`.
        """
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
