"""Defines what a trainer is told: plain data, frozen, checked when made."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Self

import torch

from rollout.model import resolve_model
from trainer_bridge.tags import TRAINER_TAGS

_DTYPES = ("float32", "bfloat16")
_CHECKPOINTING = ("layers", "mlp", "none")


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters: a linear layer's output is W x + alpha / rank * B A x, and only A and B
    are trained.

    target_modules: last parts of the names of the linear layers that are adapted, as ("q_proj",
    "v_proj"); "experts" are all matrices of a mixture's experts, each with adapters of its own, and
    take a rank that is a multiple of 8.
    """

    rank: int
    alpha: float
    target_modules: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "target_modules", tuple(self.target_modules))
        _check(self, "rank", self.rank >= 1, "must be at least 1")
        whole = self.rank % 8 == 0 or "experts" not in self.target_modules
        _check(self, "rank", whole, "must be a multiple of 8 for adapters of experts")
        _check(self, "alpha", 0 < self.alpha < math.inf, "must be positive and finite")
        ok = bool(self.target_modules) and len(set(self.target_modules)) == len(self.target_modules)
        _check(self, "target_modules", ok, "name at least one layer, none twice")

    @property
    def scale(self) -> float:
        """Returns the factor of B A."""
        return self.alpha / self.rank


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """Holds what the critic has of its own; the rest of `TrainerConfig` is also the critic's.

    decay_steps: as the policy's, in updates of the critic. value_clip: how far a value may move
    from the old one before its loss is clipped.
    """

    learning_rate: float = 1e-5
    decay_steps: int | None = None
    value_clip: float = 0.2

    def __post_init__(self) -> None:
        ok = 0 < self.value_clip < math.inf
        _check(self, "value_clip", ok, "must be positive and finite")


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """One FSDP2 trainer.

    model_path: a Hugging Face directory (config.json and safetensors), or ORG/NAME of a
    model on the Hub, which is downloaded. random_init: random weights
    made on the device instead, the same for the same seed on any number of ranks; no safetensors
    are read. dtype: of the parameter shards, their gradients and the optimizer state. param_dtype:
    of the unsharded parameters in forward and backward (mixed precision); None is `dtype`.
    decay_steps: the learning rate falls linearly, to 0 after so many updates; None: it stays. lora:
    train adapters, in `dtype`; all other parameters are frozen, and held in `param_dtype`: no
    update is rounded away there. clip_eps_low, clip_eps_high: the ratio is clipped to [1 - low, 1 +
    high]. kl_loss_coef: of the KL divergence from the reference, in the loss. critic: None: none.
    reference: keep the first weights, frozen, to score with; with adapters these are the base, and
    need no model of their own. max_grad_norm: None: no clipping. router_aux_loss_coef: of the
    load-balance loss of a mixture of experts (`load_balance`), in the policy's loss; 0: none.
    fp32_router: of a mixture of experts; routers multiply in fp32, and weigh experts by fp32.
    micro_batch_size: sequences a rank holds in one forward and backward, if they are as long as the
    batch's longest; of shorter ones as many more as take no more tokens, end to end without padding
    (of models in which they would see each other so: padded, and only those of nearly one length).
    threads: of torch on the CPU; None leaves torch's own choice. seed: of torch's generator, set
    once when the trainer is built, and of random weights. optimizer_offload: masters and moments,
    fp32, lie in host memory and pass through the device in every update (`StreamedAdamW`); the
    shards are held in `param_dtype`. The critic's stay. leaving: tags that are going to be
    offloaded: host memory for their copies is obtained from the start on, beside other work.
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
        known = set(TRAINER_TAGS).issuperset(self.leaving)
        dtypes, inf = f"use one of {', '.join(_DTYPES)}", math.inf
        betas_fit = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        norm_fits = self.max_grad_norm is None or 0 < self.max_grad_norm < inf
        known_layers = self.activation_checkpointing in _CHECKPOINTING
        decays = self.decay_steps is None or self.decay_steps >= 1
        aux = self.router_aux_loss_coef
        on_known = self.device == "cpu" or self.device.split(":")[0] == "cuda"
        for name, ok, rule in (
            ("model_path", self.model_path, "name a Hugging Face model directory"),
            ("dtype", self.dtype in _DTYPES, dtypes),
            ("param_dtype", self.param_dtype in (None, *_DTYPES), f"{dtypes}, or None for dtype"),
            ("activation_checkpointing", known_layers, f"use one of {', '.join(_CHECKPOINTING)}"),
            ("learning_rate", 0 <= self.learning_rate < inf, "must be finite, not negative"),
            ("decay_steps", decays, "must be at least 1, or None for a constant rate"),
            ("weight_decay", 0 <= self.weight_decay < inf, "must be finite, not negative"),
            ("betas", betas_fit, "must be two numbers in [0, 1), as (0.9, 0.999)"),
            ("adam_eps", 0 < self.adam_eps < inf, "must be positive and finite"),
            ("max_grad_norm", norm_fits, "must be positive and finite; None does not clip"),
            ("clip_eps_low", 0 < self.clip_eps_low <= 1, "must be in (0, 1]"),
            ("clip_eps_high", 0 < self.clip_eps_high < inf, "must be positive and finite"),
            ("kl_loss_coef", 0 <= self.kl_loss_coef < inf, "must be finite, not negative"),
            ("router_aux_loss_coef", 0 <= aux < inf, "must be finite, not negative"),
            ("kl_loss_coef", self.reference or not self.kl_loss_coef, "needs reference=True"),
            ("micro_batch_size", self.micro_batch_size >= 1, "must be at least 1"),
            ("threads", self.threads is None or self.threads >= 1, "must be at least 1, or None"),
            ("device", on_known, 'use "cpu", "cuda" or "cuda:N"'),
            ("optimizer_offload", self._may_offload(), "needs dtype='float32', and lora=None"),
            ("leaving", known, f"use tags of {', '.join(TRAINER_TAGS)}"),
        ):
            _check(self, name, bool(ok), rule)

    def _may_offload(self) -> bool:
        return not self.optimizer_offload or (self.dtype == "float32" and self.lora is None)

    def of_critic(self) -> Self:
        """Returns this configuration with the critic's learning rate and decay, all parameters
        trained, on the device: what its model and optimizer are made with.
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
        return _torch_dtype(self.dtype)

    @property
    def torch_param_dtype(self) -> torch.dtype:
        """Returns the dtype of forward and backward."""
        return _torch_dtype(self.param_dtype or self.dtype)

    @property
    def torch_model_dtype(self) -> torch.dtype:
        """Returns the dtype of the shards of the model's own parameters."""
        masters_here = self.lora is None and not self.optimizer_offload
        return self.torch_dtype if masters_here else self.torch_param_dtype


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _check(config: object, name: str, ok: bool, rule: str) -> None:
    if not ok:
        raise ValueError(f"{type(config).__name__}.{name}={getattr(config, name)!r}: {rule}")
