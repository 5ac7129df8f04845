"""The decoder: model and MLP configuration, parameters of each rank, and the forward pass."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvcache import KVLayout
from kvcache.staging import heads_per_rank
from rollout.model.mixers.base import Batch, LayerParts, MixerConfig
from rollout.ops.experts import mix_experts
from rollout.ops.routing import Routing
from rollout.ops.row_wise import add_rms_norm, linear, rms_norm, silu_mul
from rollout.weights.messages import Manifest
from rollout.weights.params import (
    VOCABULARY,
    ParamGroup,
    Split,
    Splits,
    held,
    one,
    shard_groups,
    stack,
)
from rollout.weights.store import build_manifest

_BIAS = "gate.e_score_correction_bias"
MLP = Callable[[Tensor, Batch], Tensor]
"""Map x [T, hidden] of a batch to this rank's partial sum [T, hidden], which the ranks add up."""


class MLPConfig(ABC):
    """Base class of MLP configurations, which have no weights yet.

    The argument `name` of the methods is the prefix of parameter names, such as
    "model.layers.3.mlp.".
    """

    @abstractmethod
    def groups(self, hidden_size: int, name: str) -> list[ParamGroup]:
        """Return the parameters in memory order."""

    def buffers(self, name: str) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of the constant buffers, which are fp32 for any model dtype."""
        return {}

    @abstractmethod
    def splits(self, size: int, experts: int) -> Splits:
        """Return how `size` tensor-parallel ranks share the parameters.

        Ranks share the inner channels. Experts are first divided into `experts` parts of whole
        experts, and `size / experts` ranks share each part.
        """

    def of_rank(self, rank: int, size: int, experts: int) -> "MLPConfig":
        """Return the MLP of one rank; `size` and `experts` as in `splits`."""
        return self

    @abstractmethod
    def build(self, parts: LayerParts, name: str) -> MLP:
        """Build the MLP over views of the weight store."""

    @abstractmethod
    def widths(self, hidden_size: int, size: int, experts: int) -> list[int]:
        """Return the maximum elements per token of each intermediate tensor on one rank.

        Intermediate tensors are those between the first and the last product; `size` and `experts`
        as in `splits`.
        """


@dataclass(frozen=True, kw_only=True)
class GatedConfig(MLPConfig):
    """A SwiGLU MLP with `inner` inner channels."""

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

    def build(self, parts: LayerParts, name: str) -> MLP:
        gate_up, down = (parts.product(f"{name}{part}_proj") for part in ("gate_up", "down"))

        def mlp(x: Tensor, batch: Batch) -> Tensor:
            gate, up = gate_up(x, batch).chunk(2, dim=-1)
            return down(silu_mul(gate, up), batch)

        return mlp

    def widths(self, hidden_size: int, size: int, experts: int) -> list[int]:
        inner = self.inner // size
        return [2 * inner, inner]


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig(MLPConfig):
    """A mixture of SwiGLU experts; the router sends each token to some of them.

    Every token also passes through the shared expert, if there is one. With `shared_gate`, the
    shared expert's output is multiplied by the sigmoid of a learned product (Qwen3-Next).
    """

    experts: int  # of the whole model
    inner: int  # inner channels of each expert
    routing: Routing
    wide_router: bool = False  # compute the router's product in fp32
    wide_weights: bool = False  # keep a token's expert weights in fp32, not the model's dtype
    bias: bool = False  # add a constant fp32 bias to the scores that select experts
    shared: int | None = None  # inner channels of the shared expert
    shared_gate: bool = True
    first: int = 0  # first expert that this rank holds

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(
                f"num_experts_per_tok={self.top_k} must be in 1..{self.experts}, the expert count"
            )
        groups, best = self.routing.groups, self.routing.top_groups
        per_group, rest = divmod(self.experts, groups)
        enough = per_group >= self.routing.judges and per_group * best >= self.top_k
        if rest or not 1 <= best <= groups or not enough:
            raise ValueError(
                f"n_group={groups} and topk_group={best} do not fit {self.experts} experts: groups "
                f"must be equal, and the best must have num_experts_per_tok={self.top_k} experts"
            )

    @property
    def top_k(self) -> int:
        """Return the number of experts per token."""
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
        ranks = size // experts  # ranks per part of the experts
        whole = [Split(dim=0, uneven=True, count=experts, stride=ranks)] if experts > 1 else []
        # [experts, gate rows then up rows, hidden]
        rows = [Split(dim=1, units=(1, 1), count=ranks)] if ranks > 1 else []
        columns = [Split(dim=2, count=ranks)] if ranks > 1 else []
        return {
            "mlp.experts.gate_up_proj": [*whole, *rows],
            "mlp.experts.down_proj": [*whole, *columns],
            **shared_inner(f"mlp.{self.shared_name}"),
        }

    def of_rank(self, rank: int, size: int, experts: int) -> "ExpertsConfig":
        number = rank // (size // experts)
        return replace(self, first=held(self.experts, experts, number)[0])

    def build(self, parts: LayerParts, name: str) -> "Experts":
        return Experts(self, parts, name)

    def widths(self, hidden_size: int, size: int, experts: int) -> list[int]:
        return [self.top_k * self.inner * experts // size, self.top_k * hidden_size]


def shared_inner(name: str) -> Splits:
    """Return how ranks share the inner channels of a SwiGLU MLP with the name prefix `name`."""
    splits = {f"{name}{half}_proj.weight": [Split(dim=0)] for half in ("gate", "up")}
    return {**splits, f"{name}down_proj.weight": [Split(dim=1)]}


class Experts:
    """A mixture of experts over views of the weight store, valid across pause and resume.

    If `routed` is set, [T or more, top_k], each call writes the experts of its T tokens to it.
    """

    routed: Tensor | None = None

    def __init__(self, config: ExpertsConfig, parts: LayerParts, name: str) -> None:
        self.config, store = config, parts.store
        self._router = store.tensor(name + "gate.weight")
        self._gate_up = store.tensor(name + "experts.gate_up_proj")
        self._down = store.tensor(name + "experts.down_proj")
        self._bias = store.buffers[name + _BIAS] if config.bias else None
        self._shared = self._shared_gate = None
        if config.shared is not None:
            self._shared = GatedConfig(inner=config.shared).build(parts, name + config.shared_name)
        if config.shared is not None and config.shared_gate:
            self._shared_gate = store.tensor(name + "shared_expert_gate.weight")

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        config = self.config
        logits = linear(x, self._router, wide=config.wide_router)
        ids, weights = config.routing.choose(logits, self._bias)
        if self.routed is not None:
            self.routed[: len(ids)] = ids
        weights = weights if config.wide_weights else weights.to(x.dtype)
        chosen = x, ids, weights, self._gate_up, self._down
        out = mix_experts(*chosen, first=config.first, total=config.experts)
        if self._shared is None:
            return out
        if self._shared_gate is None:
            return out + self._shared(x, batch)
        return out + torch.sigmoid(linear(x, self._shared_gate)) * self._shared(x, batch)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder of pre-norm layers, independent of the format from which it was read.

    A layer is a token mixer (attention, for example), then an MLP, each after an RMSNorm.
    """

    vocab_size: int
    hidden_size: int
    rms_norm_eps: float
    max_position_embeddings: int  # longest sequence of the model, in tokens
    tie_word_embeddings: bool  # whether the output layer uses the embedding's weights
    mixers: tuple[MixerConfig, ...]  # by layer
    mlps: tuple[MLPConfig, ...]  # by layer
    stop_token_ids: frozenset[int]
    hf_config: Any = field(repr=False, compare=False)  # Hugging Face config, for `kvcache.layout`
    zero_centred_norms: bool = False  # RMSNorms multiply by 1 + weight
    tokenizer_ids: int | None = None  # ids from this one on have no text; None: unknown

    @property
    def choices(self) -> int:
        """Return the number of tokens that are sampled, the first of the vocabulary."""
        return min(self.vocab_size, self.tokenizer_ids or self.vocab_size)

    @property
    def num_layers(self) -> int:
        return len(self.mixers)

    @property
    def has_experts(self) -> bool:
        return any(isinstance(mlp, ExpertsConfig) for mlp in self.mlps)

    @property
    def is_plain(self) -> bool:
        """Return whether all layers have plain grouped-query attention."""
        return all(mixer.plain for mixer in self.mixers)

    def with_fp32_routers(self) -> "ModelConfig":
        """Return this model with router products and expert weights in fp32."""
        mlps = list(self.mlps)
        for layer, mlp in enumerate(mlps):
            if isinstance(mlp, ExpertsConfig):
                mlps[layer] = replace(mlp, wide_router=True, wide_weights=True)
        return replace(self, mlps=tuple(mlps))


def parameter_groups(config: ModelConfig) -> list[ParamGroup]:
    """Return all stored parameters in memory order, fused where the model multiplies once."""
    groups = [one("model.embed_tokens.weight", config.vocab_size, config.hidden_size)]
    for index in range(config.num_layers):
        groups += _layer_groups(config, index)
    groups.append(one("model.norm.weight", config.hidden_size))
    if not config.tie_word_embeddings:
        groups.append(one("lm_head.weight", config.vocab_size, config.hidden_size))
    return groups


def buffers(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the constant buffers, see `MLPConfig.buffers`."""
    shapes: dict[str, tuple[int, ...]] = {}
    for index, mlp in enumerate(config.mlps):
        shapes |= mlp.buffers(f"model.layers.{index}.mlp.")
    return shapes


def aliases(config: ModelConfig) -> dict[str, str]:
    """Map the names of tied parameters to the names of the stored ones."""
    return {"lm_head.weight": "model.embed_tokens.weight"} if config.tie_word_embeddings else {}


def _layer_groups(config: ModelConfig, index: int) -> list[ParamGroup]:
    hidden, layer = config.hidden_size, f"model.layers.{index}."
    return [
        one(layer + "input_layernorm.weight", hidden),
        *config.mixers[index].groups(hidden, layer),
        one(layer + "post_attention_layernorm.weight", hidden),
        *config.mlps[index].groups(hidden, layer + "mlp."),
    ]


def rank_groups(model: ModelConfig, rank: int, size: int, experts: int = 1) -> list[ParamGroup]:
    """Return the parameters of one tensor-parallel rank in memory order.

    Parameters are fused where the model multiplies once. The experts of each layer are divided into
    `experts` parts.

    Raises:
        ValueError: The counts do not divide a parameter; names it.
    """
    return shard_groups(parameter_groups(model), all_splits(model, size, experts), rank, size)


def all_splits(model: ModelConfig, size: int, experts: int) -> dict[str, Sequence[Split]]:
    """Return how ranks share all parameters; arguments as in `rank_groups`."""
    splits = dict(VOCABULARY)
    for mixer in set(model.mixers):
        splits |= mixer.splits()
    for mlp in set(model.mlps):
        splits |= mlp.splits(size, experts)
    return splits


def whole_manifest(model: ModelConfig, dtype: torch.dtype) -> Manifest:
    """Return the manifest of an engine that holds the whole model with parameters of `dtype`."""
    return build_manifest(rank_groups(model, 0, 1), aliases(model), dtype)


def rank_model(model: ModelConfig, rank: int, size: int, experts: int = 1) -> ModelConfig:
    """Return the model with one rank's heads and first expert; all other sizes stay whole."""
    return replace(
        model,
        mixers=tuple(mixer.of_rank(size) for mixer in model.mixers),
        mlps=tuple(mlp.of_rank(rank, size, experts) for mlp in model.mlps),
    )


def rank_layout(kv_layout: KVLayout, size: int) -> KVLayout:
    """Return the KV layout of one tensor-parallel rank; all `size` ranks have the same.

    A rank keeps its share of the KV heads (at least one head) or whole latent rows. Of the states
    of linear layers, it keeps the channels of its heads.
    """
    rows = kv_layout.rows.items()
    states = kv_layout.temporal_shape
    return replace(
        kv_layout,
        rows={name: (heads_per_rank(size, heads), dim) for name, (heads, dim) in rows},
        conv_shapes=tuple((channels // size, *rest) for channels, *rest in kv_layout.conv_shapes),
        temporal_shape=states and (states[0] // size, *states[1:]),
    )


class Decoder:
    """The layers of a model over views of the weight store, valid across pause and resume.

    `lm_head` contains this rank's vocabulary rows of the output layer.
    """

    def __init__(self, config: ModelConfig, parts: LayerParts) -> None:
        tensor = parts.store.tensor
        self._ranks = parts.ranks
        self._eps, self._centred = parts.norm_eps, parts.zero_centred_norms
        self._embed, self.lm_head = tensor("model.embed_tokens.weight"), tensor("lm_head.weight")
        layers = [f"model.layers.{index}." for index in range(config.num_layers)]
        self._input_norms = [tensor(layer + "input_layernorm.weight") for layer in layers]
        self._norms = [tensor(layer + "post_attention_layernorm.weight") for layer in layers]
        self._last_norm = tensor("model.norm.weight")
        self.mixers = [mixer.build(index, parts) for index, mixer in enumerate(config.mixers)]
        pairs = zip(config.mlps, layers, strict=True)
        self.mlps = [mlp.build(parts, layer + "mlp.") for mlp, layer in pairs]

    def __call__(self, token_ids: Tensor, batch: Batch) -> Tensor:
        """Run packed tokens of several requests, and store their keys and values in the cache.

        `token_ids` are int64 [T], one request after the other. Between layers, the residual stream
        and the product to be added to it stay separate, so that each addition and the norm after it
        are one kernel.

        Returns:
            Normalized hidden states [T, hidden].
        """
        eps, centred = self._eps, self._centred
        residual = self._ranks.embed(token_ids, self._embed)
        x = rms_norm(residual, self._input_norms[0], eps, zero_centred=centred)
        following = [*self._input_norms[1:], self._last_norm]
        layers = zip(self.mixers, self._norms, self.mlps, following, strict=True)
        for index, (mixer, norm, mlp, next_norm) in enumerate(layers):
            for load in batch.loads:
                load.wait(index)
            x, residual = add_rms_norm(mixer(x, batch), residual, norm, eps, zero_centred=centred)
            out = self._ranks.sum(mlp(x, batch), "MLP")
            x, residual = add_rms_norm(out, residual, next_norm, eps, zero_centred=centred)
        return x
