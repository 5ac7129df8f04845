"""Shape, size and element type of a KV cache, checked once, before any memory is taken."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from numbers import Integral

import torch

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
FP4_DTYPE = torch.float4_e2m1fn_x2
FP4_BLOCK = 16  # elements that share one block scale
FP4_MAX_EXPONENT = 125  # of a block scale, either sign: what is read is zero or a normal fp32
STORABLE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, *FP8_DTYPES, FP4_DTYPE)

_KV_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "fp4_e2m1": FP4_DTYPE,
}


def kv_dtype(name: str, model_dtype: torch.dtype) -> torch.dtype:
    """Return the stored dtype that `kv_cache_dtype` names ("auto": the model's), or ValueError."""
    if name == "auto":
        return model_dtype
    if name not in _KV_DTYPES:
        known = ", ".join(map(repr, _KV_DTYPES))
        raise ValueError(f"unknown kv_cache_dtype {name!r}; use 'auto' or one of {known}")
    return _KV_DTYPES[name]


def store_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that elements are kept in: bytes for fp8 and fp4, which can't be indexed."""
    return torch.uint8 if dtype in FP8_DTYPES or dtype == FP4_DTYPE else dtype


def row_bytes(dtype: torch.dtype, width: int) -> int:
    """Return the bytes of `width` elements; FP4: two elements a byte, a scale byte a block."""
    return width // 2 + width // FP4_BLOCK if dtype == FP4_DTYPE else width * dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class TokenConfig(ABC):
    """A paged cache for `num_layers` attention layers; a subclass says what a token's rows are.

    size: tokens, a multiple of `page_size`; one padding page comes on top of it. Token ids are
        stored as int32 in the request table, hence its limit.
    compute_dtype: what rows are read in from fp8 or fp4 storage, None: bfloat16. Other dtypes are
    read as stored.
    slot_major: all layers of a slot lie together, so that the pool can be resized on a memsaver
        tag; otherwise all slots of a layer do.
    """

    num_layers: int
    size: int
    page_size: int = 16
    dtype: torch.dtype
    device: torch.device | str
    compute_dtype: torch.dtype | None = None
    slot_major: bool = False

    @property
    @abstractmethod
    def rows(self) -> dict[str, tuple[int, int]]:
        """Return what a token has in each layer: name -> (heads, width)."""

    @property
    @abstractmethod
    def value_dim(self) -> int:
        """Return the width of a value, a head."""

    @property
    def row_dtype(self) -> torch.dtype:
        """Return the dtype in which rows are read."""
        as_stored = store_dtype(self.dtype) == self.dtype
        return self.dtype if as_stored else self.compute_dtype or torch.bfloat16

    @property
    def bytes_per_token(self) -> int:
        """Return the bytes that one token takes over all layers, block scales included."""
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
    """Multi-head or grouped-query attention; `v_head_dim` None: values are as wide as keys."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def rows(self) -> dict[str, tuple[int, int]]:
        return {"k": (self.num_kv_heads, self.head_dim), "v": (self.num_kv_heads, self.value_dim)}


@dataclass(frozen=True, kw_only=True)
class MLACacheConfig(TokenConfig):
    """Multi-head latent attention: one latent row a token, its rotary key behind it."""

    kv_lora_rank: int
    qk_rope_head_dim: int

    @property
    def value_dim(self) -> int:
        return self.kv_lora_rank

    @property
    def rows(self) -> dict[str, tuple[int, int]]:
        return {"kv": (1, self.kv_lora_rank + self.qk_rope_head_dim)}


def check_option(options: object, name: str, good: bool, rule: str) -> None:
    """Raise a ValueError that names a field and its value, unless it is good."""
    if not good:
        raise ValueError(f"{name}={getattr(options, name)!r} {rule}")


def check_counts(options: object, *names: str, least: int = 1) -> None:
    """Raise ValueError for the first of these fields that is no whole number >= `least`."""
    for name in names:
        value = getattr(options, name)
        whole = isinstance(value, Integral) and not isinstance(value, bool)
        check_option(options, name, whole, "must be whole")
        check_option(options, name, value >= least, f"must be at least {least}")
