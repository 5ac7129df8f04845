"""Interface of token mixers, and rotary embeddings: their configuration and tables.

Each kind of mixer has a file with two classes: the configuration and the computation.
"""

from __future__ import annotations

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
from rollout.ops.low_rank import Choice, Factors, add_low_rank, low_rank
from rollout.ops.row_wise import linear
from rollout.ops.torch_attention import BatchShape, TorchPlan
from rollout.ops.triton_attention import TritonPlan
from rollout.weights.params import ParamGroup, Splits

if TYPE_CHECKING:
    from rollout.parallel import TensorParallel
    from rollout.weights.adapters import AdapterPages
    from rollout.weights.store import WeightStore

AttentionPlan = TorchPlan | TritonPlan


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The packed tokens of a forward pass: T tokens of B requests."""

    positions: Tensor  # of each token in its request, int64 [T]
    slots: Tensor  # of each token in the KV pool, int64 [T]
    rows: Tensor  # of each request in the request table, integers [B], on the device
    plan: AttentionPlan
    shape: BatchShape | None = None  # None in a decode step that a CUDA graph captures
    adapters: Choice | None = None  # of the tokens; None in an engine without adapters
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
    adapters: AdapterPages | None = None
    _tables: dict[RopeConfig, RotaryTables] = field(default_factory=dict)

    def rotary(self, rope: RopeConfig) -> RotaryTables:
        """Return the tables of a rotary embedding; layers share them."""
        if rope not in self._tables:
            self._tables[rope] = rotary_tables(rope, self.table.max_context_len, self.table.device)
        return self._tables[rope]

    def product(self, name: str, bias: Tensor | None = None) -> Product:
        """Return the linear layer of a name, such as "model.layers.3.self_attn.o_proj"."""
        adapters = self.adapters
        if adapters is None or (factors := adapters.factors(name)) is None:
            return Product(self.store.tensor(f"{name}.weight"), bias)
        return Product(self.store.tensor(f"{name}.weight"), bias, factors, adapters.stream)


@dataclass(frozen=True)
class Product:
    """A linear layer over views of the weight store, with the adapters of its tokens.

    On a GPU, the first half of the adapters' work is launched on a stream beside the product. Each
    use of that stream waits for the work before, so its memory needs no further care.
    """

    weight: Tensor  # [N, K]
    bias: Tensor | None  # [N]
    factors: Factors | None = None  # None: no adapter has this layer
    stream: torch.cuda.Stream | None = None  # None on a CPU

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """Return the product [T, N] of x [T, K]."""
        factors, chosen = self.factors, batch.adapters
        if factors is None or chosen is None:
            return linear(x, self.weight, self.bias)
        if self.stream is None:
            low = low_rank(x, factors, chosen)
            return add_low_rank(linear(x, self.weight, self.bias), x, low, factors, chosen)
        current = torch.cuda.current_stream(x.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            low = low_rank(x, factors, chosen)
        out = linear(x, self.weight, self.bias)
        current.wait_stream(self.stream)
        return add_low_rank(out, x, low, factors, chosen)


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding, as transformers' model computes it.

    Attributes:
        frequencies: Angle per position of each rotated pair, in fp32. Where there are fewer pairs
            than a head has, the other elements are not rotated (Qwen3-Next).
        table_scale: Factor of cosines and sines (yarn).
    """

    frequencies: tuple[float, ...]
    table_scale: float = 1.0


def rotary_tables(rope: RopeConfig, positions: int, device: torch.device) -> RotaryTables:
    """Compute the tables of positions 0..positions - 1.

    The tables are plain torch memory outside every tag, so they survive any sleep.
    """
    frequencies = torch.tensor(rope.frequencies, dtype=torch.float32, device=device)
    angles = torch.arange(positions, device=device, dtype=torch.float32)[:, None] * frequencies
    scale = rope.table_scale
    return RotaryTables(cos=angles.cos() * scale, sin=angles.sin() * scale)
