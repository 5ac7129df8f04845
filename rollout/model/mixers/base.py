"""Interface of token mixers, and rotary embeddings: their configuration and tables.

Each kind of mixer has a file with two classes: the configuration and the computation.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from kvcache import KVLayout, KVPool, ReqToTokenPool
from kvcache.ops import RotaryTables
from kvcache.tiers import HostTransfer
from rollout.config import DoubleSparsity
from rollout.ops.torch_attention import BatchShape, TorchPlan
from rollout.ops.triton_attention import TritonPlan
from rollout.weights.params import ParamGroup, Splits

if TYPE_CHECKING:
    from rollout.parallel import TensorParallel
    from rollout.weights.store import WeightStore

AttentionPlan = TorchPlan | TritonPlan
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The packed tokens of a forward pass: T tokens of B requests."""

    positions: Tensor  # of each token in its request, int64 [T]
    slots: Tensor  # of each token in the KV pool, int64 [T]
    rows: Tensor  # of each request in the request table, int64 [B], on the device
    plan: AttentionPlan
    shape: BatchShape | None = None  # None in a decode step that a CUDA graph captures
    # The same batch with slots and plan of sliding-window layers; None if all layers use the same.
    sliding: Batch | None = None
    loads: Sequence[HostTransfer] = ()  # a layer waits for them before it reads cached rows


Mixer = Callable[[Tensor, Batch], Tensor]
"""Map (x [T, hidden], batch) to [T, hidden], and store keys and values or states in the cache."""


class MixerConfig(ABC):
    """Base class of mixer configurations, which have no weights yet."""

    capturable = True  # whether a CUDA graph can capture a decode step
    plain = False  # whether this is grouped-query attention without an output gate

    @abstractmethod
    def groups(self, hidden_size: int, layer: str) -> list[ParamGroup]:
        """Return the parameters in memory order; `layer` is a prefix such as "model.layers.3."."""

    @abstractmethod
    def splits(self) -> Splits:
        """Return how tensor-parallel ranks share the parameters, which is by heads."""

    @abstractmethod
    def of_rank(self, size: int) -> Self:
        """Return the mixer with the heads of one of `size` ranks."""

    @abstractmethod
    def build(self, index: int, parts: LayerParts) -> Mixer:
        """Build the mixer of layer `index` over views of the weight store."""


@dataclass(frozen=True, kw_only=True)
class LayerParts:
    """The parts of an engine from which it builds mixers and MLPs."""

    store: WeightStore
    layout: KVLayout
    pool: KVPool
    table: ReqToTokenPool  # has the states of linear layers
    sparsity: DoubleSparsity | None  # None for full attention in decode
    ranks: TensorParallel
    norm_eps: float  # `ModelConfig.rms_norm_eps`
    zero_centred_norms: bool
    _tables: dict[tuple[RopeConfig, int], RotaryTables] = field(default_factory=dict)

    def rotary(self, rope: RopeConfig, dim: int) -> RotaryTables:
        """Return tables for heads with `dim` rotated elements; layers share the tables."""
        if (rope, dim) not in self._tables:
            longest, device = self.table.max_context_len, self.table.device
            self._tables[rope, dim] = rotary_tables(rope, dim, longest, device)
        return self._tables[rope, dim]


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding.

    Fields are named after the keys of `rope_parameters` in Hugging Face configs; `theta` is its
    `rope_theta`.
    """

    theta: float  # base of the wavelengths
    rope_type: str = "default"  # one of `ROPE_TYPES`
    factor: float = 1.0  # factor that stretches wavelengths; all types but default
    # llama3 only: wavelengths above the original context divided by `low_freq_factor` are stretched
    # by `factor`; wavelengths below the original context divided by `high_freq_factor` are kept.
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192  # context before stretching; llama3 and yarn
    # yarn only: wavelengths with more than `beta_fast` rotations in the original context are kept;
    # wavelengths with fewer than `beta_slow` rotations are stretched by `factor`.
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0  # yarn only: scale of the tables, with `mscale_all_dim`
    # If not 0, latent attention scales its scores by it (all types but default).
    mscale_all_dim: float = 0.0
    # yarn only: factor of rotated queries and of rotated keys; None derives it from `mscale`, or as
    # in the YaRN paper.
    attention_factor: float | None = None
    truncate: bool = True  # yarn only: round the borders of the ramp to whole dimensions

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(
                f"rope_type={self.rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
            )

    @property
    def table_scale(self) -> float:
        """Return the factor of cosines and sines."""
        if self.rope_type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)
        return self._mscale(1.0)

    @property
    def score_scale(self) -> float:
        """Return the factor of latent attention's scores, in addition to 1 / sqrt(width)."""
        if self.rope_type == "default" or not self.mscale_all_dim:
            return 1.0
        return self._mscale(self.mscale_all_dim) ** 2

    def _mscale(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0


def inverse_frequencies(rope: RopeConfig, dim: int) -> Tensor:
    """Return fp32 [dim / 2] on the CPU, computed in transformers' order of operations."""
    wavelengths = rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    inv_freq = 1.0 / wavelengths
    if rope.rope_type == "linear":
        return inv_freq / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(inv_freq, rope)
    if rope.rope_type == "yarn":
        return _yarn(wavelengths, rope, dim)
    return inv_freq


def _llama3(inv_freq: Tensor, rope: RopeConfig) -> Tensor:
    """Stretch long wavelengths by `factor`, keep short ones, interpolate in between (Llama 3.1)."""
    context = rope.original_max_position_embeddings
    low_wavelen, high_wavelen = context / rope.low_freq_factor, context / rope.high_freq_factor
    wavelen = 2 * math.pi / inv_freq
    scaled = torch.where(wavelen > low_wavelen, inv_freq / rope.factor, inv_freq)
    span = rope.high_freq_factor - rope.low_freq_factor
    smooth = (context / wavelen - rope.low_freq_factor) / span
    smoothed = (1 - smooth) * scaled / rope.factor + smooth * scaled
    medium = ~(wavelen < high_wavelen) & ~(wavelen > low_wavelen)
    return torch.where(medium, smoothed, scaled)


def _yarn(wavelengths: Tensor, rope: RopeConfig, dim: int) -> Tensor:
    """Stretch low frequencies by `factor`, keep high ones, and blend in between (YaRN).

    High frequencies rotate more than `beta_fast` times in the original context, low frequencies
    less than `beta_slow` times.
    """

    def rotations_at(count: float) -> float:
        turns = rope.original_max_position_embeddings / (count * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = rotations_at(rope.beta_fast), rotations_at(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    span = high - low or 0.001
    kept = 1 - torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / span, 0, 1)
    return 1.0 / (rope.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def rotary_tables(rope: RopeConfig, dim: int, positions: int, device: torch.device) -> RotaryTables:
    """Compute the tables of positions 0..positions - 1 for heads with `dim` rotated elements.

    The tables are plain torch memory outside every tag, so they survive any sleep.
    """
    inv_freq = inverse_frequencies(rope, dim).to(device)
    angles = torch.arange(positions, device=device, dtype=torch.float32)[:, None] * inv_freq
    scale = rope.table_scale
    return RotaryTables(cos=angles.cos() * scale, sin=angles.sin() * scale)
