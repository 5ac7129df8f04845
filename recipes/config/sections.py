"""The sections of a recipe: model, engine and trainer, the loop, and the devices."""

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import MISSING, OmegaConf

from recipes.config import rules
from recipes.config.rules import Rule, Section, at_least, different_digits, one_of, shown


@cache
def shapes() -> dict[str, dict[str, Any]]:
    """Fields of a transformers config, with its model_type, by name of the shape."""
    loaded = OmegaConf.to_container(OmegaConf.load(Path(__file__).parent / "shapes.yaml"))
    assert isinstance(loaded, dict)
    return {str(name): fields for name, fields in loaded.items()}


@dataclass(frozen=True, kw_only=True)
class ModelSection(Section):
    """`path` (a directory, ORG/NAME of the Hub, or a fetched model), or else a model with random
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


# Below, an engine is asked for its own limit; importing one takes torch along.
COOL = 0.1


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
        if self.temperature < COOL:
            from rollout.types import COLDEST

            words = f"must be at least {COLDEST:g}: the engine computes none colder"
            yield Rule("temperature", self.temperature >= COLDEST, words)
        # The update's log-probabilities are of the whole vocabulary: the gradient would be that of
        # another distribution than the one the samples came from.
        words = "must be {}: training takes no cut, as its log-probabilities are of all tokens"
        yield Rule("top_k", self.top_k == 0, words.format("0 (off)"))
        yield Rule("top_p", self.top_p == 1, words.format("1.0 (off)"))


@dataclass(frozen=True, kw_only=True)
class GrpoSection(Section):
    """One step: `prompts_per_step` prompts, `samples_per_prompt` answers to each."""

    prompts_per_step: int = 8
    samples_per_prompt: int = 8
    normalize_std: bool = True  # divide a group's centred rewards by their standard deviation
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0.0  # of the distance to the first weights, in the loss; 0: no reference model
    router_replay: bool = False  # the trainer's tokens go to the experts that the engine chose

    def rules(self) -> Iterator[Rule]:
        yield Rule("prompts_per_step", *at_least(1))
        why = ": an advantage compares the samples of one prompt"
        yield Rule("samples_per_prompt", *at_least(2, why))
        yield Rule("clip_low clip_high", *rules.BETWEEN_0_AND_1)
        yield Rule("kl_coef", *rules.NOT_NEGATIVE, "set grpo.kl_coef=0 (off)")


@dataclass(frozen=True, kw_only=True)
class PpoSection(Section):
    """One step: answers to `prompts_per_step` prompts, advantages by a critic (GAE), updates."""

    prompts_per_step: int = 32
    samples_per_prompt: int = 2
    epochs: int = 1  # passes over the step's answers
    mini_batches: int = 1  # updates a pass
    gamma: float = 1.0
    gae_lambda: float = 0.95
    normalize_advantages: bool = True
    clip_low: float = 0.2
    clip_high: float = 0.2
    # of the distance to the first weights, taken from each token's reward; 0: no reference model
    kl_coef: float = 0.0
    critic_learning_rate: float = 1e-5
    value_clip: float = 0.2  # how far a value may move from the old one before its loss is clipped
    critic_warmup_steps: int = 0  # first steps that train the critic only
    router_replay: bool = False  # the policy's tokens go to the experts that the engine chose

    def rules(self) -> Iterator[Rule]:
        yield Rule("prompts_per_step samples_per_prompt epochs mini_batches", *at_least(1))
        yield Rule("critic_warmup_steps", *at_least(0))
        answers = self.prompts_per_step * self.samples_per_prompt
        yield Rule(
            "mini_batches", self.mini_batches <= answers, f"exceeds the step's {answers} answers"
        )
        yield Rule("gamma gae_lambda", *rules.ABOVE_0_TO_1)
        yield Rule("clip_low clip_high critic_learning_rate", *rules.BETWEEN_0_AND_1)
        yield Rule("kl_coef", *rules.NOT_NEGATIVE, "set ppo.kl_coef=0 (off)")
        yield Rule("value_clip", *rules.POSITIVE)


TASKS = ("toy", "chain_sum")
OWN_TASK = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@dataclass(frozen=True, kw_only=True)
class TaskSection(Section):
    """`toy` needs no download and its own small vocabulary; `chain_sum` comes from reasoning-gym.

    `package.module:function` is a task of one's own (see recipes.tasks), which may read the other
    keys, too.
    """

    name: str = MISSING
    num_terms: int = 2  # chain_sum
    num_digits: int = 1  # chain_sum
    # chain_sum: other kinds, as many a step as of the own.
    also_train_digits: list[int] = field(default_factory=list)
    held_out_fraction: float = 0.2
    # Reward of a near miss (see recipes.tasks); never counted as an exact match.
    partial_credit: float = 0.0
    system_prompt: str = ""
    # Problems whose prompt takes more are left out, and counted; null: none is.
    max_prompt_tokens: int | None = None

    def rules(self) -> Iterator[Rule]:
        known = self.name in TASKS or OWN_TASK.fullmatch(self.name)
        words = f"must be one of {', '.join(TASKS)}, or package.module:function"
        yield Rule("name", known, words, "set task.name=chain_sum")
        yield Rule("num_terms", *at_least(2))
        yield Rule("num_digits", *at_least(1))
        sums, undefined = self.name == "chain_sum", f"is not defined for task.name={self.name}"
        yield Rule("also_train_digits", sums or not self.also_train_digits, undefined)
        more = f", other than task.num_digits={self.num_digits}"
        digits = [self.num_digits, *self.also_train_digits]
        yield Rule("also_train_digits", *different_digits(digits, more))
        yield Rule("held_out_fraction", *rules.BETWEEN_0_AND_1)
        if self.max_prompt_tokens is not None:
            yield Rule("max_prompt_tokens", *at_least(1))
        yield Rule("partial_credit", *rules.FROM_0_BELOW_1)
        yield Rule("partial_credit", self.partial_credit == 0 or not sums, undefined)


@dataclass(frozen=True, kw_only=True)
class EvalSection(Section):
    """Greedy answers to held-out problems: at first, every `every` steps, and after the last."""

    every: int = 10  # 0: never
    problems: int = 64  # at most so many held-out problems
    # chain_sum: the same on held-out sums of other digits.
    also_digits: list[int] = field(default_factory=list)

    def rules(self) -> Iterator[Rule]:
        yield Rule("every", *at_least(0), "set eval.every=0 (off)")
        yield Rule("problems", *at_least(1))
        yield Rule("also_digits", *different_digits(self.also_digits), "set eval.also_digits=[2]")


@dataclass(frozen=True, kw_only=True)
class CheckpointSection(Section):
    """A checkpoint every `every` steps, after the last, and after an interrupted one; the newest
    `keep` stay.
    """

    every: int = 10  # 0: never
    keep: int = 1
    # How often a run goes on by itself from its last checkpoint when an actor is lost.
    max_restarts: int = 0

    def rules(self) -> Iterator[Rule]:
        yield Rule("every", *at_least(0), "set checkpoint.every=0 (off)")
        yield Rule("keep", *at_least(1))
        yield Rule("max_restarts", *at_least(0))
        words = "needs checkpoints to go on from, and checkpoint.every=0"
        either = "set checkpoint.every=10, or checkpoint.max_restarts=0"
        yield Rule("max_restarts", self.every > 0 or self.max_restarts == 0, words, either)


OF_PPO = ("critic", "critic_optim")
OPTIM, REFERENCE = "optim", "reference"
# The trainer's, whose content is kept on the host, then the rollout's.
TRAINED = ("params", OPTIM, *OF_PPO)
SAVED = (*TRAINED, REFERENCE)
TAGS = (*SAVED, "weights", "kv_cache", "cuda_graph")


@dataclass(frozen=True, kw_only=True)
class CycleSection(Section):
    """The hand-over: what stays on the device. auto: as much as the plan has room for."""

    resident: Any = "auto"  # or a list of tags
    # Of what leaves, the trainer's tags that leave while the rollout generates and come back while
    # the policy scores: auto (where the plan has room), or a list.
    overlap: Any = "auto"
    # The rollout serves the trainer's own pages: auto (where it can), always or never.
    alias: str = "auto"
    # What leaves goes to what the other side of the device takes next: auto (where nothing leaves
    # beside work, and the plan says that it gains), always, or never: through the driver.
    hand_over: str = "auto"

    def rules(self) -> Iterator[Rule]:
        for key, named, known in (
            ("resident", self.resident, TAGS),
            ("overlap", self.overlap, TRAINED),
        ):
            good, none = named == "auto" or isinstance(named, list), f"set cycle.{key}=[] (none)"
            yield Rule(key, good, "must be auto, or a list of words, as [params, optim]", none)
            listed = named if isinstance(named, list) else []
            unknown = [str(tag) for tag in listed if tag not in known]
            words = f"names unknown tags {', '.join(unknown)}; known: {', '.join(known)}"
            yield Rule(key, not unknown, words, none)
        yield Rule("alias", *one_of("auto", "always", "never"))
        yield Rule("hand_over", *one_of("auto", "always", "never"))
        good = self.hand_over != "always" or self.overlap in ("auto", [])
        words = f"is not for what leaves beside work, cycle.overlap={shown(self.overlap)}"
        yield Rule("hand_over", good, words, "set cycle.hand_over=auto")

    @property
    def named(self) -> list[str]:
        """Tags that `resident` names; none of auto."""
        return [] if self.resident == "auto" else self.resident


GPUS = ("h100-80gb", "h200-141gb", "a100-80gb", "b200-192gb")


@dataclass(frozen=True, kw_only=True)
class ClusterSection(Section):
    """Says how many devices a run takes: one trainer rank each, engines of
    `engine.tensor_parallel_size` devices.

    On the CPU a device is a process pair.
    """

    nnodes: int = 1
    n_gpus_per_node: int = 1
    gpu: str = "h100-80gb"  # what `memsaver plan` reckons with where it is not told
    host_gib: float | None = None  # memory of a machine, for the plan; null: it is not looked at
    # Seconds for one call of all actors: a stage of a large model may take longer.
    call_timeout: float = 600.0

    @property
    def size(self) -> int:
        return self.nnodes * self.n_gpus_per_node

    def rules(self) -> Iterator[Rule]:
        yield Rule("nnodes n_gpus_per_node", *at_least(1))
        yield Rule("call_timeout", *rules.POSITIVE)
        yield Rule("gpu", *one_of(*GPUS))
        if self.host_gib is not None:
            yield Rule("host_gib", *rules.POSITIVE)
