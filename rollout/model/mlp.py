"""Defines what follows attention in a layer: one config class a kind, and what it computes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rollout.ops.experts import Routing, Share, mix_experts
from rollout.ops.norm_and_activation import silu_mul
from rollout.ops.products import linear
from rollout.weights.params import ParamGroup, Split, Splits, held, one, stack

if TYPE_CHECKING:
    from rollout.weights.store import WeightStore

_BIAS = "gate.e_score_correction_bias"
MLP = Callable[[Tensor], Tensor]
"""x [T, hidden] -> this rank's part of [T, hidden], which the ranks add up."""


class MLPConfig(ABC):
    """A layer's MLP, before it has weights. Names begin with `name`, "model.layers.3.mlp." say."""

    @abstractmethod
    def groups(self, hidden_size: int, name: str) -> list[ParamGroup]:
        """Its parameters in memory order."""

    def buffers(self, name: str) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of what is no parameter: fp32 whatever the model's dtype."""
        return {}

    @abstractmethod
    def splits(self, size: int, experts: int) -> Splits:
        """Returns how `size` tensor-parallel ranks share its parameters: by inner channels, experts
        in so many parts of whole ones, each shared by `size / experts` ranks.
        """

    def of_rank(self, rank: int, size: int, experts: int) -> MLPConfig:
        """Returns it as one rank computes it."""
        return self

    @abstractmethod
    def build(self, store: WeightStore, name: str) -> MLP:
        """Makes what computes it, over views of the weight store."""

    @abstractmethod
    def widths(self, hidden_size: int, size: int, experts: int) -> list[int]:
        """Returns how many elements a token has, at most, in each tensor that lies in memory
        between the first product and the last, on one rank. size, experts: as of `splits`.
        """


@dataclass(frozen=True, kw_only=True)
class GatedConfig(MLPConfig):
    """A SwiGLU MLP of this many inner channels."""

    inner: int

    def groups(self, hidden_size: int, name: str) -> list[ParamGroup]:
        shape = (self.inner, hidden_size)
        gate_up = [(f"{name}{half}_proj.weight", shape) for half in ("gate", "up")]
        return [
            stack(name + "gate_up_proj.weight", gate_up),
            one(name + "down_proj.weight", hidden_size, self.inner),
        ]

    def splits(self, size: int, experts: int) -> Splits:
        return shared_inner("mlp.")

    def build(self, store: WeightStore, name: str) -> MLP:
        gate_up = store.tensor(name + "gate_up_proj.weight")
        down = store.tensor(name + "down_proj.weight")
        return lambda x: linear(silu_mul(linear(x, gate_up)), down)

    def widths(self, hidden_size: int, size: int, experts: int) -> list[int]:
        inner = self.inner // size
        return [2 * inner, inner]


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig(MLPConfig):
    """A mixture of SwiGLU experts of `inner` channels each, of which a token goes to some.

    wide_router: its product is one of fp32. wide_weights: a token's weights stay fp32, and are not
    rounded to the model's dtype. bias: experts are compared with a constant fp32 bias. shared: a
    SwiGLU MLP of so many channels that every token goes through; None: there is none. shared_gate:
    it is multiplied by the sigmoid of a product of its own (Qwen3-Next). first: the number of the
    first expert that this rank holds.
    """

    experts: int
    inner: int
    routing: Routing
    wide_router: bool = False
    wide_weights: bool = False
    bias: bool = False
    shared: int | None = None
    shared_gate: bool = True
    first: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(
                f"num_experts_per_tok={self.top_k} must be in 1..{self.experts}, the number of "
                "experts"
            )
        routing = self.routing
        if self.experts % routing.groups or not 1 <= routing.top_groups <= routing.groups:
            raise ValueError(
                f"n_group={routing.groups} must divide the {self.experts} experts, and "
                f"topk_group={routing.top_groups} be in 1..n_group"
            )
        least, each = max(self.top_k, 1), self.experts // routing.groups
        if each < routing.judges or each * routing.top_groups < least:
            raise ValueError(
                f"n_group={routing.groups} leaves groups of {each} experts; with "
                f"topk_group={routing.top_groups} these are too few for "
                f"num_experts_per_tok={self.top_k}"
            )

    @property
    def top_k(self) -> int:
        """Returns how many experts a token goes to."""
        return self.routing.top_k

    def buffers(self, name: str) -> dict[str, tuple[int, ...]]:
        return {name + _BIAS: (self.experts,)} if self.bias else {}

    @property
    def shared_name(self) -> str:
        return "shared_expert." if self.shared_gate else "shared_experts."

    def groups(self, hidden_size: int, name: str) -> list[ParamGroup]:
        groups = [
            one(name + "gate.weight", self.experts, hidden_size),
            one(name + "experts.gate_up_proj", self.experts, 2 * self.inner, hidden_size),
            one(name + "experts.down_proj", self.experts, hidden_size, self.inner),
        ]
        if self.shared is not None:
            groups += GatedConfig(inner=self.shared).groups(hidden_size, name + self.shared_name)
        if self.shared is not None and self.shared_gate:
            groups.append(one(name + "shared_expert_gate.weight", 1, hidden_size))
        return groups

    def splits(self, size: int, experts: int) -> Splits:
        each = size // experts
        whole = [Split(dim=0, uneven=True, count=experts, stride=each)] if experts > 1 else []
        # [experts, gate rows then up rows, hidden]
        rows = [Split(dim=1, units=(1, 1), count=each)] if each > 1 else []
        columns = [Split(dim=2, count=each)] if each > 1 else []
        return {
            "mlp.experts.gate_up_proj": [*whole, *rows],
            "mlp.experts.down_proj": [*whole, *columns],
            **shared_inner(f"mlp.{self.shared_name}"),
        }

    def of_rank(self, rank: int, size: int, experts: int) -> ExpertsConfig:
        number = rank // (size // experts)
        return replace(self, first=held(self.experts, experts, number)[0])

    def build(self, store: WeightStore, name: str) -> Experts:
        return Experts(self, store, name)

    def widths(self, hidden_size: int, size: int, experts: int) -> list[int]:
        return [self.top_k * self.inner * experts // size, self.top_k * hidden_size]


def shared_inner(name: str) -> Splits:
    """Returns how ranks share the inner channels of a SwiGLU MLP of this name."""
    rows = [Split(dim=0)]
    return {
        f"{name}gate_proj.weight": rows,
        f"{name}up_proj.weight": rows,
        f"{name}down_proj.weight": [Split(dim=1)],
    }


class Experts:
    """Weights are views; they stay valid over pause and resume.

    routed: [T or more, top_k], where each call leaves the experts of its T tokens; None: nowhere.
    """

    routed: Tensor | None = None

    def __init__(self, config: ExpertsConfig, store: WeightStore, name: str) -> None:
        self.config = config
        self._router = store.tensor(name + "gate.weight")
        self._gate_up = store.tensor(name + "experts.gate_up_proj")
        self._down = store.tensor(name + "experts.down_proj")
        self._bias = store.buffers[name + _BIAS] if config.bias else None
        self._shared = self._shared_gate = None
        if config.shared is not None:
            shared = GatedConfig(inner=config.shared)
            self._shared = shared.build(store, name + config.shared_name)
        if config.shared is not None and config.shared_gate:
            self._shared_gate = store.tensor(name + "shared_expert_gate.weight")

    def __call__(self, x: Tensor) -> Tensor:
        config = self.config
        logits = linear(x, self._router, wide=config.wide_router)
        ids, weights = config.routing.choose(logits, self._bias)
        if self.routed is not None:
            self.routed[: len(ids)] = ids
        weights = weights if config.wide_weights else weights.to(x.dtype)
        share = Share(config.first, config.experts)
        out = mix_experts(x, ids, weights, self._gate_up, self._down, share=share)
        if self._shared is None:
            return out
        if self._shared_gate is None:
            return out + self._shared(x)
        return out + torch.sigmoid(linear(x, self._shared_gate)) * self._shared(x)
