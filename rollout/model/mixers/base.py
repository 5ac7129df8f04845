"""Defines what mixes tokens in a layer, one config class and one computing class a kind, each in a
file of its own; and how heads are rotated: what a config says, and the tables made from that.
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
    """The tokens of one forward, packed: int64 [T] `positions` and pool `slots`, and how attention
    finds the rest.

    shape: the same in plain numbers; None in a decode step that a CUDA graph records. rows: int64
    [B], each request's row of the request table, on the device. sliding: the same batch with
    the slots and plan of sliding layers; None where all layers see the same. loads: a layer's rows
    are there once it waited for each of these.
    """

    positions: Tensor
    slots: Tensor
    rows: Tensor
    plan: AttentionPlan
    shape: BatchShape | None = None
    sliding: Batch | None = None
    loads: Sequence[HostTransfer] = ()


Mixer = Callable[[Tensor, Batch], Tensor]
"""(x [T, hidden], batch) -> [T, hidden]. Stores what later tokens need of these in the cache."""


class MixerConfig(ABC):
    """One layer's mixer, before it has weights."""

    capturable = True  # whether a CUDA graph can hold a decode step

    @abstractmethod
    def groups(self, hidden_size: int, layer: str) -> list[ParamGroup]:
        """Its parameters in memory order; names begin with `layer`, "model.layers.3." say."""

    @abstractmethod
    def splits(self) -> Splits:
        """Returns how tensor-parallel ranks share its parameters: by heads."""

    @abstractmethod
    def of_rank(self, size: int) -> Self:
        """Returns it with the heads of one of `size` ranks, which `splits` can share."""

    @abstractmethod
    def build(self, index: int, parts: LayerParts) -> Mixer:
        """The mixer of layer `index`, over views of the weight store."""


@dataclass(frozen=True, kw_only=True)
class LayerParts:
    """Holds what mixers are built from.

    store: the weights. layout: what each layer keeps; tokens in `pool`, states of linear layers in
    `table`. sparsity: what decode attends to, None for all. norm_eps, zero_centred_norms: see
    `ModelConfig`.
    """

    store: WeightStore
    layout: KVLayout
    pool: KVPool
    table: ReqToTokenPool
    sparsity: DoubleSparsity | None
    ranks: TensorParallel
    norm_eps: float
    zero_centred_norms: bool
    _tables: dict[tuple[RopeConfig, int], RotaryTables] = field(default_factory=dict)

    def rotary(self, rope: RopeConfig, dim: int) -> RotaryTables:
        """Return tables for heads of which `dim` elements are rotated: layers share them."""
        if (rope, dim) not in self._tables:
            longest, device = self.table.max_context_len, self.table.device
            self._tables[rope, dim] = rotary_tables(rope, dim, longest, device)
        return self._tables[rope, dim]


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding. factor: of all but default; low_freq_factor, high_freq_factor: llama3 only,
    original_max_position_embeddings: yarn's, too; the fields after it: yarn only.
    attention_factor: of rotated queries and keys, each; None: as yarn's paper has it, or by mscale.
    mscale_all_dim: where it is not 0, latent attention scales its scores by it, without default.
    """

    theta: float
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(
                f"rope_type={self.rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
            )

    @property
    def table_scale(self) -> float:
        """Returns what cosines and sines are multiplied by."""
        if self.rope_type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)
        return self._mscale(1.0)

    @property
    def score_scale(self) -> float:
        """Returns what scores of latent attention are multiplied by, beside 1 / sqrt(width)."""
        if self.rope_type == "default" or not self.mscale_all_dim:
            return 1.0
        return self._mscale(self.mscale_all_dim) ** 2

    def _mscale(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0


def inverse_frequencies(rope: RopeConfig, dim: int) -> Tensor:
    """fp32 [dim / 2] on the CPU, in transformers' order of operations."""
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
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between
    interpolated.
    """
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
    """Kept where a frequency turns more than `beta_fast` times in the original context, stretched
    by `factor` where less than `beta_slow` times, a ramp in between.
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
    """The tables of positions 0..positions - 1 for heads of which `dim` elements are rotated.

    They are plain torch memory outside every tag: they survive any sleep.
    """
    inv_freq = inverse_frequencies(rope, dim).to(device)
    angles = torch.arange(positions, device=device, dtype=torch.float32)[:, None] * inv_freq
    scale = rope.table_scale
    return RotaryTables(cos=angles.cos() * scale, sin=angles.sin() * scale)
