"""What the decoder needs to know of a model, independent of where it was read from."""

from dataclasses import dataclass

ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding. factor: linear and llama3; the last three: llama3 only."""

    theta: float
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(f"rope_type={self.rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A dense decoder: RMSNorm, rotary GQA attention, SwiGLU.

    qkv_bias, o_bias: attention biases. qk_norm: RMSNorm of every query and key head (Qwen3).
    stop_token_ids: tokens that end an answer.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    stop_token_ids: frozenset[int]

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads={self.num_heads} is not a multiple of num_key_value_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even for rotary embeddings")
