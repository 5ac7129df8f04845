"""The parts of a model's KV cache, read from its Hugging Face config without transformers.

It knows dense and mixture-of-experts decoders with full or sliding attention in every layer or
alternating (Llama, Qwen2, Qwen3, Mistral, Gemma-2 and their like), latent attention (DeepSeek-V2,
V3), gated delta nets (Qwen3-Next) and Mamba-2 (Bamba) beside full attention. Multimodal
embedding caches and vision towers are out of scope; of a config with a `text_config`, that is read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from kvcache.config import KVCacheConfig, MLACacheConfig, TokenConfig, kv_dtype
from kvcache.pools.mamba import MambaConfig, MambaPool
from kvcache.pools.routed import HybridLinearKVPool, SWAKVPool
from kvcache.pools.token_pools import KVPool, MHATokenToKVPool, MLATokenToKVPool
from memsaver import MemorySaver

Kind = Literal["full", "sliding", "mla", "linear"]
PoolName = Literal["mha", "mla", "swa", "hybrid_linear"]

_KINDS: dict[str, Kind] = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "linear_attention": "linear",
    "mamba": "linear",
}


@dataclass(frozen=True, kw_only=True)
class KVLayout:
    """Rows and states that a model's layers keep.

    kinds: each layer's kind. pool: which pool holds the tokens; states of linear layers are in a
    `MambaPool` beside it.
    dtype: stored, model_dtype: computed with. rows: what a token has in a layer that keeps tokens,
    name -> (heads, width). conv_shapes, temporal_shape: states of a linear layer, None without one;
    the convolution's is kernel - 1 wide, and in the model's dtype, the recurrent one in float32.
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
        """Return the ids of the layers of these kinds."""
        return tuple(i for i, kind in enumerate(self.kinds) if kind in kinds)

    @property
    def bytes_per_token(self) -> int:
        """Return the bytes of one token over all layers, as long as it is in every window."""
        layers = len(self.kinds) - len(self.layers("linear"))
        sizes: dict[str, Any] = {"size": 1, "page_size": 1, "device": "cpu"}
        return self.token_config(num_layers=layers, **sizes).bytes_per_token if layers else 0

    @property
    def state_bytes(self) -> int:
        """Return the bytes of a request's states over all linear layers, 0 without any."""
        return self.mamba_config(size=1, device="cpu").bytes_per_slot if self.temporal_shape else 0

    @property
    def pages_tell_all(self) -> bool:
        """Return whether a sequence is made of its pages alone, all of them."""
        return self.pool in ("mha", "mla") and self.sliding_window is None

    def token_config(self, *, num_layers: int, **fields: Any) -> TokenConfig:
        """Return the config of a pool of layers that keep tokens. fields: size, device, ..."""
        fields |= {"num_layers": num_layers, "dtype": self.dtype, "compute_dtype": self.model_dtype}
        if self.kv_lora_rank is not None:
            rope = self.rows["kv"][1] - self.kv_lora_rank
            return MLACacheConfig(kv_lora_rank=self.kv_lora_rank, qk_rope_head_dim=rope, **fields)
        (heads, dim), (_, value_dim) = self.rows["k"], self.rows["v"]
        return KVCacheConfig(num_kv_heads=heads, head_dim=dim, v_head_dim=value_dim, **fields)

    def mamba_config(self, *, size: int, device: torch.device | str) -> MambaConfig:
        """Return the config of the pool of states for `size` requests."""
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
        """Return the pool for `size` tokens, `window_size` of a `swa` pool's window side."""
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
        """Return the pool of the linear layers' states, for `size` requests."""
        return MambaPool(self.mamba_config(size=size, device=device), saver)


def layout(config: Any, kv_cache_dtype: str = "auto", dtype: torch.dtype | None = None) -> KVLayout:
    """Return what the KV cache of the model with this Hugging Face config is made of.

    kv_cache_dtype: "auto" (the model's dtype), "fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2" or
    "fp4_e2m1". dtype: the model's, None: what the config says, torch's default dtype if it says
    nothing (as a model built from it has). Raises ValueError for an unknown dtype, an unknown
    kind of layer, or a mix of kinds that no pool holds.
    """
    config = getattr(config, "text_config", None) or config
    model_dtype = dtype or _dtype(config)
    kinds = _kinds(config)
    states = _states(config) if "linear" in kinds else {}
    window = getattr(config, "sliding_window", None) if "sliding" in kinds else None
    rank = getattr(config, "kv_lora_rank", None)
    result = KVLayout(
        kinds=kinds,
        pool=_pool(kinds),
        dtype=kv_dtype(kv_cache_dtype, model_dtype),
        model_dtype=model_dtype,
        rows={"kv": (1, rank + config.qk_rope_head_dim)} if rank else _mha_rows(config),
        sliding_window=window,
        kv_lora_rank=rank,
        **states,
    )
    _ = result.bytes_per_token  # a ValueError where the dtype can't hold the rows
    return result


def _dtype(config: Any) -> torch.dtype:
    given = getattr(config, "dtype", None) or torch.get_default_dtype()
    found = getattr(torch, given, None) if isinstance(given, str) else given
    if not isinstance(found, torch.dtype):
        raise ValueError(f"the config's dtype {given!r} is no torch dtype; pass dtype=")
    return found


def _kinds(config: Any) -> tuple[Kind, ...]:
    """Return each layer's kind: of the config's own list, else by its sliding window."""
    count = config.num_hidden_layers
    if getattr(config, "kv_lora_rank", None):
        return ("mla",) * count
    names = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if names is None:
        window = getattr(config, "sliding_window", None)
        slides = window and getattr(config, "use_sliding_window", True)
        return ("sliding" if slides else "full",) * count
    if unknown := sorted(set(names) - set(_KINDS)):
        known = ", ".join(_KINDS)
        raise ValueError(f"layers of kind {unknown} are not supported; supported: {known}")
    if len(names) != count:
        raise ValueError(f"the config names the kinds of {len(names)} layers and has {count}")
    return tuple(_KINDS[name] for name in names)


def _pool(kinds: Sequence[Kind]) -> PoolName:
    present = set(kinds)
    if present == {"mla"}:
        return "mla"
    if present in ({"full"}, {"sliding"}):
        # where all layers slide, one ledger can free pages by itself: a second pool would save
        # nothing
        return "mha"
    if present == {"full", "sliding"}:
        return "swa"
    if present == {"full", "linear"}:
        return "hybrid_linear"
    raise ValueError(f"no pool holds layers of the kinds {sorted(present)} together")


def _mha_rows(config: Any) -> dict[str, tuple[int, int]]:
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return {"k": (kv_heads, dim), "v": (kv_heads, getattr(config, "v_head_dim", None) or dim)}


def _states(config: Any) -> dict[str, Any]:
    """Return the shapes of a linear layer's states: a gated delta net's or Mamba-2's (Bamba)."""
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
        raise ValueError(f"linear layers of {type(config).__name__}: their states are not known")
    return {"conv_shapes": (conv,), "temporal_shape": temporal}
