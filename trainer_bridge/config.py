"""Defines what a trainer is told: plain data, frozen, checked when made."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch

from rollout.model import resolve_model
from trainer_bridge.tags import TRAINER_TAGS

_DTYPES = ("float32", "bfloat16")
_CHECKPOINTING = ("layers", "mlp", "none")
Rule = tuple[Callable[[Any], object] | bool, str]
"""What tells a good value of a field, or whether it is good; and what it must be."""
_FINITE: Rule = (lambda value: 0 <= value < math.inf, "must be finite, not negative")
_POSITIVE: Rule = (lambda value: 0 < value < math.inf, "must be positive and finite")
_COUNT: Rule = (lambda value: value >= 1, "must be at least 1")
_COUNT_OR_NONE: Rule = (lambda value: value is None or value >= 1, "must be at least 1, or None")


def _check(config: object, *rules: tuple[str, *Rule]) -> None:
    """Raise a ValueError of the first field that breaks a rule; a rule names fields, by spaces."""
    for names, good, words in rules:
        for name in names.split():
            value = getattr(config, name)
            if not (good(value) if callable(good) else good):
                raise ValueError(f"{type(config).__name__}.{name}={value!r}: {words}")


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters: a linear layer computes W x + alpha / rank * B A x, A and B are trained.

    Attributes:
        rank: Rows of A; for experts a multiple of 8.
        alpha: Numerator of the scale.
        target_modules: Last parts of the names of the linear layers that are adapted, as ("q_proj",
            "v_proj"); "experts" are all matrices of a mixture's experts, each with adapters of its
            own.
    """

    rank: int
    alpha: float
    target_modules: tuple[str, ...]

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
        )

    @property
    def scale(self) -> float:
        """Return the factor of B A."""
        return self.alpha / self.rank


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """Options of the critic alone; the rest of `TrainerConfig` is also the critic's.

    Attributes:
        learning_rate: As the policy's.
        decay_steps: As the policy's, in updates of the critic.
        value_clip: How far a value may move from the old one before its loss is clipped.
    """

    learning_rate: float = 1e-5
    decay_steps: int | None = None
    value_clip: float = 0.2

    def __post_init__(self) -> None:
        _check(self, ("value_clip", *_POSITIVE))


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """One FSDP2 trainer.

    Attributes:
        model_path: A Hugging Face directory (config.json and safetensors), or ORG/NAME of a model
            of the Hub, which is downloaded.
        random_init: Random weights, made on the device, the same for the same seed on any number of
            ranks; no safetensors are read.
        dtype: Of the parameter shards, their gradients and the optimizer state.
        param_dtype: Of the unsharded parameters in forward and backward (mixed precision); None is
            `dtype`.
        decay_steps: The learning rate falls linearly to 0 after this many updates; None: it stays.
        max_grad_norm: None does not clip.
        clip_eps_low: The ratio is clipped to [1 - low, 1 + high].
        clip_eps_high: See `clip_eps_low`.
        kl_loss_coef: Of the KL divergence from the reference, in the loss.
        router_aux_loss_coef: Of the load-balance loss of a mixture of experts (`load_balance`), in
            the policy's loss.
        fp32_router: The routers of a mixture multiply in fp32, and weigh experts by fp32.
        critic: None: there is no critic.
        reference: Keep the first weights, frozen, to score with; with adapters these are the base,
            and need no model of their own.
        micro_batch_size: Sequences of the batch's longest length that a rank holds in one forward
            and backward. Of shorter ones it holds as many more as take no more tokens, end to end
            without padding; models in which sequences would see each other so get padded ones.
        activation_checkpointing: What the backward pass computes again: `layers`, `mlp`, `none`.
        threads: Of torch on the CPU; None leaves torch's own choice.
        device: "cpu", "cuda" or "cuda:N".
        seed: Of torch's generator, set once when the trainer is built, and of random weights.
        lora: Train adapters, in `dtype`; all other parameters are frozen, and held in
            `param_dtype`.
        optimizer_offload: Masters and moments, fp32, lie in host memory and pass through the device
            in every update (`StreamedAdamW`); the shards are held in `param_dtype`. The critic's
            stay on the device.
        leaving: Tags that are going to be offloaded: host memory for their copies is obtained from
        the
            start on, while other work runs.
    """

    model_path: str
    random_init: bool = False
    dtype: str = "float32"
    param_dtype: str | None = None
    learning_rate: float = 1e-6
    decay_steps: int | None = None
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    adam_eps: float = 1e-8
    max_grad_norm: float | None = 1.0
    clip_eps_low: float = 0.2
    clip_eps_high: float = 0.2
    kl_loss_coef: float = 0.0
    router_aux_loss_coef: float = 0.0
    fp32_router: bool = False
    critic: CriticConfig | None = None
    reference: bool = False
    micro_batch_size: int = 8
    activation_checkpointing: str = "none"
    threads: int | None = None
    device: str = "cpu"
    seed: int = 0
    lora: LoraConfig | None = None
    optimizer_offload: bool = False
    leaving: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        object.__setattr__(self, "leaving", tuple(self.leaving))
        betas_fit = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        offloads = not self.optimizer_offload or (self.dtype == "float32" and self.lora is None)
        on_known = self.device == "cpu" or self.device.split(":")[0] == "cuda"
        clips = self.max_grad_norm is None or 0 < self.max_grad_norm < math.inf
        dtypes, again = " or ".join(_DTYPES), ", ".join(_CHECKPOINTING)
        _check(
            self,
            ("model_path", bool, "name a Hugging Face model directory"),
            ("dtype", self.dtype in _DTYPES, f"use {dtypes}"),
            ("param_dtype", self.param_dtype in (None, *_DTYPES), f"use {dtypes}, or None"),
            ("activation_checkpointing", _CHECKPOINTING.__contains__, f"use one of {again}"),
            ("learning_rate weight_decay kl_loss_coef router_aux_loss_coef", *_FINITE),
            ("adam_eps clip_eps_high", *_POSITIVE),
            ("decay_steps threads", *_COUNT_OR_NONE),
            ("micro_batch_size", *_COUNT),
            ("betas", betas_fit, "must be two numbers in [0, 1), as (0.9, 0.999)"),
            ("max_grad_norm", clips, "must be positive and finite; None does not clip"),
            ("clip_eps_low", 0 < self.clip_eps_low <= 1, "must be in (0, 1]"),
            ("kl_loss_coef", self.reference or not self.kl_loss_coef, "needs reference=True"),
            ("device", on_known, 'use "cpu", "cuda" or "cuda:N"'),
            ("optimizer_offload", offloads, "needs dtype='float32', and lora=None"),
            ("leaving", set(TRAINER_TAGS).issuperset, f"use tags of {', '.join(TRAINER_TAGS)}"),
        )

    def of_critic(self) -> Self:
        """Return what the critic's model and optimizer are made with.

        It is this configuration with the critic's learning rate and decay, all parameters trained,
        on the device.
        """
        assert self.critic is not None
        return dataclasses.replace(
            self,
            learning_rate=self.critic.learning_rate,
            decay_steps=self.critic.decay_steps,
            lora=None,
            optimizer_offload=False,
        )

    @property
    def model_dir(self) -> str:
        """Return the folder of the model; ValueError where the Hub does not give it."""
        return str(resolve_model(self.model_path, weights=not self.random_init))

    @property
    def torch_dtype(self) -> torch.dtype:
        """Return `dtype` as torch's."""
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
