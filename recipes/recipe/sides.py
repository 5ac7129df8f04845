"""The two sides: which model, how it generates, how it learns."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from recipes.recipe.rules import at_least, require

KV_DTYPES = ("auto", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1")


@cache
def shapes() -> dict[str, dict[str, Any]]:
    """Fields of a transformers config, with its model_type, by name of the shape."""
    loaded = OmegaConf.to_container(OmegaConf.load(Path(__file__).parent / "shapes.yaml"))
    assert isinstance(loaded, dict)
    return {str(name): fields for name, fields in loaded.items()}


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """`path` (a directory, or a name that `memsaver fetch` knows), or else a model with random
    weights, which never lie on the disk: of `shape` or of `config`, exactly one of them. With
    `path` neither is looked at.
    """

    path: str | None = None
    shape: str | None = None  # a name in shapes.yaml
    config: dict[str, Any] | None = None  # fields of a transformers config, with its model_type
    dtype: str = "bfloat16"  # of the rollout, and of the trainer's forward and backward

    def __post_init__(self) -> None:
        ok = self.path is None or bool(self.path.strip())
        require(self, "path", ok, "must name a directory", "set model.path=null for a random model")
        if self.random_init:
            self._check_description()
        ok = self.dtype in ("float32", "bfloat16")
        require(self, "dtype", ok, "must be float32 or bfloat16", "set model.dtype=float32")

    @property
    def random_init(self) -> bool:
        """Random weights instead of a checkpoint's."""
        return self.path is None

    def random_fields(self) -> dict[str, Any]:
        """Returns what describes the random model: its shape's fields, or those of the recipe."""
        return dict(self.config or {}) if self.shape is None else dict(shapes()[self.shape])

    def _check_description(self) -> None:
        neither = self.config is None and self.shape is None
        remedy = "set model.path=DIRECTORY, or model.shape=qwen2.5-0.5b for random weights"
        require(self, "path", not neither, "no model is named", remedy)
        both = self.config is not None and self.shape is not None
        remedy = "set model.config=null, or model.shape=null"
        require(self, "shape", not both, "excludes model.config", remedy)
        if self.shape is not None:
            close = difflib.get_close_matches(self.shape, shapes(), n=1) or ["qwen2.5-0.5b"]
            rule = f"must be one of {', '.join(shapes())}"
            require(self, "shape", self.shape in shapes(), rule, f"set model.shape={close[0]}")
        if self.config is not None:
            has_type = isinstance(self.config.get("model_type"), str)
            require(
                self, "config", has_type, "has no model_type", "set model.config.model_type=qwen3"
            )


@dataclass(frozen=True, kw_only=True)
class EngineSection:
    """A rollout engine: one of `kv_tokens` and `mem_fraction_static`, which a `Recipe` sets to 0.9
    without either.
    """

    kv_tokens: int | None = None
    mem_fraction_static: float | None = None
    page_size: int = 16
    max_running: int = 64
    max_prefill_tokens: int = 2048
    sleep_level: int = 2  # 2: weights dropped, every to_rollout syncs them anew
    cuda_graphs: bool = True  # decode by CUDA graphs, on a GPU
    kv_cache_dtype: str = "auto"  # what the pool stores: auto is model.dtype
    host_to_device_ratio: float = 0.0  # host memory below the pool, in sizes of the pool; 0: none
    tensor_parallel_size: int = 1  # devices that share one engine

    def __post_init__(self) -> None:
        both = self.kv_tokens is not None and self.mem_fraction_static is not None
        rule = f"excludes engine.kv_tokens={self.kv_tokens}"
        remedy = "set engine.kv_tokens=null, or engine.mem_fraction_static=null"
        require(self, "mem_fraction_static", not both, rule, remedy)
        fraction = self.mem_fraction_static
        ok = fraction is None or 0 < fraction < 1
        remedy = "set engine.mem_fraction_static=0.9"
        require(self, "mem_fraction_static", ok, "must lie between 0 and 1", remedy)
        at_least(self, 1, page_size="set engine.page_size=16")
        at_least(self, 1, max_running="set engine.max_running=64")
        at_least(self, 1, max_prefill_tokens="set engine.max_prefill_tokens=2048")
        if self.kv_tokens is not None:
            ok = self.kv_tokens > 0 and self.kv_tokens % self.page_size == 0
            nearest = max(1, -(-self.kv_tokens // self.page_size)) * self.page_size
            rule = f"must be a positive multiple of engine.page_size={self.page_size}"
            require(self, "kv_tokens", ok, rule, f"set engine.kv_tokens={nearest}")
        ok = self.kv_cache_dtype in KV_DTYPES
        rule = f"must be one of {', '.join(KV_DTYPES)}"
        require(self, "kv_cache_dtype", ok, rule, "set engine.kv_cache_dtype=auto")
        ok = 0 <= self.host_to_device_ratio < math.inf
        remedy = "set engine.host_to_device_ratio=0 (off)"
        require(self, "host_to_device_ratio", ok, "must not be negative", remedy)
        at_least(self, 1, tensor_parallel_size="set engine.tensor_parallel_size=1")
        ok = self.tensor_parallel_size == 1 or self.kv_cache_dtype != "fp4_e2m1"
        rule = "excludes engine.kv_cache_dtype=fp4_e2m1"
        require(self, "tensor_parallel_size", ok, rule, "set engine.kv_cache_dtype=auto")
        ok = self.sleep_level in (1, 2)
        rule = "must be 1 (keep on the host) or 2 (discard)"
        require(self, "sleep_level", ok, rule, "set engine.sleep_level=2")


@dataclass(frozen=True, kw_only=True)
class TrainerSection:
    """AdamW over all parameters."""

    # of the masters, their gradients and moments; bfloat16 loses updates of small rates
    dtype: str = "float32"
    learning_rate: float = 1e-6
    lr_decay: bool = False  # linearly, to 0 after the recipe's last step
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    max_grad_norm: float = 1.0
    micro_batch_size: int = 4  # sequences a forward and backward pass holds
    # Layers are computed again in the backward pass, not kept.
    activation_checkpointing: bool = True
    threads: int | None = None  # of torch on the CPU; null leaves torch's own choice

    def __post_init__(self) -> None:
        ok = self.dtype in ("float32", "bfloat16")
        require(self, "dtype", ok, "must be float32 or bfloat16", "set trainer.dtype=float32")
        ok = 0 < self.learning_rate < 1
        require(
            self, "learning_rate", ok, "must lie between 0 and 1", "set trainer.learning_rate=1e-6"
        )
        ok = 0 <= self.weight_decay < 1
        require(self, "weight_decay", ok, "must lie in [0, 1)", "set trainer.weight_decay=0")
        for name, usual in (("beta1", 0.9), ("beta2", 0.999)):
            ok = 0 <= getattr(self, name) < 1
            require(self, name, ok, "must lie in [0, 1)", f"set trainer.{name}={usual}")
        ok = 0 < self.max_grad_norm < math.inf
        require(self, "max_grad_norm", ok, "must be positive", "set trainer.max_grad_norm=1.0")
        at_least(self, 1, micro_batch_size="set trainer.micro_batch_size=4")
        ok = self.threads is None or self.threads >= 1
        require(self, "threads", ok, "must be at least 1", "set trainer.threads=null")


LORA_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class LoraSection:
    """Adapters instead of all parameters: base + alpha / rank * B A, merged while it is written to
    the engine.
    """

    rank: int = 0  # 0: off, all parameters are trained
    alpha: float = 32.0
    target_modules: list[str] = field(default_factory=lambda: list(LORA_MODULES))

    def __post_init__(self) -> None:
        at_least(self, 0, rank="set lora.rank=0 (off)")
        ok = 0 < self.alpha < math.inf
        require(self, "alpha", ok, "must be positive", "set lora.alpha=32")
        unknown = [name for name in self.target_modules if name not in LORA_MODULES]
        different = len(set(self.target_modules)) == len(self.target_modules)
        ok = bool(self.target_modules) and not unknown and different
        rule = f"must be different names of {', '.join(LORA_MODULES)}"
        require(self, "target_modules", ok, rule, "set lora.target_modules=[q_proj,v_proj]")


@dataclass(frozen=True, kw_only=True)
class SamplingSection:
    """Says how training samples are drawn; evaluation is greedy with the same max_tokens."""

    max_tokens: int = 512
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        at_least(self, 1, max_tokens="set sampling.max_tokens=512")
        ok = 0 < self.temperature < math.inf
        rule = "must be positive: greedy samples of one prompt are all alike and teach nothing"
        require(self, "temperature", ok, rule, "set sampling.temperature=1.0")
        at_least(self, 0, top_k="set sampling.top_k=0 (off)")
        require(
            self, "top_p", 0 < self.top_p <= 1, "must lie in (0, 1]", "set sampling.top_p=1.0 (off)"
        )
