"""The sections of a recipe, each a pydantic dataclass.

The type of a key holds its range or its choices. The docstring of a section describes its keys;
errors, `memsaver keys` and the JSON schema show these descriptions.
"""

import inspect
import math
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, dataclass_transform, get_args

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass

from recipes.config.literals import Checkpointing, Extract

Class = TypeVar("Class")
CONFIG = ConfigDict(
    extra="forbid",
    allow_inf_nan=False,
    coerce_numbers_to_str=True,
    defer_build=True,  # build validators with the first recipe; `memsaver --help` needs none
)

Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
PositiveOrZero = Annotated[float, Field(ge=0)]
BetweenZeroAndOne = Annotated[float, Field(gt=0, lt=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
UpToOne = Annotated[float, Field(gt=0, le=1)]
Dtype = Literal["float32", "bfloat16", "float16"]
MasterDtype = Literal["float32", "bfloat16"]
LossKind = Literal["ppo", "gspo", "cispo"]
Named = Annotated[str, Field(pattern=r"^[^:]+:\w+$")]
"""A function of the user: package.module:function, or folder/file.py:function."""
_LISTED = BeforeValidator(
    lambda names: [names] if isinstance(names, str) else names,
    json_schema_input_type=str | list[str],
)
Names = Annotated[list[str], _LISTED]
"""Names in a list; a single name may be written as a string."""
Address = Annotated[str, Field(pattern=r"^[^/\s]+:\d+$", examples=["10.0.0.1:6379"])]
Aggregation = Literal["token", "sequence", "constant"]
Baseline = Literal["group", "leave_one_out", "batch"]
Scale = Literal["group", "batch", "none"]
WITHIN_GROUPS = ("group", "leave_one_out")
"""Baselines whose advantages are 0 in a group of equal rewards."""
Wish = Literal["auto", "always", "never"]
Gpu = Literal["h100-80gb", "h200-141gb", "a100-80gb", "b200-192gb"]
GPUS = get_args(Gpu)

# Tags of the trainer, whose content the host keeps while they are paused; then the rollout's tags.
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
    """Turn a class into a frozen pydantic dataclass; its docstring describes the keys."""
    cls.__doc__, _, attributes = inspect.cleandoc(cls.__doc__ or "").partition("\n\nAttributes:\n")
    for key, text in re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", attributes, re.M):
        described = Field(description=" ".join(text.split()))
        cls.__annotations__[key] = Annotated[cls.__annotations__[key], described]
    made: Any = dataclass(frozen=True, kw_only=True, config=CONFIG)(cls)
    return made


@cache
def shapes() -> dict[str, dict[str, Any]]:
    """Return the fields of a transformers config (with its model_type) for each shape by name."""
    import yaml

    text = (Path(__file__).parent / "shapes.yaml").read_text()
    return TypeAdapter(dict[str, dict[str, Any]]).validate_python(yaml.safe_load(text))


@section
class ModelSection:
    """The model: a checkpoint at `path`, or random weights of the shape of `shape` or `config`.

    Attributes:
        path: Directory, ORG/NAME on the Hub, or a name that `memsaver fetch` knows; null: random
            weights, drawn on the device.
        shape: Name of a published model's shape, such as qwen2.5-0.5b (shapes.yaml). Unused with a
            path.
        config: Fields of a transformers config, with its model_type. vocab_size defaults to the
            tokenizer's. Unused with a path.
        dtype: Precision of the rollout and of the trainer's forward and backward passes. float16
            trains with a loss scale, and is too narrow for some models.
        fp32_router: Whether the routers of a mixture of experts compute in float32, in rollout and
            trainer.
    """

    path: Annotated[str, Field(min_length=1)] | None = None
    shape: str | None = None
    config: dict[str, Any] | None = None
    dtype: Dtype = "bfloat16"
    fp32_router: bool = False

    @property
    def random_init(self) -> bool:
        """Return whether the weights are random instead of a checkpoint's."""
        return self.path is None

    def random_fields(self) -> dict[str, Any]:
        """Return the config fields of the random model, from `shape` or from `config`."""
        return dict(self.config or {}) if self.shape is None else dict(shapes()[self.shape])


@section
class EngineSection:
    """The rollout engine and its KV pool.

    `kv_tokens` or `mem_fraction_static` sets the pool's size. With neither, the pool holds the
    requests that run together, as far as weights and pool fit 0.9 of a GPU.

    Attributes:
        kind: Engine that generates: memsaver's own (native), or the package vllm or sglang.
        kv_tokens: Tokens of the KV pool on each device, a multiple of page_size.
        mem_fraction_static: Share of a GPU's memory for the engine: weights, KV pool, steps and
            CUDA graphs, on each device.
        page_size: Tokens in a page of the KV pool.
        max_running: Largest number of requests that run together.
        max_prefill_tokens: Largest number of prompt tokens in one step.
        sleep_level: 1 keeps the weights on the host; 2 discards them, and every wake-up syncs them.
        cuda_graphs: Whether steps on a GPU run as CUDA graphs.
        kv_cache_dtype: Precision of the KV pool; auto: model.dtype.
        host_to_device_ratio: Size of the host tier, in multiples of the KV pool; 0: no host tier.
        preemption: With a host tier, how a sample makes room for others: its KV is swapped to the
            host, or recomputed later.
        tensor_parallel_size: Devices that share one engine.
        expert_parallel: Groups into which each layer's experts are divided, a divisor of
            tensor_parallel_size; 1: every device has a part of every expert.
        prefix_states: Number of prompts whose states a model with linear layers keeps; 0: none.
        options: Further arguments of vLLM's or SGLang's engine, such as attention_backend: triton.
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
        """Return whether another project's engine generates."""
        return self.kind != "native"


@section
class TrainerSection:
    """The trainer: AdamW over all parameters, or over the adapters of `lora`.

    Attributes:
        dtype: Precision of masters, gradients and moments; bfloat16 rounds small updates away.
            model.dtype=float16 needs float32.
        learning_rate: Learning rate of AdamW, after the warm-up.
        schedule: Course of the rate after the warm-up: constant, or a fall to final_rate after the
            last of `steps`, linear or along half a cosine.
        warmup_steps: First steps of the run over which the rate rises linearly; 0: no warm-up.
        final_rate: Share of learning_rate (with PPO, also of critic_learning_rate) at which the
            fall ends.
        weight_decay: Decoupled weight decay of matrices; norms and biases have none.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        max_grad_norm: Norm to which larger gradients are scaled down.
        router_aux_loss_coef: Weight of the load-balance loss of a mixture of experts, over all
            tokens of a micro batch; 0: none.
        micro_batch_size: Sequences of the longest prompt and answer in a pass, or as many tokens of
            shorter ones; auto: on a GPU beside a native engine, the largest that saves time and
            fits by the plan; else 4.
        keep_unsharded: Whether unsharded parameters and gradients stay between micro batches: less
            time, more memory; auto: on a GPU where the plan has room, beside a native engine.
        activation_checkpointing: What the backward pass recomputes: whole layers, their MLPs, or
            nothing; auto: on a GPU beside a native engine, what takes least time and fits by the
            plan; else layers.
        cuda_graphs: Whether updates launch layers as CUDA graphs, on one device and without
            experts; auto: on a GPU beside a native engine where it saves time and fits by the plan.
        threads: CPU threads of torch; null: torch's own choice.
        optimizer: With adamw_8bit, moments take 2 bytes a parameter instead of 8; it needs
            bitsandbytes (`pip install 'memsaver[optim]'`).
        optimizer_offload: Whether masters and moments lie in host memory and pass through the
            device in an update.
    """

    dtype: MasterDtype = "float32"
    learning_rate: BetweenZeroAndOne = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: CountOrZero = 0
    final_rate: BelowOne = 0.0
    weight_decay: BelowOne = 0.0
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.999
    max_grad_norm: Positive = 1.0
    router_aux_loss_coef: PositiveOrZero = 0.0
    micro_batch_size: Count | Literal["auto"] = "auto"
    keep_unsharded: bool | Literal["auto"] = "auto"
    activation_checkpointing: Checkpointing | Literal["auto"] = "auto"
    cuda_graphs: bool | Literal["auto"] = "auto"
    threads: Count | None = None
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    optimizer_offload: bool = False


@section
class LoraSection:
    """Adapters on a frozen base: base + alpha / rank * B A.

    Attributes:
        rank: Rank of the adapters, a multiple of 8 for experts; 0: no adapters, all parameters are
            trained.
        alpha: Scale of the adapters: B A is multiplied by alpha / rank.
        target_modules: Layers with adapters; experts: every expert of a mixture has its own.
        merge: Whether a sync merges the adapters into the engine's weights, rounded to model.dtype.
            Otherwise the engine serves them beside the base. auto: only where it must.
    """

    rank: CountOrZero = 0
    alpha: Positive = 32.0
    target_modules: Annotated[list[LoraModule], Field(min_length=1)] = Field(
        default_factory=lambda: list(get_args(Dense))
    )
    merge: bool | Literal["auto"] = "auto"


@section
class SamplingSection:
    """Sampling of training answers; evaluations have the same max_tokens.

    Attributes:
        max_tokens: Tokens of the longest answer.
        length_penalty: Largest deduction from the reward of a long answer; 0: none.
        length_penalty_tokens: Tokens before max_tokens over which the deduction grows from 0 to
            length_penalty; null: a fifth of max_tokens.
        temperature: Sampling temperature. Greedy samples (0) of one prompt would be alike and teach
            nothing. There is no top-k or top-p.
    """

    max_tokens: Count = 512
    length_penalty: PositiveOrZero = 0.0
    length_penalty_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=1e-6)] = 1.0

    @property
    def penalized_tokens(self) -> int:
        """Return the tokens before max_tokens over which the length penalty grows."""
        return self.length_penalty_tokens or math.ceil(self.max_tokens / 5)


@section
class LossSection:
    """The loss of the policy's updates; docs/losses.md has the formulas.

    Attributes:
        kind: Clipped ratios of tokens (ppo) or of whole answers (gspo), log-probabilities with
            clipped weights (cispo), or a function of yours, such as my_losses.py:soft_clip.
        aggregation: What the loss averages: all tokens (token), answers, each the mean of its
            tokens (sequence), or all tokens with sampling.max_tokens as the length of every answer
            (constant).
        clip_low: How far the ratio may fall below 1.
        clip_high: How far the ratio may rise above 1.
        dual_clip: Largest ratio of a token with a negative advantage, such as 3; null: no limit.
        kl_coef: Weight of the KL divergence from the reference; 0: no reference model.
        kl_in: Whether that divergence is part of the loss or of the rewards; auto: of the loss with
            grpo, of the rewards with ppo.
        kl_estimator: Estimate of the divergence at a token; auto: k3 in the loss, k1 in the
            rewards.
        reference_every: Steps after which the reference takes the policy's weights; 0: never.
        entropy_coef: Weight of the entropy, which the loss rewards.
        mask_cut_off: Whether updates leave out answers that max_tokens cut off. With grpo, they
            still count in the advantages of others.
    """

    kind: LossKind | Named = "ppo"
    aggregation: Aggregation = "token"
    clip_low: UpToOne = 0.2
    clip_high: Positive = 0.2
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    kl_coef: PositiveOrZero = 0.0
    kl_in: Literal["auto", "loss", "reward"] = "auto"
    kl_estimator: Literal["auto", "k1", "k2", "k3"] = "auto"
    reference_every: CountOrZero = 0
    entropy_coef: PositiveOrZero = 0.0
    mask_cut_off: bool = False


@section
class CorrectionSection:
    """Correction of the policy's loss for a rollout that computes other probabilities.

    docs/loops.md has the formulas, and says where a rollout is inexact.

    Attributes:
        mode: Importance weights (decoupled), ratios to the rollout's log-probabilities (bypass), or
            figures only (none); auto: token weights of at most 2 where the rollout is inexact, else
            none.
        level: Whether each token has its own weight, or all tokens of an answer share the product
            (sequence) or the geometric mean of their weights.
        how: What happens to a weight out of bounds: truncate sets a weight above `high` to `high`,
            mask sets a weight above `high` or below `low` to 0.
        low: Lower bound of a mask.
        high: Upper bound of the weights.
        reject: Figure of an answer that `reject_above` limits: the mean or the largest size of the
            estimates k1 or k3 of the KL divergence at its tokens; null: no answer is rejected.
        reject_above: Limit in nats. Updates leave out answers whose figure `reject` is larger.
        veto: Limit in nats. Updates leave out an answer if the log-probability of one of its tokens
            is lower in the trainer than in the rollout by more than this; null: no limit.
    """

    mode: Literal["auto", "none", "decoupled", "bypass"] = "auto"
    level: Literal["token", "sequence", "geometric"] = "token"
    how: Literal["truncate", "mask"] = "truncate"
    low: PositiveOrZero = 0.5
    high: Positive = 2.0
    reject: Literal["mean_k1", "max_k1", "mean_k3", "max_k3"] | None = None
    reject_above: Positive | None = None
    veto: Positive | None = None


@section
class LoopSection:
    """What one step of any algorithm samples, and how often it updates.

    Attributes:
        prompts_per_step: Prompts of one step; null: 8 with grpo, 32 with ppo.
        samples_per_prompt: Answers to each prompt, with grpo the group whose rewards the advantages
            compare; null: 8 with grpo, 2 with ppo.
        epochs: Passes over the answers of a step.
        mini_batches: Updates in one pass.
        router_replay: Whether the policy routes tokens to the experts that the engine chose.
        turns: Most answers of one conversation with an environment.
        parallel_environments: Conversations with environments at a time, each of which has a
            process of its own.
        agent_timeout: Seconds that `task.agent` may take for one conversation.
        max_staleness: Updates by which the weights that sample may be older than those that learn.
            1: engines on devices of their own sample the next step's answers during the update.
    """

    prompts_per_step: Count | None = None
    samples_per_prompt: Count | None = None
    epochs: Count = 1
    mini_batches: Count = 1
    router_replay: bool = False
    turns: Count = 8
    parallel_environments: Count = 32
    agent_timeout: Positive = 600.0
    max_staleness: Literal[0, 1] = 0


@section
class GrpoSection:
    """Advantages from the rewards of a step's answers alone.

    Attributes:
        sampling_rounds: Most generations of one step. Above 1, prompts whose answers all have the
            same reward are replaced by new prompts (dynamic sampling).
        baseline: What an answer's reward is compared with: the mean of its group, of the group's
            other answers (leave_one_out, RLOO), of all tokens of the step (batch, REINFORCE++), or
            a function of yours.
        scale: Deviation of rewards that divides the advantages: of the group, of the batch (all
            answers of the step), none, or a function of yours.
    """

    sampling_rounds: Count = 1
    baseline: Baseline | Named = "group"
    scale: Scale | Named = "group"


@section
class PpoSection:
    """Advantages from a critic (GAE), and the critic's updates.

    Attributes:
        gamma: Discount of later rewards.
        gae_lambda: Decay of generalized advantage estimation.
        normalize_advantages: Whether advantages are normalized over all tokens of the updates.
        critic_learning_rate: Learning rate of the critic.
        value_clip: How far a value may move from the old one before its loss is clipped.
        critic_warmup_steps: Number of first steps that train only the critic.
    """

    gamma: UpToOne = 1.0
    gae_lambda: UpToOne = 0.95
    normalize_advantages: bool = True
    critic_learning_rate: BetweenZeroAndOne = 1e-5
    value_clip: Positive = 0.2
    critic_warmup_steps: CountOrZero = 0


DATA_ENDINGS = (".jsonl", ".json", ".csv", ".parquet")


@section
class ProblemSection:
    """One set of problems and the rewards of their answers.

    Attributes:
        name: Source of the problems: toy or guess (need no download), file (`data`),
            reasoning_gym:NAME (a generator of reasoning-gym), or a function of yours (see
            `recipes.tasks`).
        label: Name of the set in figures, of letters, digits and _.-; null: the name of the file,
            generator or function.
        data: With name=file, a JSONL, JSON, CSV or parquet file, a folder of such files, or
            ORG/NAME of a data set on the Hub.
        subset: Configuration of a data set on the Hub, such as main.
        split: Split of a data set on the Hub.
        prompt_column: Column with the prompt: a text, or a list of messages with role and content.
        answer_column: Column with the expected answer; null: there is none.
        parameters: Parameters of the generator or of the custom function by name.
        held_out_fraction: Share of the problems that training never sees; 0: none, if `eval.sets`
            names others or eval.every=0.
        weight: Share of the prompts that come from this set, relative to the other sets' weights.
        rewards: Reward functions, such as my_rewards.py:brief or package.module:function, or the
            packaged exact_match, math and number; empty: the source's own.
        reward_weights: Weight of each reward function in the sum; empty: 1 each.
        extract: Part of an answer that packaged functions, files and reasoning_gym score: the whole
            text, its last number, the content of its last \\boxed{}, or of its last <answer> tag.
        correct_by: Function of `rewards` that decides whether an answer is correct; null: chosen as
            docs/how-to/rewards.md says.
        environment: Class whose methods are tools, or which replies to answers, such as
            my_env.py:Wordle; or a mapping of names to classes, of which the column environment
            chooses. null: the model answers once.
        agent: Function that asks the model by itself, through OpenAI's API, such as
            my_agent.py:solve; in place of an environment.
    """

    name: Annotated[str, Field(pattern=r"^(toy|guess|file|[^:]+:\w+)$", examples=["toy"])]
    label: Annotated[str, Field(pattern=r"^[\w.-]+$")] | None = None
    data: Annotated[str, Field(min_length=1)] | None = None
    subset: str | None = None
    split: str = "train"
    prompt_column: str = "prompt"
    answer_column: str | None = "answer"
    parameters: dict[str, Any] = Field(default_factory=dict)
    held_out_fraction: BelowOne = 0.2
    weight: Positive = 1.0
    rewards: Names = Field(default_factory=list)
    reward_weights: list[float] = Field(default_factory=list)
    extract: Extract = "text"
    correct_by: str | None = None
    environment: Named | dict[str, Named] | None = None
    agent: Named | None = None

    @property
    def environments(self) -> dict[str, str]:
        """Return the classes of `environment` by name, or `agent`; the only one has no name."""
        named = self.environment or self.agent or {}
        return {"": named} if isinstance(named, str) else named

    @property
    def set_name(self) -> str:
        """Return `label`, or the name of the file or data set, of the generator or the function."""
        source = self.name if self.data is None else Path(self.data).name
        path = Path(source.rpartition(":")[2])
        own = path.stem if path.suffix in DATA_ENDINGS else path.name
        return self.label or re.sub(r"[^\w.-]", "_", own)


@section
class TaskSection(ProblemSection):
    """Problems and rewards: one set with the keys below, and further sets in `mixture`.

    Attributes:
        mixture: Further sets to train on, each a mapping with the keys of one set, from `name` to
            `extract`.
        system_prompt: System turn before every prompt that does not begin with one.
        template: Chat template: a Jinja file, or none for the prompt's plain text; null: the
            model's own, or plain text if it has none.
        template_arguments: Further arguments of the chat template, such as enable_thinking: false.
        max_prompt_tokens: Longest prompt. Problems with longer prompts are left out and counted;
            null: no limit.
        timeout: Seconds that one call of a reward function in a worker process may take.
        workers: Processes that call reward functions; 0: the process of the command, where only
            async functions have a timeout; null: half of the CPUs, at most 8.
        concurrency: Largest number of calls of an async reward function at a time; waiting for a
            turn does not count as time of the call. null: no limit.
    """

    mixture: list[ProblemSection] = Field(default_factory=list, max_length=255)
    system_prompt: str = ""
    template: str | None = None
    template_arguments: dict[str, Any] = Field(default_factory=dict)
    max_prompt_tokens: Count | None = None
    timeout: Positive = 30.0
    workers: CountOrZero | None = None
    concurrency: Count | None = None


def sets_by_key(
    task: TaskSection, evaluated: Sequence[ProblemSection]
) -> dict[str, ProblemSection]:
    """Return all sets of a recipe by the key of their section; `evaluated` are `eval.sets`."""
    sets: dict[str, ProblemSection] = {"task": task}
    sets |= {f"task.mixture[{index}]": part for index, part in enumerate(task.mixture)}
    return sets | {f"eval.sets[{index}]": part for index, part in enumerate(evaluated)}


@section
class EvalSection:
    """Answers to held-out problems: at the start, every `every` steps and after the last.

    Attributes:
        every: Steps between evaluations; 0: no evaluation.
        problems: Largest number of problems of each set in one evaluation.
        sets: Sets that are only evaluated, each a mapping with the keys of a set in `task.mixture`.
        samples: Answers to each problem; above 1, rows have avg@n and pass@k.
        temperature: Sampling temperature of evaluations; 0: greedy, with samples=1.
        best: Figure of an evaluation, such as correct or reward_LABEL; the checkpoint with its
            highest value is kept. null: only the newest checkpoints are.
        patience: Evaluations without improvement of `best` after which the run ends; 0: it does not
            end early.
    """

    every: CountOrZero = 10
    problems: Count = 64
    sets: list[ProblemSection] = Field(default_factory=list)
    samples: Count = 1
    temperature: PositiveOrZero = 0.0
    best: str | None = "correct"
    patience: CountOrZero = 0


@section
class CheckpointSection:
    """Checkpoints: every `every` steps, after the last step, and after an interrupted one.

    Attributes:
        every: Steps between checkpoints; 0: no checkpoints.
        keep: Number of newest checkpoints to keep.
        export_every: Steps between exports of the model as a Hugging Face folder, all of which
            stay; 0: only after the last step; null: none.
        max_restarts: How often a run that lost an actor restarts from its last checkpoint.
    """

    every: CountOrZero = 10
    keep: Count = 1
    export_every: CountOrZero | None = 0
    max_restarts: CountOrZero = 0


@section
class CycleSection:
    """The hand-over between the two sides: what stays on the device, and how the rest leaves.

    Attributes:
        resident: Tags that stay on the device; auto: as many as the plan has room for.
        overlap: Tags of the trainer that leave during generation and come back while the policy
            scores; auto: those for which the plan has room.
        alias: Whether the rollout serves the trainer's own pages; auto: if it can.
        hand_over: Whether memory that leaves goes to the other side instead of the driver; auto: if
            no move is overlapped and the plan shows a gain.
    """

    resident: Literal["auto"] | list[Tag] = "auto"
    overlap: Literal["auto"] | list[Trained] = "auto"
    alias: Wish = "auto"
    hand_over: Wish = "auto"

    @property
    def named(self) -> list[Tag]:
        """Return the tags that `resident` names; none for auto."""
        return [] if self.resident == "auto" else self.resident


@section
class ClusterSection:
    """The devices of a run. `engine.tensor_parallel_size` devices of one kind share an engine.

    On a CPU, a device is one or two processes.

    Attributes:
        nnodes: Machines with trainer ranks.
        n_gpus_per_node: Devices of each machine with a trainer rank.
        rollout_gpus: Further devices of each machine, with an engine rank only.
        rollout_nodes: Further machines of the same size, whose devices have an engine rank only.
        colocate: Whether devices with a trainer rank have an engine rank, too.
        gpu: GPU of the plan, unless `memsaver plan --gpu` names another or device=cpu.
        host_gib: Memory of a machine in GiB, for the plan; null: the plan does not check it, and
            with device=cpu takes this machine's.
        call_timeout: Timeout of one call of all actors, in seconds.
        max_engine_restarts: How many native engines that lose an actor are replaced while the run
            goes on.
        address: HOST:PORT of a running Ray cluster; null: that of the Ray job (RAY_ADDRESS), else
            the cluster of this machine if there are several machines, else one that the run starts.
        object_store_gib: Object store of a cluster that the run starts, in GiB, and the least size
            on each node of a running one. Batches and answers pass through it, never weights.
        ports: FIRST-LAST, the ports on which ranks of a process group meet; null: any free port.
    """

    nnodes: Count = 1
    n_gpus_per_node: Count = 1
    rollout_gpus: CountOrZero = 0
    rollout_nodes: CountOrZero = 0
    colocate: bool = True
    gpu: Gpu = "h100-80gb"
    host_gib: Positive | None = None
    call_timeout: Positive = 600.0
    max_engine_restarts: CountOrZero = 2
    address: Address | None = None
    object_store_gib: Annotated[float, Field(ge=0.1)] = 0.25
    ports: Annotated[str, Field(pattern=r"^\d+-\d+$", examples=["20000-20063"])] | None = None

    @property
    def size(self) -> int:
        """Return the number of devices of all machines with a trainer rank."""
        return self.nnodes * self.n_gpus_per_node

    @property
    def per_node(self) -> int:
        """Return the number of devices of a machine."""
        return self.n_gpus_per_node + self.rollout_gpus

    @property
    def machines(self) -> int:
        """Return the number of machines."""
        return self.nnodes + self.rollout_nodes

    @property
    def apart(self) -> int:
        """Return the number of devices of all machines with an engine rank only."""
        return self.nnodes * self.rollout_gpus + self.rollout_nodes * self.per_node

    @property
    def engine_ranks(self) -> int:
        """Return the number of engine ranks of all machines."""
        return self.apart + (self.size if self.colocate else 0)

    @property
    def engines_per_node(self) -> int:
        """Return the number of engine ranks on a machine with trainer ranks."""
        return self.rollout_gpus + (self.n_gpus_per_node if self.colocate else 0)

    @property
    def ranks_per_node(self) -> int:
        """Return the number of ranks of both sides on a machine with trainer ranks."""
        return self.n_gpus_per_node + self.engines_per_node

    @property
    def port_range(self) -> tuple[int, int] | None:
        """Return the first and the last of `ports`."""
        if self.ports is None:
            return None
        first, _, last = self.ports.partition("-")
        return int(first), int(last)
