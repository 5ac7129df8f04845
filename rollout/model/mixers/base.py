"""Defines what mixes tokens in a layer: one config class and one computing class a kind, each in a
file of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from torch import Tensor

from kvcache import KVLayout, KVPool, ReqToTokenPool
from kvcache.ops import RotaryTables
from kvcache.tiers import Transfer
from rollout.model.layer_kv import DoubleSparsity
from rollout.model.params import Group, Splits
from rollout.model.rotary import RopeConfig
from rollout.ops.attention_plan import AttentionPlan, BatchShape

if TYPE_CHECKING:
    from rollout.parallel import TensorParallel
    from rollout.weights.store import WeightStore


@dataclass(frozen=True, kw_only=True)
class Sliding:
    """`slots` and `plan` of a `Batch` for sliding layers that have a pool of their own."""

    slots: Tensor
    plan: AttentionPlan


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The tokens of one forward, packed: int64 [T] `positions` and pool `slots`, and how attention
    finds the rest.

    shape: the same in plain numbers; None in a decode step that a CUDA graph records. rows: int64
    [B], each request's row of the request table, on the device. sliding: what sliding layers use in
    place of slots and plan, None where all layers see the same. loads: a layer's rows are there
    once it waited for each of these.
    """

    positions: Tensor
    slots: Tensor
    rows: Tensor
    plan: AttentionPlan
    shape: BatchShape | None
    sliding: Sliding | None = None
    loads: Sequence[Transfer] = ()


Mixer = Callable[[Tensor, Batch], Tensor]
"""(x [T, hidden], batch) -> [T, hidden]. Stores what later tokens need of these in the cache."""


class MixerConfig(ABC):
    """One layer's mixer, before it has weights."""

    capturable = True  # whether a CUDA graph can hold a decode step

    @abstractmethod
    def groups(self, hidden_size: int, layer: str) -> list[Group]:
        """Its parameters in memory order; names begin with `layer`, "model.layers.3." say."""

    @abstractmethod
    def splits(self) -> Splits:
        """Returns how tensor-parallel ranks share its parameters: by heads."""

    @abstractmethod
    def of_rank(self, size: int) -> Self:
        """Returns it with the heads of one of `size` ranks, which `splits` can share."""

    @abstractmethod
    def build(self, index: int, parts: Parts) -> Mixer:
        """The mixer of layer `index`, over views of the weight store."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Holds what mixers are built from.

    store: the weights. layout: what each layer keeps; tokens in `pool`, states of linear layers in
    `table`. sparsity: what decode attends to, None for all. norm_eps, zero_centred_norms: see
    `ModelConfig`. rotary: the tables of a `RopeConfig` and of how many elements of a head are
    rotated, the same ones for all layers that ask alike.
    """

    store: WeightStore
    layout: KVLayout
    pool: KVPool
    table: ReqToTokenPool
    sparsity: DoubleSparsity | None
    ranks: TensorParallel
    norm_eps: float
    zero_centred_norms: bool
    rotary: Callable[[RopeConfig, int], RotaryTables]
