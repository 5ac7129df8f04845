"""What every device pool of keys and values does."""

from abc import ABC, abstractmethod

import torch

# fp8 tensors lack indexing kernels on some devices: they are stored as bytes and viewed on reading.
_STORED_AS_BYTES = (torch.float8_e4m3fn, torch.float8_e5m2)


def store_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that elements of `dtype` are kept in."""
    return torch.uint8 if dtype in _STORED_AS_BYTES else dtype


class KVPool(ABC):
    """Device memory for keys and values, addressed by token id; page 0 takes the writes of padded tokens.

    A pool owns storage only, never the decision who uses a slot. While its memsaver tag is paused no method but the
    byte counts may be called: the memory is not mapped.
    """

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the storage block, the padding page included."""

    @property
    @abstractmethod
    def bytes_per_token(self) -> int:
        """Bytes that one token takes over all layers."""

    @abstractmethod
    def set_kv_buffer(self, layer_id: int, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Writes one token's key and value a row into the slots `loc` (int64 `[n]`, on the device)."""

    @abstractmethod
    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of a layer's keys and values, valid as long as the pool; writes through them reach the pool."""

    @abstractmethod
    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copies slots `src_loc` to `tgt_loc` in every layer, as if all were read before any is written."""

    @abstractmethod
    def on_resume(self) -> None:
        """To be called after every resume of the tag: zeroes page 0, because 0 x NaN spreads."""
