"""The sections of a recipe, each a pydantic dataclass.

A range or a choice is the type of its key. What the docstring of a section says about a key is the
key's description, which errors, `memsaver keys` and the JSON schema show.
"""

import inspect
import re
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, dataclass_transform, get_args

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass

Class = TypeVar("Class")
CONFIG = ConfigDict(
    extra="forbid",
    allow_inf_nan=False,
    coerce_numbers_to_str=True,
    defer_build=True,  # until a recipe is made: `memsaver --help` makes none
)

Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
PositiveOrZero = Annotated[float, Field(ge=0)]
BetweenZeroAndOne = Annotated[float, Field(gt=0, lt=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
UpToOne = Annotated[float, Field(gt=0, le=1)]
Dtype = Literal["float32", "bfloat16"]
Wish = Literal["auto", "always", "never"]
Gpu = Literal["h100-80gb", "h200-141gb", "a100-80gb", "b200-192gb"]
GPUS = get_args(Gpu)

# Tags of the trainer, whose content is kept on the host; then those of the rollout.
Trained = Literal["params", "optim", "critic", "critic_optim"]
Tag = Literal[Trained, "reference", "weights", "kv_cache", "cuda_graph"]
TRAINED: tuple[Trained, ...] = get_args(Trained)
SAVED = (*TRAINED, "reference")
TAGS: tuple[Tag, ...] = get_args(Tag)

Dense = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LoraModule = Literal[Dense, "experts"]
LORA_MODULES: tuple[LoraModule, ...] = get_args(LoraModule)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(Field,))
def section(cls: type[Class]) -> type[Class]:
    """Make a frozen pydantic dataclass, whose docstring describes its keys as attributes."""
    cls.__doc__, _, attributes = inspect.cleandoc(cls.__doc__ or "").partition("\n\nAttributes:\n")
    for key, text in re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", attributes, re.M):
        described = Field(description=" ".join(text.split()))
        cls.__annotations__[key] = Annotated[cls.__annotations__[key], described]
    made: Any = dataclass(frozen=True, kw_only=True, config=CONFIG)(cls)
    return made


@cache
def shapes() -> dict[str, dict[str, Any]]:
    """Return the fields of a transformers config, with its model_type, by name of the shape."""
    import yaml

    text = (Path(__file__).parent / "shapes.yaml").read_text()
    return TypeAdapter(dict[str, dict[str, Any]]).validate_python(yaml.safe_load(text))


@section
class ModelSection:
    """The model: of `path`, or with random weights of `shape` or of `config`, one of the two.

    Attributes:
        path: A directory, ORG/NAME of the Hub, or a name that `memsaver fetch` knows; null: random
            weights, made on the device.
        shape: Shape of a published model, as qwen2.5-0.5b (a name in shapes.yaml). Unused with a
            path.
        config: Fields of a transformers config with its model_type; vocab_size is the tokenizer's
            unless given. Unused with a path.
        dtype: Precision of the rollout and of the trainer's forward and backward passes.
        fp32_router: Whether the routers of a mixture of experts compute in float32, on both sides.
    """

    path: Annotated[str, Field(min_length=1)] | None = None
    shape: str | None = None
    config: dict[str, Any] | None = None
    dtype: Dtype = "bfloat16"
    fp32_router: bool = False

    @property
    def random_init(self) -> bool:
        """True where the weights are random instead of a checkpoint's."""
        return self.path is None

    def random_fields(self) -> dict[str, Any]:
        """Return the config of the random model: its shape's fields, or those of the recipe."""
        return dict(self.config or {}) if self.shape is None else dict(shapes()[self.shape])


@section
class EngineSection:
    """The rollout engine and its KV pool.

    The pool's size follows from `kv_tokens` or `mem_fraction_static`. With neither, the pool holds
    the requests that run together, within 0.9 of a GPU.

    Attributes:
        kind: Which engine generates: memsaver's own, or the package of that name.
        kv_tokens: Tokens of the KV pool on each device, a multiple of page_size.
        mem_fraction_static: Share of a GPU's bytes for weights and KV pool, on each device.
        page_size: Tokens of a page of the KV pool.
        max_running: Requests that run together.
        max_prefill_tokens: Prompt tokens of one step.
        sleep_level: 1 keeps the weights on the host; 2 discards them, and every wake-up syncs them.
        cuda_graphs: Whether a GPU decodes by CUDA graphs.
        kv_cache_dtype: What the pool stores; auto is model.dtype.
        host_to_device_ratio: Host memory below the pool, in sizes of the pool; 0: none.
        preemption: What happens, with host memory below the pool, to a sample that has to make
            room.
        tensor_parallel_size: Devices that share one engine.
        expert_parallel: Groups of each layer's experts, a divisor of tensor_parallel_size; 1: every
            device has a part of every expert.
        prefix_states: Prompts whose states are kept, of a model with linear layers; 0: none.
        options: Further arguments of vLLM's or SGLang's engine, as attention_backend: triton.
    """

    kind: Literal["native", "vllm", "sglang"] = "native"
    kv_tokens: int | None = None
    mem_fraction_static: BetweenZeroAndOne | None = None
    page_size: Count = 16
    max_running: Count = 64
    max_prefill_tokens: Count = 2048
    sleep_level: Literal[1, 2] = 2
    cuda_graphs: bool = True
    kv_cache_dtype: Literal["auto", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1"] = "auto"
    host_to_device_ratio: PositiveOrZero = 0.0
    preemption: Literal["swap", "recompute"] = "swap"
    tensor_parallel_size: Count = 1
    expert_parallel: Count = 1
    prefix_states: CountOrZero = 16
    options: dict[str, Any] | None = None

    @property
    def hosted(self) -> bool:
        """True where another project's engine generates."""
        return self.kind != "native"


@section
class TrainerSection:
    """AdamW over all parameters.

    Attributes:
        dtype: Precision of masters, gradients and moments; bfloat16 rounds small updates away.
        learning_rate: Learning rate of AdamW; where it decays, of the first update.
        lr_decay: Whether the rate falls linearly to 0 after the last of `steps`. Resumed with other
            steps, it falls to 0 there, from the rate of the last update.
        weight_decay: Decoupled weight decay.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        max_grad_norm: Norm to which larger gradients are scaled down.
        router_aux_loss_coef: Weight of the load-balance loss of a mixture of experts, over all
            tokens of a micro batch; 0: none.
        micro_batch_size: Sequences of a forward and backward pass, of the longest; of shorter ones
            as many more as take no more tokens.
        activation_checkpointing: What the backward pass computes again instead of keeping it.
        threads: Threads of torch on the CPU; null: torch's own choice.
        optimizer_offload: Whether masters and moments lie in host memory and pass through the
            device in an update.
    """

    dtype: Dtype = "float32"
    learning_rate: BetweenZeroAndOne = 1e-6
    lr_decay: bool = False
    weight_decay: BelowOne = 0.0
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.999
    max_grad_norm: Positive = 1.0
    router_aux_loss_coef: PositiveOrZero = 0.0
    micro_batch_size: Count = 4
    activation_checkpointing: Literal["layers", "mlp", "none"] = "layers"
    threads: Count | None = None
    optimizer_offload: bool = False


@section
class LoraSection:
    """Adapters on a frozen base: base + alpha / rank * B A, merged while the weights are synced.

    Attributes:
        rank: Rank of the adapters, a multiple of 8 for experts; 0: all parameters are trained.
        alpha: Scale of the adapters: B A is added times alpha / rank.
        target_modules: Layers with adapters; experts are those of a mixture, each its own.
    """

    rank: CountOrZero = 0
    alpha: Positive = 32.0
    target_modules: Annotated[list[LoraModule], Field(min_length=1)] = Field(
        default_factory=lambda: list(get_args(Dense))
    )


@section
class SamplingSection:
    """Training samples; evaluation is greedy with the same max_tokens.

    Attributes:
        max_tokens: Tokens of the longest answer.
        temperature: Sampling temperature. The engine computes none colder; greedy samples of one
            prompt are alike and teach nothing.
        top_k: Off: an update takes log-probabilities over the whole vocabulary.
        top_p: Off: an update takes log-probabilities over the whole vocabulary.
    """

    max_tokens: Count = 512
    temperature: Annotated[float, Field(ge=1e-6)] = 1.0
    top_k: Literal[0] = 0
    top_p: Annotated[float, Field(ge=1, le=1)] = 1.0


@section
class GrpoSection:
    """One step of GRPO: answers to some prompts, rewards compared within a prompt, one update.

    Attributes:
        prompts_per_step: Prompts of one step.
        samples_per_prompt: Answers to each prompt; an advantage compares them.
        normalize_std: Whether a group's centered rewards are divided by their standard deviation.
        clip_low: How far the ratio may fall below 1.
        clip_high: How far the ratio may rise above 1.
        kl_coef: Weight of the KL divergence from the first weights, in the loss; 0: no reference
            model.
        router_replay: Whether the trainer's tokens go to the experts that the engine chose.
    """

    prompts_per_step: Count = 8
    samples_per_prompt: Annotated[int, Field(ge=2)] = 8
    normalize_std: bool = True
    clip_low: BetweenZeroAndOne = 0.2
    clip_high: BetweenZeroAndOne = 0.2
    kl_coef: PositiveOrZero = 0.0
    router_replay: bool = False


@section
class PpoSection:
    """One step of PPO: answers to some prompts, advantages by a critic (GAE), updates.

    Attributes:
        prompts_per_step: Prompts of one step.
        samples_per_prompt: Answers to each prompt.
        epochs: Passes over the step's answers.
        mini_batches: Updates of one pass.
        gamma: Discount of later rewards.
        gae_lambda: Decay of generalized advantage estimation.
        normalize_advantages: Whether advantages are normalized over all tokens of the step.
        clip_low: How far the ratio may fall below 1.
        clip_high: How far the ratio may rise above 1.
        kl_coef: Weight of the KL divergence from the first weights, in each token's reward; 0: no
            reference model.
        critic_learning_rate: Learning rate of the critic.
        value_clip: How far a value may move from the old one before its loss is clipped.
        critic_warmup_steps: First steps, which train the critic only.
        router_replay: Whether the policy's tokens go to the experts that the engine chose.
    """

    prompts_per_step: Count = 32
    samples_per_prompt: Count = 2
    epochs: Count = 1
    mini_batches: Count = 1
    gamma: UpToOne = 1.0
    gae_lambda: UpToOne = 0.95
    normalize_advantages: bool = True
    clip_low: BetweenZeroAndOne = 0.2
    clip_high: BetweenZeroAndOne = 0.2
    kl_coef: PositiveOrZero = 0.0
    critic_learning_rate: BetweenZeroAndOne = 1e-5
    value_clip: Positive = 0.2
    critic_warmup_steps: CountOrZero = 0
    router_replay: bool = False


@section
class TaskSection:
    """Problems and their rewards. `toy` needs no download; `chain_sum` comes from reasoning-gym.

    A task of one's own (`package.module:function`, see `recipes.tasks`) may read the other keys.

    Attributes:
        name: Either toy, chain_sum, or package.module:function for a task of one's own.
        num_terms: Terms of a chain_sum.
        num_digits: Digits of each term of a chain_sum.
        also_train_digits: Other numbers of digits of chain_sum; a step takes as many prompts of
            each.
        held_out_fraction: Share of the problems that are never trained on.
        partial_credit: Reward of a near miss, which never counts as an exact match.
        system_prompt: Text before every question.
        max_prompt_tokens: Problems with a longer prompt are left out, and counted; null: none is.
    """

    name: Annotated[str, Field(pattern=r"^(toy|chain_sum|\w+(\.\w+)*:\w+)$", examples=["toy"])]
    num_terms: Annotated[int, Field(ge=2)] = 2
    num_digits: Count = 1
    also_train_digits: list[Count] = Field(default=[])
    held_out_fraction: BetweenZeroAndOne = 0.2
    partial_credit: BelowOne = 0.0
    system_prompt: str = ""
    max_prompt_tokens: Count | None = None


@section
class EvalSection:
    """Greedy answers to held-out problems: at first, every `every` steps, and after the last.

    Attributes:
        every: Steps between evaluations; 0: none.
        problems: The most problems of one evaluation.
        also_digits: Other numbers of digits of chain_sum, each evaluated the same way.
    """

    every: CountOrZero = 10
    problems: Count = 64
    also_digits: list[Count] = Field(default=[])


@section
class CheckpointSection:
    """Checkpoints: every `every` steps, after the last step, and after an interrupted one.

    Attributes:
        every: Steps between checkpoints; 0: none.
        keep: Newest checkpoints that stay.
        max_restarts: How often a run that lost an actor continues from its last checkpoint.
    """

    every: CountOrZero = 10
    keep: Count = 1
    max_restarts: CountOrZero = 0


@section
class CycleSection:
    """The hand-over between the two sides: what stays on the device, and how the rest leaves.

    Attributes:
        resident: Tags that stay on the device; auto: as many as the plan has room for.
        overlap: Tags of the trainer that leave while the rollout generates and come back while the
            policy scores; auto: where the plan has room.
        alias: Whether the rollout serves the trainer's own pages; auto: where it can.
        hand_over: Whether what leaves goes to the other side in place of the driver; auto: where
            nothing leaves during work, and the plan says that it gains.
    """

    resident: Literal["auto"] | list[Tag] = "auto"
    overlap: Literal["auto"] | list[Trained] = "auto"
    alias: Wish = "auto"
    hand_over: Wish = "auto"

    @property
    def named(self) -> list[Tag]:
        """Tags that `resident` names; none of auto."""
        return [] if self.resident == "auto" else self.resident


@section
class ClusterSection:
    """The devices: one trainer rank each, and engines of `engine.tensor_parallel_size` devices.

    On the CPU a device is a pair of processes.

    Attributes:
        nnodes: Machines.
        n_gpus_per_node: Devices of each machine.
        gpu: Which GPU a plan is for where `memsaver plan` names none.
        host_gib: Memory of a machine, for the plan; null: the plan does not look at it.
        call_timeout: Seconds for one call of all actors; a stage of a large model may take longer.
    """

    nnodes: Count = 1
    n_gpus_per_node: Count = 1
    gpu: Gpu = "h100-80gb"
    host_gib: Positive | None = None
    call_timeout: Positive = 600.0

    @property
    def size(self) -> int:
        """Devices of all machines."""
        return self.nnodes * self.n_gpus_per_node
