"""Configurations of KV pools: shape, size and dtypes, validated before memory is allocated."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Literal

import torch

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
FP4_DTYPE = torch.float4_e2m1fn_x2
FP4_BLOCK = 16  # elements per block scale
FP4_MAX_EXPONENT = 125  # bounds a block scale's exponent, so that no value read is subnormal fp32
STORABLE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, *FP8_DTYPES, FP4_DTYPE)

KVCacheDtype = Literal["auto", "fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1"]
"""Names of the dtypes that a pool can store; "auto" is the model's dtype."""

_KV_DTYPES: dict[KVCacheDtype, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "fp4_e2m1": FP4_DTYPE,
}


def kv_dtype(name: KVCacheDtype, model_dtype: torch.dtype) -> torch.dtype:
    """Convert the name of a KV cache dtype to the torch dtype that a pool stores.

    Args:
        name: Name of the dtype; "auto" selects the model's dtype.
        model_dtype: Dtype of the model.

    Returns:
        The stored dtype.

    Raises:
        ValueError: The name is unknown.
    """
    if name == "auto":
        return model_dtype
    if name not in _KV_DTYPES:
        known = ", ".join(map(repr, _KV_DTYPES))
        raise ValueError(f"unknown kv_cache_dtype {name!r}; use 'auto' or one of {known}")
    return _KV_DTYPES[name]


def store_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a pool's tensors: uint8 for fp8 and FP4, which torch can't index."""
    return torch.uint8 if dtype in FP8_DTYPES or dtype == FP4_DTYPE else dtype


def row_bytes(dtype: torch.dtype, width: int) -> int:
    """Return the bytes of `width` elements, including one scale byte per block for FP4."""
    return width // 2 + width // FP4_BLOCK if dtype == FP4_DTYPE else width * dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class TokenConfig(ABC):
    """Shape, size and dtypes of a KV pool, as documented in `KVCacheConfig`.

    Subclasses define the rows of a token.
    """

    num_layers: int
    size: int  # fewer than 2**31, because request tables store slots as int32
    page_size: int = 16
    dtype: torch.dtype
    device: torch.device | str
    compute_dtype: torch.dtype | None = None  # fp8 and FP4 only: other rows are read as stored
    slot_major: bool = False  # otherwise all slots of a layer are adjacent

    @property
    @abstractmethod
    def rows(self) -> dict[str, tuple[int, int]]:
        """Return the rows of a token in each layer, name -> (heads, width)."""

    @property
    @abstractmethod
    def value_dim(self) -> int:
        """Return the elements of a value per head."""

    @property
    def row_dtype(self) -> torch.dtype:
        """Return the dtype in which rows are read."""
        as_stored = store_dtype(self.dtype) == self.dtype
        return self.dtype if as_stored else self.compute_dtype or torch.bfloat16

    @property
    def bytes_per_token(self) -> int:
        """Return the bytes of one token over all layers, including block scales."""
        return self.num_layers * sum(
            heads * row_bytes(self.dtype, width) for heads, width in self.rows.values()
        )

    def __post_init__(self) -> None:
        counts = [field.name for field in fields(self) if field.type in (int, int | None)]
        check_counts(self, *(name for name in counts if getattr(self, name) is not None))
        down = self.size // self.page_size * self.page_size
        rule = f"must be a multiple of page_size={self.page_size}; use {down + self.page_size}"
        check_option(self, "size", self.size == down, rule)
        rule = "does not fit int32 token ids; use fewer than 2**31 tokens"
        check_option(self, "size", self.size + self.page_size <= 2**31, rule)
        rule = f"can't be stored; use one of {', '.join(map(str, STORABLE_DTYPES))}"
        check_option(self, "dtype", self.dtype in STORABLE_DTYPES, rule)
        computable = (None, torch.float32, torch.float16, torch.bfloat16)
        rule = "must be float32, float16 or bfloat16"
        check_option(self, "compute_dtype", self.compute_dtype in computable, rule)
        widths = {name: width for name, (_, width) in self.rows.items()} | {"value": self.value_dim}
        if self.dtype == FP4_DTYPE and any(width % FP4_BLOCK for width in widths.values()):
            raise ValueError(
                f"FP4 needs widths of a multiple of {FP4_BLOCK} elements, got {widths}"
            )


@dataclass(frozen=True, kw_only=True)
class KVCacheConfig(TokenConfig):
    """Pool configuration for multi-head and grouped-query attention.

    The fields of `TokenConfig` come first; all fields are keyword-only.

    Attributes:
        num_layers: Attention layers that store tokens in the pool.
        size: Capacity in tokens, a multiple of `page_size`; the pool adds one padding page.
        page_size: Tokens per page.
        dtype: Stored dtype: float32, float16, bfloat16, fp8 (e4m3fn, e5m2) or FP4 (e2m1fn_x2).
        device: Device of the pool.
        compute_dtype: Dtype in which rows of fp8 or FP4 storage are read; None selects bfloat16.
        slot_major: Whether all layers of a slot are adjacent in memory, which lets the pool be
            resized.
        num_kv_heads: Key/value heads per layer.
        head_dim: Elements of a key per head.
        v_head_dim: Elements of a value per head; None means `head_dim`.

    Raises:
        ValueError: A count is not a positive integer, `size` is not a multiple of `page_size` or
            does not fit int32 slots, a dtype is not supported, or FP4 rows are not a multiple of 16
            elements wide.
    """

    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None

    @property
    def value_dim(self) -> int:
        """Return the elements of a value per head."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def rows(self) -> dict[str, tuple[int, int]]:
        """Return the rows of a token in each layer: "k" and "v" -> (heads, width)."""
        return {"k": (self.num_kv_heads, self.head_dim), "v": (self.num_kv_heads, self.value_dim)}


@dataclass(frozen=True, kw_only=True)
class MLACacheConfig(TokenConfig):
    """Pool configuration for multi-head latent attention (DeepSeek).

    A token has one row per layer, the latent followed by the rotary key. The fields `num_layers` to
    `slot_major` are those of `KVCacheConfig`.

    Attributes:
        kv_lora_rank: Elements of the latent, which is also the value.
        qk_rope_head_dim: Elements of the rotary key.

    Raises:
        ValueError: As for `KVCacheConfig`.
    """

    kv_lora_rank: int
    qk_rope_head_dim: int

    @property
    def value_dim(self) -> int:
        """Return the elements of a value, which is the latent."""
        return self.kv_lora_rank

    @property
    def rows(self) -> dict[str, tuple[int, int]]:
        """Return the row of a token in each layer: "kv" -> (1, width)."""
        return {"kv": (1, self.kv_lora_rank + self.qk_rope_head_dim)}


def check_option(options: object, name: str, good: bool, rule: str) -> None:
    """Raise ValueError with a field's name, its value and the rule it breaks, unless `good`."""
    if not good:
        raise ValueError(f"{name}={getattr(options, name)!r} {rule}")


def check_counts(options: object, *names: str, least: int = 1) -> None:
    """Raise ValueError for the first of the named fields that is not an integer >= `least`."""
    for name in names:
        value = getattr(options, name)
        whole = isinstance(value, Integral) and not isinstance(value, bool)
        check_option(options, name, whole, "must be whole")
        check_option(options, name, value >= least, f"must be at least {least}")
