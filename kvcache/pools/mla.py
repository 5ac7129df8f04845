"""The latent rows of multi-head latent attention (DeepSeek-V2, V3)."""

import torch

from kvcache.config import FP4_BLOCK, MLACacheConfig
from kvcache.pools.base import check_loc
from kvcache.pools.token import TokenPool
from memsaver import MemorySaver


class MLATokenToKVPool(TokenPool):
    """One storage block `[L, size + ps, 1, kv_lora_rank + qk_rope_head_dim]`: latent, then rotary
    key.

    The whole row is the key, its first `kv_lora_rank` elements are the value. fp8: one scale a
    layer.
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
        """Writes k `[n, 1, rank + rope]`; v, if given, must be its first `rank` elements and is not
        written again.
        """
        rank, width = self.config.kv_lora_rank, self.config.rows["kv"][1]
        self._check_layer(layer_id)
        self._check_rows(loc, k=(k, (1, width)), **({} if v is None else {"v": (v, (1, rank))}))
        self._write(layer_id, loc, k[..., :rank], k[..., rank:])

    def set_mla_kv_buffer(
        self, layer_id: int, loc: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor
    ) -> None:
        """Writes latent `[n, 1, rank]` and rope `[n, 1, rope]` side by side, without joining them
        before.
        """
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
        """Keys `[n, 1, rank + rope]` as `config.row_dtype` and values, a view of their first `rank`
        elements.
        """
        self._check_layer(layer_id)
        check_loc("loc", loc, self.device)
        k = self._codec.read(layer_id, 0, self._layers[layer_id][0], loc)
        return k, k[..., : self.config.kv_lora_rank]


class MLATokenToKVPoolFP4(MLATokenToKVPool):
    """Latent rows as E2M1; rank and rank + rope are multiples of 16.

    `get_kv_buffer` raises, see `get_rows`.
    """

    fp4 = True
