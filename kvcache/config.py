"""Shape and size of a KV cache, checked once, before any memory is taken."""

from dataclasses import dataclass

import torch

STORABLE_DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


@dataclass(frozen=True, kw_only=True)
class KVCacheConfig:
    """A paged key/value cache of `size` tokens for `num_layers` attention layers.

    `size` is in tokens and a multiple of `page_size`; one padding page comes on top of it. `v_head_dim` None means
    that values are as wide as keys. Token ids are stored as int32 in the request table, hence the limit on `size`.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    size: int
    page_size: int = 16
    dtype: torch.dtype
    device: torch.device | str

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "size", "page_size"):
            _positive(name, getattr(self, name))
        if self.v_head_dim is not None:
            _positive("v_head_dim", self.v_head_dim)
        if self.size % self.page_size:
            raise ValueError(
                f"KVCacheConfig.size is {self.size} tokens, not a multiple of page_size {self.page_size}; "
                f"use {self.size // self.page_size * self.page_size} or "
                f"{(self.size // self.page_size + 1) * self.page_size}"
            )
        if self.size + self.page_size > 2**31:
            raise ValueError(
                f"KVCacheConfig.size {self.size} does not fit int32 token ids; use fewer than 2**31 tokens"
            )
        if self.dtype not in STORABLE_DTYPES:
            names = ", ".join(str(d) for d in STORABLE_DTYPES)
            raise ValueError(f"KVCacheConfig.dtype {self.dtype} can't be stored; use one of {names}")
        try:
            torch.device(self.device)
        except RuntimeError as error:
            raise ValueError(f"KVCacheConfig.device {self.device!r} is no device; use 'cpu' or 'cuda:0'") from error

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def bytes_per_token(self) -> int:
        """Key and value bytes that one token takes over all layers."""
        return self.num_layers * self.num_kv_heads * (self.head_dim + self.value_dim) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool, the padding page included."""
        return (self.size + self.page_size) * self.bytes_per_token


def _positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"KVCacheConfig.{name} must be a whole number >= 1, got {value!r}")
