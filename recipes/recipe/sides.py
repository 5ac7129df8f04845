"""The two sides: which model, how it generates, how it learns."""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from recipes.recipe import rules
from recipes.recipe.rules import Rule, Section, at_least, one_of


@cache
def shapes() -> dict[str, dict[str, Any]]:
    """Fields of a transformers config, with its model_type, by name of the shape."""
    loaded = OmegaConf.to_container(OmegaConf.load(Path(__file__).parent / "shapes.yaml"))
    assert isinstance(loaded, dict)
    return {str(name): fields for name, fields in loaded.items()}


@dataclass(frozen=True, kw_only=True)
class ModelSection(Section):
    """`path` (a directory, or a name that `memsaver fetch` knows), or else a model with random
    weights, which never lie on the disk: of `shape` or of `config`, exactly one of them. With
    `path` neither is looked at.
    """

    path: str | None = None
    shape: str | None = None  # a name in shapes.yaml
    config: dict[str, Any] | None = None  # fields of a transformers config, with its model_type
    dtype: str = "bfloat16"  # of the rollout, and of the trainer's forward and backward
    fp32_router: bool = False  # of a mixture of experts, on both sides, whatever dtype is

    def rules(self) -> Iterator[Rule]:
        no_path = "set model.path=null for a random model"
        yield Rule("path", self.path is None or self.path.strip(), "must name a directory", no_path)
        if self.random_init:
            name = "set model.path=DIRECTORY, or model.shape=qwen2.5-0.5b for random weights"
            named = self.config is not None or self.shape is not None
            yield Rule("path", named, "no model is named", name)
            one, other = "set model.config=null, or model.shape=null", "excludes model.config"
            yield Rule("shape", self.config is None or self.shape is None, other, one)
            if self.shape is not None:
                close = difflib.get_close_matches(self.shape, shapes(), n=1) or ["qwen2.5-0.5b"]
                yield Rule("shape", *one_of(*shapes()), f"set model.shape={close[0]}")
            else:
                typed = isinstance((self.config or {}).get("model_type"), str)
                qwen = "set model.config.model_type=qwen3"
                yield Rule("config", typed, "has no model_type", qwen)
        yield Rule("dtype", *rules.DTYPE, "set model.dtype=float32")

    @property
    def random_init(self) -> bool:
        """Random weights instead of a checkpoint's."""
        return self.path is None

    def random_fields(self) -> dict[str, Any]:
        """Returns what describes the random model: its shape's fields, or those of the recipe."""
        return dict(self.config or {}) if self.shape is None else dict(shapes()[self.shape])


HOSTED = {"vllm": "vLLM", "sglang": "SGLang"}
"""Other projects' engines, by `kind`."""


@dataclass(frozen=True, kw_only=True)
class EngineSection(Section):
    """A rollout engine. Of `kv_tokens` and `mem_fraction_static` one is given, or neither."""

    kind: str = "native"  # or vllm, sglang: the package of that name generates
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
    expert_parallel: int = 1  # parts made of each layer's experts; 1: devices share every expert
    prefix_states: int = 16  # of models with linear layers: prompts whose states are kept; 0: off
    options: dict[str, Any] | None = None  # further ones of `vllm.LLM`, or SGLang's `Engine`

    @property
    def hosted(self) -> bool:
        """True for another project's engine."""
        return self.kind != "native"

    def rules(self) -> Iterator[Rule]:
        yield Rule("kind", *one_of("native", *HOSTED))
        if self.kind in HOSTED:
            yield from self._rules_of_hosted(HOSTED[self.kind])
        else:
            words, none = "are of engine.kind=vllm and sglang", "set engine.options=null"
            yield Rule("options", self.options is None, words, none)
        tokens, fraction, page = self.kv_tokens, self.mem_fraction_static, self.page_size
        either = "set engine.kv_tokens=null, or engine.mem_fraction_static=null"
        words = f"excludes engine.kv_tokens={tokens}"
        yield Rule("mem_fraction_static", tokens is None or fraction is None, words, either)
        if fraction is not None:
            ninety = "set engine.mem_fraction_static=0.9"
            yield Rule("mem_fraction_static", *rules.BETWEEN_0_AND_1, ninety)
        counts = "page_size max_running max_prefill_tokens tensor_parallel_size expert_parallel"
        yield Rule(counts, *at_least(1))
        yield Rule("prefix_states", *at_least(0), "set engine.prefix_states=0 (off)")
        if tokens is not None:
            words = f"must be a positive multiple of engine.page_size={page}"
            nearest = f"set engine.kv_tokens={max(1, -(-tokens // page)) * page}"
            yield Rule("kv_tokens", tokens > 0 and tokens % page == 0, words, nearest)
        yield Rule("kv_cache_dtype", *one_of("auto", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1"))
        off = "set engine.host_to_device_ratio=0 (off)"
        yield Rule("host_to_device_ratio", *rules.NOT_NEGATIVE, off)
        words = "excludes engine.kv_cache_dtype=fp4_e2m1"
        good = self.tensor_parallel_size == 1 or self.kv_cache_dtype != "fp4_e2m1"
        yield Rule("tensor_parallel_size", good, words, "set engine.kv_cache_dtype=auto")
        words = f"must divide engine.tensor_parallel_size={self.tensor_parallel_size}"
        good = self.tensor_parallel_size % max(1, self.expert_parallel) == 0
        yield Rule("expert_parallel", good, words, "set engine.expert_parallel=1")
        words = "must be 1 (keep on the host) or 2 (discard)"
        yield Rule("sleep_level", self.sleep_level in (1, 2), words)

    def _rules_of_hosted(self, name: str) -> Iterator[Rule]:
        beside = f"with engine.kind={self.kind}"
        fraction, own = self.mem_fraction_static, f"is the native engine's, {beside}"
        words = f"is not known beside {name}'s workspaces and graphs, {beside}"
        none = "set engine.mem_fraction_static=null"
        yield Rule("mem_fraction_static", fraction is None, words, none)
        words = f"was not tried, {beside}"
        yield Rule("kv_cache_dtype", self.kv_cache_dtype == "auto", words)
        yield Rule("host_to_device_ratio", self.host_to_device_ratio == 0, own)
        words = f"puts {name}'s workers into processes of their own, {beside}"
        one = self.tensor_parallel_size == 1 or self.kind == "vllm"
        yield Rule("tensor_parallel_size", one, words)


@dataclass(frozen=True, kw_only=True)
class TrainerSection(Section):
    """AdamW over all parameters."""

    # of the masters, their gradients and moments; bfloat16 loses updates of small rates
    dtype: str = "float32"
    learning_rate: float = 1e-6
    lr_decay: bool = False  # linearly, to 0 after the recipe's last step
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    max_grad_norm: float = 1.0
    router_aux_loss_coef: float = 0.0  # of mixtures of experts: their load-balance loss; 0: none
    # Sequences a forward and backward pass holds, of the longest; of short ones more.
    micro_batch_size: int = 4
    # What the backward pass computes again, so that it is not kept: layers, their MLPs, or none.
    activation_checkpointing: str = "layers"
    threads: int | None = None  # of torch on the CPU; null leaves torch's own choice
    # Masters and moments lie in host memory and pass through the device in every update.
    optimizer_offload: bool = False

    def rules(self) -> Iterator[Rule]:
        yield Rule("dtype", *rules.DTYPE)
        words = f"keeps float32 masters, and trainer.dtype={self.dtype}"
        good = not self.optimizer_offload or self.dtype == "float32"
        yield Rule("optimizer_offload", good, words, "set trainer.dtype=float32")
        yield Rule("learning_rate", *rules.BETWEEN_0_AND_1)
        yield Rule("weight_decay beta1 beta2", *rules.FROM_0_BELOW_1)
        yield Rule("max_grad_norm", *rules.POSITIVE)
        off = "set trainer.router_aux_loss_coef=0 (off)"
        yield Rule("router_aux_loss_coef", *rules.NOT_NEGATIVE, off)
        yield Rule("micro_batch_size", *at_least(1))
        yield Rule("activation_checkpointing", *one_of("layers", "mlp", "none"))
        if self.threads is not None:
            yield Rule("threads", *at_least(1))


_DENSE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LORA_MODULES = (*_DENSE, "experts")


@dataclass(frozen=True, kw_only=True)
class LoraSection(Section):
    """Adapters alone are trained: base + alpha / rank * B A, merged while it is synced."""

    rank: int = 0  # 0: off, all parameters are trained
    alpha: float = 32.0
    target_modules: list[str] = field(default_factory=lambda: list(_DENSE))

    def rules(self) -> Iterator[Rule]:
        yield Rule("rank", *at_least(0), "set lora.rank=0 (off)")
        words = "must be a multiple of 8 for adapters of experts"
        whole = self.rank % 8 == 0 or "experts" not in self.target_modules
        yield Rule("rank", whole, words, f"set lora.rank={self.rank + -self.rank % 8}")
        yield Rule("alpha", *rules.POSITIVE)
        names, words = self.target_modules, f"must be different names of {', '.join(LORA_MODULES)}"
        good = names and len({*names} & {*LORA_MODULES}) == len(names)
        yield Rule("target_modules", good, words, "set lora.target_modules=[q_proj,v_proj]")


@dataclass(frozen=True, kw_only=True)
class SamplingSection(Section):
    """Says how training samples are drawn; evaluation is greedy with the same max_tokens."""

    max_tokens: int = 512
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def rules(self) -> Iterator[Rule]:
        yield Rule("max_tokens", *at_least(1))
        good, words = rules.POSITIVE
        words += ": greedy samples of one prompt are all alike and teach nothing"
        yield Rule("temperature", good, words)
        yield Rule("top_k", *at_least(0), "set sampling.top_k=0 (off)")
        yield Rule("top_p", *rules.ABOVE_0_TO_1, "set sampling.top_p=1.0 (off)")
