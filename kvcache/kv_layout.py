"""Derive the KV cache layout of a model from its Hugging Face config.

Kinds of layers, heads and widths are those that transformers' model of the config has
(`observed_model.py`), so a key that the model ignores changes nothing. Supported are decoders with
full or sliding attention in every layer or alternating (such as Llama, Qwen2, Qwen3, Mistral and
Gemma-2), latent attention (DeepSeek-V2, V3), and gated delta nets (Qwen3-Next) or Mamba-2 (Bamba)
combined with full attention. Of a multimodal config, only `text_config` is read; embedding caches
and vision towers are out of scope.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from kvcache.config import KVCacheConfig, KVCacheDtype, MLACacheConfig, TokenConfig, kv_dtype
from kvcache.observed_model import ObservedAttention, observe
from kvcache.pools.mamba_pool import MambaConfig, MambaPool
from kvcache.pools.routed import HybridLinearKVPool, SWAKVPool
from kvcache.pools.token_pools import KVPool, MHATokenToKVPool, MLATokenToKVPool
from memsaver import MemorySaver

Kind = Literal["full", "sliding", "mla", "linear"]
PoolName = Literal["mha", "mla", "swa", "hybrid_linear"]


@dataclass(frozen=True, kw_only=True)
class KVLayout:
    """The rows and states that a model's layers keep per token and per request.

    Attributes:
        kinds: Kind of each layer: "full", "sliding", "mla" or "linear".
        pool: Kind of pool that stores the tokens. States of linear layers go to a `MambaPool`.
        dtype: Stored dtype.
        model_dtype: Dtype in which the model computes.
        rows: Rows of a token in a layer that stores tokens, name -> (heads, width).
        sliding_window: Keys that a query of a sliding layer sees; None without sliding layers.
        kv_lora_rank: Elements of the latent of latent attention; None for other models.
        conv_shapes: Shapes of a linear layer's convolution states, in the model's dtype; the last
            dimension is the kernel size less one. Empty without linear layers.
        temporal_shape: Shape of a linear layer's recurrent state, in float32; None without linear
            layers.
    """

    kinds: tuple[Kind, ...]
    pool: PoolName
    dtype: torch.dtype
    model_dtype: torch.dtype
    rows: dict[str, tuple[int, int]]
    sliding_window: int | None = None
    kv_lora_rank: int | None = None
    conv_shapes: tuple[tuple[int, ...], ...] = ()
    temporal_shape: tuple[int, ...] | None = None

    def layers(self, *kinds: Kind) -> tuple[int, ...]:
        """Return the indices of the layers of the given kinds.

        Args:
            *kinds: Kinds to select.

        Returns:
            Indices into `kinds`, ascending.
        """
        return tuple(i for i, kind in enumerate(self.kinds) if kind in kinds)

    @property
    def bytes_per_token(self) -> int:
        """Return the bytes of one token over all layers, while every window covers the token."""
        layers = len(self.kinds) - len(self.layers("linear"))
        sizes: dict[str, Any] = {"size": 1, "page_size": 1, "device": "cpu"}
        return self.token_config(num_layers=layers, **sizes).bytes_per_token if layers else 0

    @property
    def state_bytes(self) -> int:
        """Return the bytes of a request's states over all linear layers."""
        return self.mamba_config(size=1, device="cpu").bytes_per_slot if self.temporal_shape else 0

    @property
    def pages_tell_all(self) -> bool:
        """Return whether a sequence is fully described by its pages.

        False with sliding windows, which free pages, and with linear layers, which keep states.
        """
        return self.pool in ("mha", "mla") and self.sliding_window is None

    def token_config(self, *, num_layers: int, **fields: Any) -> TokenConfig:
        """Build the config of a pool for layers that store tokens.

        Args:
            num_layers: Layers in the pool.
            **fields: Further fields of `TokenConfig`: size, page_size, device, slot_major.

        Returns:
            An `MLACacheConfig` for latent attention, else a `KVCacheConfig`.
        """
        fields |= {"num_layers": num_layers, "dtype": self.dtype, "compute_dtype": self.model_dtype}
        if self.kv_lora_rank is not None:
            rope = self.rows["kv"][1] - self.kv_lora_rank
            return MLACacheConfig(kv_lora_rank=self.kv_lora_rank, qk_rope_head_dim=rope, **fields)
        (heads, dim), (_, value_dim) = self.rows["k"], self.rows["v"]
        return KVCacheConfig(num_kv_heads=heads, head_dim=dim, v_head_dim=value_dim, **fields)

    def mamba_config(self, *, size: int, device: torch.device | str) -> MambaConfig:
        """Build the config of the pool of linear layers' states.

        Args:
            size: Requests whose states the pool stores.
            device: Device of the pool.

        Returns:
            The config of a `MambaPool`.
        """
        assert self.temporal_shape is not None, "this model has no linear layers"
        return MambaConfig(
            num_layers=len(self.layers("linear")),
            size=size,
            conv_shapes=self.conv_shapes,
            temporal_shape=self.temporal_shape,
            conv_dtype=self.model_dtype,
            device=device,
        )

    def build(
        self,
        *,
        size: int,
        page_size: int,
        device: torch.device | str,
        window_size: int | None = None,
        saver: MemorySaver | None = None,
        tag: str = "kv_cache",
        slot_major: bool = False,
    ) -> KVPool:
        """Build the pool that stores the model's tokens.

        Args:
            size: Capacity in tokens, a multiple of `page_size`.
            page_size: Tokens per page.
            device: Device of the pool.
            window_size: Capacity in tokens of the pool for sliding layers; only for a "swa" layout.
            saver: Saver on whose tag the pool is allocated; None uses plain torch memory.
            tag: Tag of the pool.
            slot_major: Whether all layers of a slot are adjacent, so that the pool can be resized.

        Returns:
            The pool, of the class that `pool` names.

        Raises:
            ValueError: `window_size` is missing for a "swa" layout, a size is invalid, or the saver
                is on another device.
        """
        fields: dict[str, Any] = {"page_size": page_size, "device": device}
        fields |= {"size": size, "slot_major": slot_major}
        tokens = self.layers("full", "sliding", "mla")
        config: Any = self.token_config(
            num_layers=len(self.layers("full") if self.pool == "swa" else tokens), **fields
        )
        if self.pool == "mla":
            return MLATokenToKVPool(config, saver, tag)
        if self.pool == "mha":
            return MHATokenToKVPool(config, saver, tag)
        if self.pool == "hybrid_linear":
            return HybridLinearKVPool(config, tokens, saver, tag)
        if window_size is None:
            raise ValueError("full and sliding layers need window_size, tokens of the window pool")
        sliding = self.layers("sliding")
        window: Any = self.token_config(num_layers=len(sliding), **fields | {"size": window_size})
        return SWAKVPool(config, window, self.layers("full"), sliding, saver, tag)

    def build_states(
        self, *, size: int, device: torch.device | str, saver: MemorySaver | None = None
    ) -> MambaPool:
        """Build the pool of the linear layers' states.

        Args:
            size: Requests whose states the pool stores.
            device: Device of the pool.
            saver: Saver on whose tag the pool is allocated; None uses plain torch memory.

        Returns:
            The pool.
        """
        return MambaPool(self.mamba_config(size=size, device=device), saver)


def layout(
    config: Any, kv_cache_dtype: KVCacheDtype = "auto", dtype: torch.dtype | None = None
) -> KVLayout:
    """Derive the KV cache layout of a model from its Hugging Face config.

    Args:
        config: A Hugging Face model config.
        kv_cache_dtype: Stored dtype; "auto" selects the model's dtype.
        dtype: Dtype of the model. None selects the dtype of the config, or torch's default dtype if
            the config has none, as a model built from that config does.

    Returns:
        The layout.

    Raises:
        ValueError: A dtype is unknown or can't store the model's rows, transformers' model of the
            config cannot be observed, its layers differ in their rows or windows, the states of its
            linear layers are unknown, or no pool supports the combination of kinds.
    """
    config = getattr(config, "text_config", None) or config
    model_dtype = dtype or _dtype(config)
    layers = observe(config).layers
    kinds = tuple(map(_kind, layers))
    attention = [layer for layer in layers if layer is not None]
    latent = attention[0].latent
    result = KVLayout(
        kinds=kinds,
        pool=_pool(kinds),
        dtype=kv_dtype(kv_cache_dtype, model_dtype),
        model_dtype=model_dtype,
        rows=_same("rows", [_rows(layer) for layer in attention]),
        sliding_window=_same("windows", [layer.window for layer in attention if layer.window]),
        kv_lora_rank=latent and latent[0],
        **(_states(config) if "linear" in kinds else {}),
    )
    _ = result.bytes_per_token  # raises ValueError if the dtype can't store the rows
    return result


def _dtype(config: Any) -> torch.dtype:
    given = getattr(config, "dtype", None) or torch.get_default_dtype()
    dtype = getattr(torch, given, None) if isinstance(given, str) else given
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"the config's dtype {given!r} is not a torch dtype; pass dtype=")
    return dtype


def _kind(layer: ObservedAttention | None) -> Kind:
    if layer is None:
        return "linear"
    if layer.latent is not None:
        return "mla"
    return "full" if layer.window is None else "sliding"


def _rows(layer: ObservedAttention) -> dict[str, tuple[int, int]]:
    if layer.latent is not None:
        return {"kv": (1, sum(layer.latent))}
    return {"k": (layer.kv_heads, layer.key_width), "v": (layer.kv_heads, layer.value_width)}


def _same(what: str, values: Sequence[Any]) -> Any:
    """Return the value that all layers have; None if there is none."""
    if different := [value for value in values if value != values[0]]:
        raise ValueError(
            f"no pool supports layers of different {what}: {values[0]}, {different[0]}"
        )
    return values[0] if values else None


def _pool(kinds: Sequence[Kind]) -> PoolName:
    present = set(kinds)
    if present == {"mla"}:
        return "mla"
    if present in ({"full"}, {"sliding"}):
        # If all layers slide, one ledger frees the pages, and a second pool would save nothing.
        return "mha"
    if present == {"full", "sliding"}:
        return "swa"
    if present == {"full", "linear"}:
        return "hybrid_linear"
    raise ValueError(f"no pool supports a model with layers of the kinds {sorted(present)}")


def _states(config: Any) -> dict[str, Any]:
    """Return the state shapes of a gated delta net layer or a Mamba-2 layer (Bamba)."""
    if getattr(config, "linear_conv_kernel_dim", None):
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values = config.linear_num_value_heads * config.linear_value_head_dim
        conv = (2 * keys + values, config.linear_conv_kernel_dim - 1)
        heads, width = config.linear_num_value_heads, config.linear_value_head_dim
        temporal = (heads, config.linear_key_head_dim, width)
    elif getattr(config, "mamba_d_state", None):
        inner = config.mamba_expand * config.hidden_size
        conv = (inner + 2 * config.mamba_n_groups * config.mamba_d_state, config.mamba_d_conv - 1)
        temporal = (config.mamba_n_heads, inner // config.mamba_n_heads, config.mamba_d_state)
    else:
        raise ValueError(f"the states of the linear layers of {type(config).__name__} are unknown")
    return {"conv_shapes": (conv,), "temporal_shape": temporal}
