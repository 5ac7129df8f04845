"""What a recipe says: frozen sections, each with its own rules.

A section checks what it can see by itself. What takes two sections, or the disk, is checked by `check_recipe`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


class FieldError(ValueError):
    """A field that breaks its rule; `recipes.loading` puts the file and the full key in front of it."""

    def __init__(self, name: str, value: object, rule: str, remedy: str) -> None:
        self.name, self.value, self.rule, self.remedy = name, value, rule, remedy
        super().__init__(f"{name}={value}: {rule}; {remedy}")


def _require(section: object, name: str, ok: bool, rule: str, remedy: str) -> None:
    if not ok:
        raise FieldError(name, getattr(section, name), rule, remedy)


def _at_least(section: object, low: int, **remedies: str) -> None:
    for name, remedy in remedies.items():
        _require(section, name, getattr(section, name) >= low, f"must be at least {low}", remedy)


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """Exactly one of `path` (a directory, or a name that `memsaver fetch` knows) and `random_init`."""

    path: str | None = None
    random_init: bool = False  # random weights, which never lie on the disk
    config: dict[str, Any] | None = None  # of a random model: fields of a transformers config, with its model_type
    dtype: str = "float32"  # of the rollout, and of the trainer's forward and backward

    def __post_init__(self) -> None:
        both = self.path is not None and self.random_init
        _require(self, "path", not both, "excludes model.random_init=true", "set model.random_init=false to use it")
        neither = self.path is None and not self.random_init
        remedy = "set model.path=DIRECTORY, model.path=smollm2-135m or model.random_init=true"
        _require(self, "path", not neither, "no model is named", remedy)
        if self.random_init:
            rule, remedy = "is needed by model.random_init=true", "set model.config.model_type=qwen3 and its sizes"
            _require(self, "config", self.config is not None, rule, remedy)
            has_type = isinstance((self.config or {}).get("model_type"), str)
            _require(self, "config", has_type, "has no model_type", "set model.config.model_type=qwen3")
        ok = self.dtype in ("float32", "bfloat16")
        _require(self, "dtype", ok, "must be float32 or bfloat16", "set model.dtype=float32")


@dataclass(frozen=True, kw_only=True)
class EngineSection:
    """The rollout engine; takes exactly one of `kv_tokens` and `mem_fraction_static`."""

    kv_tokens: int | None = None
    mem_fraction_static: float | None = None
    page_size: int = 16
    max_running: int = 64
    max_prefill_tokens: int = 512
    sleep_level: int = 2  # 2: weights dropped, every to_rollout syncs them anew
    cuda_graphs: bool = True  # decode by CUDA graphs, on a GPU

    def __post_init__(self) -> None:
        neither = self.kv_tokens is None and self.mem_fraction_static is None
        rule = "one of kv_tokens and mem_fraction_static is needed"
        _require(self, "kv_tokens", not neither, rule, "set engine.kv_tokens=4096")
        both = self.kv_tokens is not None and self.mem_fraction_static is not None
        rule = f"excludes engine.kv_tokens={self.kv_tokens}"
        _require(self, "mem_fraction_static", not both, rule, "drop it, or set engine.kv_tokens=null")
        fraction = self.mem_fraction_static
        ok = fraction is None or 0 < fraction < 1
        _require(self, "mem_fraction_static", ok, "must lie between 0 and 1", "set engine.mem_fraction_static=0.9")
        _at_least(self, 1, page_size="set engine.page_size=16", max_running="set engine.max_running=64")
        _at_least(self, 1, max_prefill_tokens="set engine.max_prefill_tokens=512")
        if self.kv_tokens is not None:
            ok = self.kv_tokens > 0 and self.kv_tokens % self.page_size == 0
            nearest = max(self.page_size, math.ceil(self.kv_tokens / self.page_size) * self.page_size)
            rule = f"must be a positive multiple of engine.page_size={self.page_size}"
            _require(self, "kv_tokens", ok, rule, f"set engine.kv_tokens={nearest}")
        ok = self.sleep_level in (1, 2)
        _require(self, "sleep_level", ok, "must be 1 (keep on the host) or 2 (discard)", "set engine.sleep_level=2")


@dataclass(frozen=True, kw_only=True)
class TrainerSection:
    """AdamW over all parameters."""

    dtype: str = "float32"  # of the masters, their gradients and moments; bfloat16 loses updates of small rates
    learning_rate: float = 1e-5
    lr_decay: bool = False  # linearly, to 0 after the recipe's last step
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    max_grad_norm: float = 1.0
    micro_batch_size: int = 16  # sequences a forward and backward pass holds
    activation_checkpointing: bool = False
    threads: int | None = None  # of torch on the CPU; null leaves torch's own choice

    def __post_init__(self) -> None:
        ok = self.dtype in ("float32", "bfloat16")
        _require(self, "dtype", ok, "must be float32 or bfloat16", "set trainer.dtype=float32")
        ok = 0 < self.learning_rate < 1
        _require(self, "learning_rate", ok, "must lie between 0 and 1", "set trainer.learning_rate=1e-5")
        ok = 0 <= self.weight_decay < 1
        _require(self, "weight_decay", ok, "must lie in [0, 1)", "set trainer.weight_decay=0")
        for name, usual in (("beta1", 0.9), ("beta2", 0.999)):
            ok = 0 <= getattr(self, name) < 1
            _require(self, name, ok, "must lie in [0, 1)", f"set trainer.{name}={usual}")
        ok = 0 < self.max_grad_norm < math.inf
        _require(self, "max_grad_norm", ok, "must be positive", "set trainer.max_grad_norm=1.0")
        _at_least(self, 1, micro_batch_size="set trainer.micro_batch_size=16")
        ok = self.threads is None or self.threads >= 1
        _require(self, "threads", ok, "must be at least 1", "set trainer.threads=null")


@dataclass(frozen=True, kw_only=True)
class SamplingSection:
    """How training samples are drawn; evaluation is greedy with the same max_tokens."""

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        _at_least(self, 1, max_tokens="set sampling.max_tokens=16")
        ok = 0 < self.temperature < math.inf
        rule = "must be positive: greedy samples of one prompt are all alike and teach nothing"
        _require(self, "temperature", ok, rule, "set sampling.temperature=1.0")
        _at_least(self, 0, top_k="set sampling.top_k=0 (off)")
        _require(self, "top_p", 0 < self.top_p <= 1, "must lie in (0, 1]", "set sampling.top_p=1.0 (off)")


@dataclass(frozen=True, kw_only=True)
class GrpoSection:
    """One step: `prompts_per_step` prompts, `samples_per_prompt` answers to each."""

    prompts_per_step: int = 8
    samples_per_prompt: int = 8
    normalize_std: bool = True  # divide a group's centred rewards by their standard deviation
    clip_low: float = 0.2
    clip_high: float = 0.2

    def __post_init__(self) -> None:
        _at_least(self, 1, prompts_per_step="set grpo.prompts_per_step=8")
        ok = self.samples_per_prompt >= 2
        rule = "must be at least 2: an advantage compares the samples of one prompt"
        _require(self, "samples_per_prompt", ok, rule, "set grpo.samples_per_prompt=8")
        for name in ("clip_low", "clip_high"):
            ok = 0 < getattr(self, name) < 1
            _require(self, name, ok, "must lie between 0 and 1", f"set grpo.{name}=0.2")


TASKS = ("toy", "chain_sum")


@dataclass(frozen=True, kw_only=True)
class TaskSection:
    """`toy` needs no download and its own small vocabulary; `chain_sum` comes from reasoning-gym."""

    name: str = MISSING
    num_terms: int = 2  # chain_sum
    num_digits: int = 1  # chain_sum
    held_out_fraction: float = 0.2
    partial_credit: float = 0.0  # reward of a near miss (see recipes.tasks); never counted as an exact match
    system_prompt: str = ""

    def __post_init__(self) -> None:
        _require(self, "name", self.name in TASKS, f"must be one of {', '.join(TASKS)}", "set task.name=chain_sum")
        _at_least(self, 2, num_terms="set task.num_terms=2")
        _at_least(self, 1, num_digits="set task.num_digits=1")
        ok = 0 < self.held_out_fraction < 1
        _require(self, "held_out_fraction", ok, "must lie between 0 and 1", "set task.held_out_fraction=0.2")
        ok = 0 <= self.partial_credit < 1
        _require(self, "partial_credit", ok, "must lie in [0, 1)", "set task.partial_credit=0")
        ok = self.name == "toy" or self.partial_credit == 0
        _require(self, "partial_credit", ok, f"is not defined for task.name={self.name}", "set task.partial_credit=0")


@dataclass(frozen=True, kw_only=True)
class EvalSection:
    """Greedy answers to held-out problems, before the first step, every `every` steps and after the last."""

    every: int = 10  # 0: never
    problems: int = 64  # at most so many held-out problems
    also_digits: list[int] = field(default_factory=list)  # chain_sum: the same on numbers of so many digits, each alone

    def __post_init__(self) -> None:
        _at_least(self, 0, every="set eval.every=0 (off)")
        _at_least(self, 1, problems="set eval.problems=64")
        ok = all(digits >= 1 for digits in self.also_digits) and len(set(self.also_digits)) == len(self.also_digits)
        _require(self, "also_digits", ok, "must be different numbers of at least 1", "set eval.also_digits=[2]")


@dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    """A checkpoint every `every` steps and after the last; the newest `keep` stay."""

    every: int = 10  # 0: never
    keep: int = 1

    def __post_init__(self) -> None:
        _at_least(self, 0, every="set checkpoint.every=0 (off)")
        _at_least(self, 1, keep="set checkpoint.keep=1")


TAGS = ("params", "optim", "weights", "kv_cache", "cuda_graph")  # of the trainer, then of the rollout


@dataclass(frozen=True, kw_only=True)
class CycleSection:
    """The hand-over: the tags in `keep` stay on the device, where there is room for both sides' memory."""

    keep: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        unknown = [tag for tag in self.keep if tag not in TAGS]
        rule = f"names unknown tags {', '.join(unknown)}; known: {', '.join(TAGS)}"
        _require(self, "keep", not unknown, rule, "set cycle.keep=[] to keep none")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One run of GRPO in which trainer and rollout share a device's memory."""

    model: ModelSection = MISSING
    engine: EngineSection = MISSING
    task: TaskSection = MISSING
    steps: int = MISSING
    trainer: TrainerSection = field(default_factory=TrainerSection)
    sampling: SamplingSection = field(default_factory=SamplingSection)
    grpo: GrpoSection = field(default_factory=GrpoSection)
    eval: EvalSection = field(default_factory=EvalSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    cycle: CycleSection = field(default_factory=CycleSection)
    driver: str = "inprocess"
    device: str = "auto"  # auto: cuda:0 where there is one, else cpu
    seed: int = 0

    def __post_init__(self) -> None:
        _at_least(self, 1, steps="set steps=3")
        _at_least(self, 0, seed="set seed=0")
        ok = self.driver in ("inprocess", "ray")
        _require(self, "driver", ok, "must be inprocess or ray", "set driver=inprocess")
        ok = re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device) is not None
        _require(self, "device", ok, "must be auto, cpu, cuda or cuda:N", "set device=auto")
        if self.task.name != "toy" and self.model.random_init:
            rule = f"has no tokenizer for task.name={self.task.name}"
            raise FieldError("model.random_init", "true", rule, "set task.name=toy, or false and model.path=DIRECTORY")
        self._check_also_digits()

    def _check_also_digits(self) -> None:
        digits = self.eval.also_digits
        if digits and self.task.name != "chain_sum":
            rule = f"is not defined for task.name={self.task.name}"
            raise FieldError("eval.also_digits", digits, rule, "set eval.also_digits=[]")
        if self.task.num_digits in digits:
            rule = f"has task.num_digits={self.task.num_digits}, which is trained on"
            raise FieldError("eval.also_digits", digits, rule, f"drop {self.task.num_digits}")
