"""Configuration of a trainer: frozen plain data, checked on construction."""

import dataclasses
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

import torch

from rollout.model import resolve_model
from trainer_bridge.tag_names import TRAINER_TAGS

Dtype = Literal["float32", "bfloat16", "float16"]
LossKind = Literal["ppo", "gspo", "cispo"]
Aggregation = Literal["token", "sequence", "constant"]
KlEstimator = Literal["k2", "k3"]
Level = Literal["token", "sequence", "geometric"]
How = Literal["truncate", "mask"]
Reject = Literal["mean_k1", "max_k1", "mean_k3", "max_k3"]
ScheduleKind = Literal["constant", "linear", "cosine"]
Checkpointing = Literal["layers", "mlp", "none"]
Optimizer = Literal["adamw", "adamw_8bit"]
DTYPES = get_args(Dtype)
Rule = tuple[Callable[[Any], object] | bool, str]
"""A check of a field's value, or its result, and the text of the error."""
INSTALL_OPTIM = "pip install 'memsaver[optim]'"
_FINITE: Rule = (lambda value: 0 <= value < math.inf, "must be finite, not negative")
_POSITIVE: Rule = (lambda value: 0 < value < math.inf, "must be positive and finite")
_COUNT: Rule = (lambda value: value >= 1, "must be at least 1")
_LOSS_KIND: Rule = (
    lambda kind: callable(kind) or kind in get_args(LossKind),
    f"use one of {', '.join(get_args(LossKind))}, or a function",
)
_COUNT_OR_NONE: Rule = (lambda value: value is None or value >= 1, "must be at least 1, or None")


def _one_of(choices: Any, *none: None) -> Rule:
    """Return the rule that a field is one of the values of a Literal, or None if that is given."""
    values = get_args(choices)
    return (*values, *none).__contains__, f"use one of {', '.join(values)}{', or None' * len(none)}"


def _check(config: object, *rules: tuple[str, *Rule]) -> None:
    """Raise a ValueError for the first field that breaks a rule.

    Each rule begins with the names of its fields, separated by spaces.
    """
    for names, good, words in rules:
        for name in names.split():
            value = getattr(config, name)
            if not (good(value) if callable(good) else good):
                raise ValueError(f"{type(config).__name__}.{name}={value!r}: {words}")


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Options of low-rank adapters.

    An adapted linear layer computes W x + alpha / rank * B A x, and only A and B are trained.

    Attributes:
        rank: Rows of A, at least 1; a multiple of 8 if experts are adapted.
        alpha: Numerator of the scale alpha / rank, positive.
        target_modules: Last name components of the linear layers to adapt, such as ("q_proj",
            "v_proj"). "experts" adapts all matrices of all experts, each with its own adapter.
        served_as: Name under which rollouts serve the adapter beside the base; their engines need
            slots of this rank (`rollout.AdapterSlots`). None: a sync merges it into the base.
    """

    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    served_as: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "target_modules", tuple(self.target_modules))
        whole = self.rank % 8 == 0 or "experts" not in self.target_modules
        different = 0 < len(set(self.target_modules)) == len(self.target_modules)
        _check(
            self,
            ("rank", *_COUNT),
            ("rank", whole, "must be a multiple of 8 for adapters of experts"),
            ("alpha", *_POSITIVE),
            ("target_modules", different, "name at least one layer, none twice"),
            (
                "served_as",
                self.served_as is None or "experts" not in self.target_modules,
                "adapters of experts are merged; use served_as=None",
            ),
        )

    @property
    def scale(self) -> float:
        """Return alpha / rank, the factor of B A."""
        return self.alpha / self.rank


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Course of a learning rate over the updates of a run; `LearningRate` has the formulas.

    Attributes:
        kind: "constant", or the form of the fall after the warm-up: "linear" or "cosine".
        warmup_updates: Updates over which the rate rises linearly; 0 has no warm-up.
        updates: Updates of the run, after which a fall is complete; None only if there is none.
        final_rate: Share of the learning rate at which a fall ends, in [0, 1).
    """

    kind: ScheduleKind = "constant"
    warmup_updates: int = 0
    updates: int | None = None
    final_rate: float = 0.0

    def __post_init__(self) -> None:
        falls, ends = self.kind != "constant", self.updates is not None
        within = self.updates is None or self.warmup_updates < self.updates
        _check(
            self,
            ("kind", *_one_of(ScheduleKind)),
            ("warmup_updates", self.warmup_updates >= 0, "must not be negative"),
            ("updates", *_COUNT_OR_NONE),
            ("updates", ends or not falls, f"must be set for kind={self.kind!r}"),
            ("warmup_updates", within, f"must be less than updates={self.updates}"),
            ("final_rate", 0 <= self.final_rate < 1, "must be in [0, 1)"),
            ("final_rate", falls or not self.final_rate, "needs kind='linear' or 'cosine'"),
        )


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """Options of the critic, which otherwise uses the options of its `TrainerConfig`.

    Attributes:
        learning_rate: Learning rate after the warm-up.
        schedule: Course of the learning rate over the critic's updates.
        value_clip: Distance between new and old value beyond which the loss is clipped, positive.
    """

    learning_rate: float = 1e-5
    schedule: Schedule = Schedule()
    value_clip: float = 0.2

    def __post_init__(self) -> None:
        _check(self, ("value_clip", *_POSITIVE))


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """The loss of a policy's update.

    It is a sum over response tokens of the terms of `kind`, of `kl_coef` times the KL divergence
    from the reference, and of -`entropy_coef` times the entropy. Formulas and sources are in
    docs/losses.md.

    Attributes:
        kind: Clipped ratios of tokens (ppo) or of sequences (gspo), log-probabilities with clipped
            weights (cispo), or a function with the arguments of `policy_terms`, which pickles.
        aggregation: What is averaged: all tokens (token), answers, each the mean of its tokens
            (sequence), or all tokens with `max_tokens` in place of each answer's length (constant).
        max_tokens: Tokens of the longest answer, at least 1, for aggregation="constant".
        clip_low: The importance ratio is clipped to [1 - low, 1 + high]; in (0, 1].
        clip_high: See `clip_low`; finite, positive.
        dual_clip: Largest ratio of a token with a negative advantage, above 1; None does not limit
            it. Not for cispo.
        kl_coef: Weight of the KL divergence from the reference; finite, not negative.
        kl_estimator: Estimate of that divergence, k2 or k3 (`kl_terms`).
        entropy_coef: Weight of the entropy, which the loss rewards; finite, not negative.
    """

    kind: LossKind | Callable[..., Any] = "ppo"
    aggregation: Aggregation = "token"
    max_tokens: int | None = None
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl_coef: float = 0.0
    kl_estimator: KlEstimator = "k3"
    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        sized, dual = bool(self.max_tokens) or self.aggregation != "constant", self.dual_clip
        bounded = dual is None or (1 < dual < math.inf and self.kind != "cispo")
        _check(
            self,
            ("kind", *_LOSS_KIND),
            ("aggregation", *_one_of(Aggregation)),
            ("max_tokens", *_COUNT_OR_NONE),
            ("max_tokens", sized, "must be set for aggregation='constant'"),
            ("clip_low", 0 < self.clip_low <= 1, "must be in (0, 1]"),
            ("clip_high", *_POSITIVE),
            ("dual_clip", bounded, "must be above 1, or None; with kind='cispo' only None"),
            ("kl_coef entropy_coef", *_FINITE),
            ("kl_estimator", *_one_of(KlEstimator)),
        )


@dataclass(frozen=True, kw_only=True)
class CorrectionConfig:
    """Options of `correct`; a contradiction raises a ValueError on construction.

    Attributes:
        level: What one weight applies to: a token, or all tokens of an answer, whose weight is the
            product (sequence) or the geometric mean of the tokens' weights.
        how: What happens to a weight outside the bounds: above `high` it is set to `high`
            (truncate), or below `low` or above `high` to 0 (mask).
        low: Lower bound of a mask; not negative, below `high`. Unused otherwise.
        high: Upper bound; positive and finite.
        reject: Figure of an answer's tokens that rejects the answer above `reject_above`: |mean of
            k1|, the largest |k1|, the mean of k3 or the largest k3. None rejects no answer.
        reject_above: Limit of `reject` in nats, positive.
        veto: Nats by which the trainer's log-probability of a token may lie below the rollout's; an
            answer with any lower token is rejected. None has no veto.
    """

    level: Level = "token"
    how: How = "truncate"
    low: float = 0.5
    high: float = 2.0
    reject: Reject | None = None
    reject_above: float | None = None
    veto: float | None = None

    def __post_init__(self) -> None:
        low = self.how != "mask" or 0 <= self.low < self.high
        paired = (self.reject is None) == (self.reject_above is None)
        limit: Rule = (
            lambda value: value is None or 0 < value < math.inf,
            "must be positive and finite, or None",
        )
        _check(
            self,
            ("level", *_one_of(Level)),
            ("how", *_one_of(How)),
            ("reject", *_one_of(Reject, None)),
            ("high", *_POSITIVE),
            ("low", low, f"must be in [0, high), with high={self.high}"),
            ("reject_above", paired, "set it together with reject"),
            ("reject_above veto", *limit),
        )


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Configuration of one FSDP2 trainer.

    A value outside the ranges below raises a ValueError on construction.

    Attributes:
        model_path: A Hugging Face directory (config.json and safetensors), or ORG/NAME of a model
            on the Hub, which is downloaded.
        random_init: Initialize random weights on the device instead of reading safetensors. The
            same seed gives the same weights on any number of ranks.
        dtype: Dtype of the parameter shards, their gradients and adamw's moments; not float16, in
            which small updates vanish.
        param_dtype: Dtype of the unsharded parameters in forward and backward (mixed precision);
            None is `dtype`. float16 needs `dtype="float32"`, and updates have a dynamic loss scale
            (`LossScale`).
        learning_rate: Learning rate after the warm-up; finite, not negative.
        schedule: Course of the learning rate over the policy's updates.
        weight_decay: AdamW's decoupled weight decay, of policy and critic; finite, not negative.
            Parameters with one dimension (norms and biases) have none.
        betas: AdamW's decay rates of the two moments, each in [0, 1).
        adam_eps: AdamW's epsilon; finite, positive.
        max_grad_norm: Gradient norm above which gradients are scaled down; None does not clip.
        loss: The loss of the policy's updates.
        router_aux_loss_coef: Weight of the load-balance loss of a mixture of experts
            (`load_balance`) in the policy's loss.
        fp32_router: Compute the logits and the weights of a mixture's routers in fp32.
        critic: Options of the critic; None trains without a critic.
        reference: Keep the initial weights, frozen, to score with. With adapters the frozen base is
            the reference, and no second model is kept.
        micro_batch_size: Number of sequences of the batch's longest length that a rank processes in
            one forward and backward. Shorter sequences are packed without padding, up to the same
            number of tokens. Models whose packed sequences would attend to each other get padded
            ones.
        micro_batch_tokens: Number of tokens up to which sequences are packed instead, or those of
            the longest sequence, if it has more.
        keep_unsharded: Gather parameters once per batch and keep them, and add gradients of micro
            batches unsharded, which are reduced with those of the last. Otherwise every layer is
            gathered and reduced in every micro batch.
        activation_checkpointing: What the backward pass recomputes: whole layers, MLPs or nothing.
        cuda_graphs: Launch the decoder's layers in updates as CUDA graphs (`LayerGraphs`), which
            helps where the host needs longer for the launches than the device for the work. For
            one rank and models whose sequences are packed, without experts. On the CPU, layers are
            computed in the same way, and nothing is saved.
        threads: Torch threads on the CPU; None leaves torch's default.
        device: "cpu", "cuda" or "cuda:N".
        seed: Seed of torch's generator, set once when the trainer is built, and of random weights.
        replicate: Keep all parameters on every rank, which then gathers nothing, and add up the
            gradients of the adapters alone. Engines can serve such parameters (`layout`). For
            adapters, without a critic.
        lora: Train adapters, in `dtype`. All other parameters are frozen and stored in
            `param_dtype`.
        optimizer: Either adamw, or adamw_8bit, which stores moments in 8 bits (`AdamW8bit`) and
            needs the package bitsandbytes.
        optimizer_offload: Keep masters and moments in host memory, in fp32, and stream them through
            the device in every update (`StreamedAdamW`). The shards are stored in `param_dtype`.
            The critic's optimizer stays on the device.
        exact: Compute the policy's forward by the engine's operations, and compare the bits of its
            log-probabilities in updates with `rollout_logprobs`. A difference raises
            `UnequalTokens` before anything changes; "warn" only counts it. For models of the
            families llama, mistral, mixtral, qwen2, qwen3 and qwen3_moe; on a GPU in half
            precision. Adapters must be served beside the base.
        exact_ranks: With `exact`, the `tensor_parallel_size` of the rollout's engines. The forward
            adds partial sums as these ranks do.
        exact_expert_parallel: With `exact`, the `expert_parallel` of the rollout's engines.
        mismatch_dir: Directory to which the first update with such a difference saves the weights
            and an unequal sequence, before it raises or goes on (`trace_mismatch`). None: nothing
            is saved.
        leaving: Tags that will be offloaded. The trainer begins to obtain host memory for their
            copies when it is built, overlapped with other work.
    """

    model_path: str
    random_init: bool = False
    dtype: Dtype = "float32"
    param_dtype: Dtype | None = None
    learning_rate: float = 1e-6
    schedule: Schedule = Schedule()
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    adam_eps: float = 1e-8
    max_grad_norm: float | None = 1.0
    loss: PolicyLoss = PolicyLoss()
    router_aux_loss_coef: float = 0.0
    fp32_router: bool = False
    critic: CriticConfig | None = None
    reference: bool = False
    micro_batch_size: int = 8
    micro_batch_tokens: int | None = None
    keep_unsharded: bool = False
    activation_checkpointing: Checkpointing = "none"
    cuda_graphs: bool = False
    threads: int | None = None
    device: str = "cpu"
    seed: int = 0
    replicate: bool = False
    lora: LoraConfig | None = None
    optimizer: Optimizer = "adamw"
    optimizer_offload: bool = False
    exact: bool | Literal["warn"] = False
    exact_ranks: int = 1
    exact_expert_parallel: int = 1
    mismatch_dir: str | None = None
    leaving: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        object.__setattr__(self, "leaving", tuple(self.leaving))
        betas_fit = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        offloads = not self.optimizer_offload or (self.dtype == "float32" and self.lora is None)
        in_8_bits = self.optimizer == "adamw_8bit"
        installed = not in_8_bits or importlib.util.find_spec("bitsandbytes") is not None
        plain = not (self.optimizer_offload and in_8_bits)
        on_known = self.device == "cpu" or self.device.split(":")[0] == "cuda"
        clips = self.max_grad_norm is None or 0 < self.max_grad_norm < math.inf
        wide = (self.param_dtype or self.dtype) == "float32"
        exact = not self.exact or self.device == "cpu" or not wide
        unmerged = not self.exact or self.lora is None or self.lora.served_as is not None
        adapters_alone = not self.replicate or (self.lora is not None and self.critic is None)
        half = self.param_dtype != "float16" or self.dtype == "float32"
        _check(
            self,
            ("model_path", bool, "name a Hugging Face model directory"),
            ("dtype", self.dtype != "float16", "use float32, with param_dtype='float16'"),
            ("dtype", self.dtype in DTYPES, "use float32 or bfloat16"),
            ("param_dtype", *_one_of(Dtype, None)),
            ("param_dtype", half, "needs dtype='float32'"),
            ("activation_checkpointing", *_one_of(Checkpointing)),
            ("learning_rate weight_decay router_aux_loss_coef", *_FINITE),
            ("adam_eps", *_POSITIVE),
            ("micro_batch_tokens threads", *_COUNT_OR_NONE),
            ("micro_batch_size exact_ranks exact_expert_parallel", *_COUNT),
            ("betas", betas_fit, "must be two numbers in [0, 1), such as (0.9, 0.999)"),
            ("max_grad_norm", clips, "must be positive and finite; None does not clip"),
            ("loss", self.reference or not self.loss.kl_coef, "kl_coef needs reference=True"),
            ("device", on_known, 'use "cpu", "cuda" or "cuda:N"'),
            ("optimizer", *_one_of(Optimizer)),
            ("optimizer", installed, f"needs bitsandbytes; run: {INSTALL_OPTIM}"),
            ("optimizer_offload", plain, "needs optimizer='adamw'"),
            ("optimizer_offload", offloads, "needs dtype='float32', and lora=None"),
            (
                "exact_expert_parallel",
                lambda parts: self.exact_ranks % parts == 0,
                f"must divide exact_ranks={self.exact_ranks}",
            ),
            ("exact", self.exact in (False, True, "warn"), "use False, True or 'warn'"),
            ("replicate", adapters_alone, "is for adapters, without a critic"),
            ("exact", unmerged, "excludes adapters, which are merged rounded"),
            ("exact", exact, "needs param_dtype='bfloat16' or 'float16' on a GPU"),
            ("leaving", set(TRAINER_TAGS).issuperset, f"use only {', '.join(TRAINER_TAGS)}"),
        )

    def of_critic(self) -> Self:
        """Return the configuration of the critic's model and optimizer.

        Returns:
            This configuration with the critic's learning rate and schedule, without adapters, and
            with the optimizer on the device.
        """
        assert self.critic is not None
        return dataclasses.replace(
            self,
            learning_rate=self.critic.learning_rate,
            schedule=self.critic.schedule,
            lora=None,
            optimizer_offload=False,
        )

    @property
    def model_dir(self) -> str:
        """Return the model's folder, downloaded if needed, or raise ValueError if there is none."""
        return str(resolve_model(self.model_path, weights=not self.random_init))

    @property
    def torch_dtype(self) -> torch.dtype:
        """Return `dtype` as a torch dtype."""
        return getattr(torch, self.dtype)

    @property
    def torch_param_dtype(self) -> torch.dtype:
        """Return the dtype of forward and backward."""
        return getattr(torch, self.param_dtype or self.dtype)

    @property
    def torch_model_dtype(self) -> torch.dtype:
        """Return the dtype of the shards of the model's own parameters."""
        masters_here = self.lora is None and not self.optimizer_offload
        return self.torch_dtype if masters_here else self.torch_param_dtype
