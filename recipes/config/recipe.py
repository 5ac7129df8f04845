"""The whole recipe: its sections, its top-level keys, and the rules between keys.

Checks that need the disk or the machine are in `recipes.setup.preparation`.
"""

import difflib
import math
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic.fields import FieldInfo

from recipes.config import sections
from recipes.config.sections import TAGS, Tag, section, shapes
from recipes.errors import shown

HOSTED = {"vllm": "vLLM", "sglang": "SGLang"}
"""Other projects' engines, by `engine.kind`."""

COLDEST = 1e-6
"""Lowest temperature above 0, as in `SamplingParams`."""

VLLM_COLDEST = 0.01
"""Lowest temperature that vLLM uses; it raises lower temperatures to this one."""

Faults = Iterator[tuple[str, str] | tuple[str, str, str]]
"""Key, broken rule and, unless the key's default is the remedy, the remedy."""


class Contradiction(ValueError):
    """Rules between keys that a recipe breaks.

    Attributes:
        faults: A key and a line for each broken rule.
    """

    def __init__(self, faults: list[tuple[str, str]]) -> None:
        self.faults = faults
        super().__init__("\n".join(line for _, line in faults))


@section
class Recipe:
    """A run of GRPO or PPO in which trainers and engines share their devices' memory.

    Attributes:
        model: The model of trainer and rollout.
        task: Problems and rewards.
        steps: Steps of the run.
        algorithm: Training algorithm; the section of its name applies.
        engine: The rollout engine and its KV pool.
        trainer: The optimizer and the training step.
        lora: Adapters.
        sampling: Sampling of training answers.
        loss: The loss of the policy's updates.
        correction: Correction of that loss for a rollout that computes other probabilities.
        grpo: A step of GRPO.
        ppo: A step of PPO.
        eval: Evaluations.
        checkpoint: Checkpoints and restarts.
        cycle: The hand-over between trainer and rollout.
        cluster: The devices.
        trackers: Where figures and samples go besides the run's folder: tensorboard, wandb, mlflow,
            trackio, swanlab, prometheus, prometheus:PORT, or package.module:function.
        samples: Answers of each step and evaluation in samples.jsonl and in the trackers; 0: none.
        exact: Whether rollout and trainer compute the same bits, which updates check: true stops
            the run at a difference, warn only counts unequal_tokens; auto: warn on GPUs where
            nothing excludes it, else false.
        driver: Either inprocess (one device, in the process of the command) or ray (actors).
        device: One of auto (cuda:0 if there is a GPU, else cpu), cpu, cuda and cuda:N.
        seed: Seed of prompts, samples and random weights.
    """

    model: sections.ModelSection
    task: sections.TaskSection
    steps: Annotated[int, Field(ge=1, examples=[3])]
    algorithm: Literal["grpo", "ppo"] = "grpo"
    engine: sections.EngineSection = Field(default_factory=sections.EngineSection)
    trainer: sections.TrainerSection = Field(default_factory=sections.TrainerSection)
    lora: sections.LoraSection = Field(default_factory=sections.LoraSection)
    sampling: sections.SamplingSection = Field(default_factory=sections.SamplingSection)
    loss: sections.LossSection = Field(default_factory=sections.LossSection)
    correction: sections.CorrectionSection = Field(default_factory=sections.CorrectionSection)
    grpo: sections.GrpoSection = Field(default_factory=sections.GrpoSection)
    ppo: sections.PpoSection = Field(default_factory=sections.PpoSection)
    eval: sections.EvalSection = Field(default_factory=sections.EvalSection)
    checkpoint: sections.CheckpointSection = Field(default_factory=sections.CheckpointSection)
    cycle: sections.CycleSection = Field(default_factory=sections.CycleSection)
    cluster: sections.ClusterSection = Field(default_factory=sections.ClusterSection)
    trackers: list[str] = Field(default_factory=list)
    samples: Annotated[int, Field(ge=0)] = 16
    exact: bool | Literal["warn", "auto"] = False
    driver: Literal["inprocess", "ray"] = "ray"
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0

    @property
    def loop(self) -> sections.GrpoSection | sections.PpoSection:
        """Return the section of the algorithm."""
        return self.grpo if self.algorithm == "grpo" else self.ppo

    @property
    def updates_per_step(self) -> int:
        """Return the number of the policy's updates in one step."""
        return self.loop.epochs * self.loop.mini_batches

    @property
    def answers_per_step(self) -> int:
        """Return the number of answers of one step."""
        return self.loop.prompts_per_step * self.loop.samples_per_prompt

    @property
    def answers_per_rank(self) -> int:
        """Return the largest number of answers of one step on a trainer rank."""
        return math.ceil(self.answers_per_step / self.cluster.size)

    @property
    def answers_per_update(self) -> int:
        """Return the largest number of answers of one update on a trainer rank."""
        return math.ceil(self.answers_per_rank / self.loop.mini_batches)

    def regathers(self, micro_batch_size: int) -> int:
        """Return how often a step may gather parameters again for a further micro batch.

        Args:
            micro_batch_size: Sequences in a micro batch.

        Returns:
            The number of further micro batches of all updates.
        """
        repeated = math.ceil(self.answers_per_update / micro_batch_size) - 1
        return repeated * self.updates_per_step

    @property
    def excludes_exact(self) -> str:
        """Return the setting with which exact=auto is false; empty if there is none."""
        excluding = [key for key, *_ in self._faults_of_exact()]
        if self.model.dtype == "float32":
            excluding.append("model.dtype")
        if self.engine.tensor_parallel_size > 2:  # to add in order, ranks gather all sums
            excluding.append("engine.tensor_parallel_size")
        return next((f"{key}={shown(self.value(key))}" for key in excluding), "")

    @property
    def kl_in(self) -> Literal["loss", "reward"]:
        """Return where the KL divergence from the reference counts."""
        usual: Literal["loss", "reward"] = "loss" if self.algorithm == "grpo" else "reward"
        return usual if self.loss.kl_in == "auto" else self.loss.kl_in

    @property
    def kl_estimator(self) -> Literal["k1", "k2", "k3"]:
        """Return the estimate of the KL divergence from the reference at a token."""
        usual: Literal["k1", "k3"] = "k3" if self.kl_in == "loss" else "k1"
        return usual if self.loss.kl_estimator == "auto" else self.loss.kl_estimator

    @property
    def reference_every(self) -> int:
        """Return the steps between refreshes of the reference; 0 if there are none."""
        return self.loss.reference_every if self.loss.kl_coef else 0

    @property
    def correction_mode(self) -> Literal["none", "decoupled", "bypass"]:
        """Return how the loss is corrected for the rollout's probabilities."""
        mode = self.correction.mode
        return mode if mode != "auto" else "decoupled" if self.inexact_rollout else "none"

    @property
    def inexact_rollout(self) -> str:
        """Return why the rollout's probabilities are not quite the trainer's; empty if they are."""
        if self.engine.kv_cache_dtype != "auto":
            return f"engine.kv_cache_dtype={self.engine.kv_cache_dtype}"
        if self.lora.rank and self.model.dtype != "float32":
            return f"adapters merged into {self.model.dtype}"
        return f"engine.kind={self.engine.kind}" if self.engine.hosted else ""

    def value(self, key: str) -> Any:
        """Return the value of a full key.

        Args:
            key: A key such as `engine.kind` or `task.mixture[0].data`.

        Returns:
            The value.
        """
        value: Any = self
        for part in re.findall(r"\w+", key):
            value = value[int(part)] if part.isdigit() else getattr(value, part)
        return value

    def absent_tags(self) -> dict[Tag, str]:
        """Return the tags that this recipe does not have.

        Returns:
            The setting that each tag needs, by tag.
        """
        absent: dict[Tag, str] = {}
        if self.algorithm != "ppo":
            absent |= {"critic": "algorithm=ppo", "critic_optim": "algorithm=ppo"}
        if not self.loss.kl_coef:
            absent["reference"] = "loss.kl_coef above 0"
        elif self.lora.rank:  # The frozen base of the adapters is the reference.
            absent["reference"] = "lora.rank=0"
        if self.trainer.optimizer_offload:
            absent["optim"] = "trainer.optimizer_offload=false"
        return absent

    def present_tags(self) -> list[Tag]:
        """Return the tags that this recipe has.

        Returns:
            The tags, the trainer's first.
        """
        return [tag for tag in TAGS if tag not in self.absent_tags()]

    @model_validator(mode="after")
    def check_rules(self) -> Self:
        """Check all rules between keys.

        Returns:
            The recipe itself, as pydantic requires.

        Raises:
            Contradiction: The recipe breaks a rule; every broken rule is listed.
        """
        if faults := [self._line(*fault) for fault in self._faults()]:
            raise Contradiction(faults)
        return self

    def _line(self, key: str, rule: str, remedy: str = "") -> tuple[str, str]:
        """Return a key and the line about it; the remedy defaults to the key's default value."""
        return key, f"{key}={shown(self.value(key))}: {rule}; {remedy or remedy_of(key)}"

    def _faults(self) -> Faults:
        """Yield the rules between keys that this recipe breaks."""
        if self.model.random_init:
            yield from self._faults_of_random_model()
        yield from self._faults_of_sets()
        if len({*self.trackers}) < len(self.trackers):
            yield "trackers", "names a tracker twice"
        yield from self._faults_of_engine()
        yield from self._faults_of_exact() if self.exact in (True, "warn") else ()
        yield from self._faults_of_training()
        yield from self._faults_of_sampling()
        yield from self._faults_of_devices()
        yield from self._faults_of_cycle()
        if self.engine.kind in HOSTED:
            yield from self._faults_of_hosted(HOSTED[self.engine.kind])

    def _faults_of_random_model(self) -> Faults:
        shape, config = self.model.shape, self.model.config
        if shape is None and config is None:
            remedy = "set model.path=DIRECTORY, or model.shape=qwen2.5-0.5b for random weights"
            yield "model.path", "no model is named", remedy
        elif shape is None:
            if not isinstance((config or {}).get("model_type"), str):
                remedy = "set model.config.model_type=qwen3"
                yield "model.config", "has no model_type", remedy
        elif config is not None:
            remedy = "set model.config=null, or model.shape=null"
            yield "model.shape", "excludes model.config", remedy
        elif shape not in shapes():
            close = difflib.get_close_matches(shape, shapes(), n=1) or ["qwen2.5-0.5b"]
            rule = f"must be one of {', '.join(shapes())}"
            yield "model.shape", rule, f"set model.shape={close[0]}"

    def _faults_of_sets(self) -> Faults:
        keys: dict[str, str] = {}
        sets = sections.sets_by_key(self.task, self.eval.sets)
        for key, part in sets.items():
            file = part.name == "file"
            if file and part.data is None:
                remedy = f"set {key}.data=FILE, or ORG/NAME of a data set on the Hub"
                yield f"{key}.data", "names no data for name=file", remedy
            if part.data is not None and not file:
                yield f"{key}.data", f"needs {key}.name=file", f"set {key}.name=file"
            if file and part.answer_column is None and not part.rewards:
                remedy = f"set {key}.answer_column=answer, or {key}.rewards=[MODULE:FUNCTION]"
                yield f"{key}.answer_column", "without answers, nothing scores", remedy
            if (other := keys.setdefault(part.set_name, key)) != key:
                rule = f"{other} has the name {part.set_name}, too, which figures need apart"
                yield f"{key}.label", rule, f"set {key}.label={part.set_name}_2"
            for name in ("weight", "held_out_fraction") if key.startswith("eval") else ():
                if getattr(part, name) != default_of(f"task.{name}"):
                    yield f"{key}.{name}", "has no effect on a set that is only evaluated"
        trained = [self.task, *self.task.mixture]
        if self.eval.every and not self.eval.sets and not any(p.held_out_fraction for p in trained):
            remedy = "set task.held_out_fraction=0.2, eval.every=0, or eval.sets"
            yield (
                "task.held_out_fraction",
                f"leaves eval.every={self.eval.every} no problem",
                remedy,
            )

    def _faults_of_engine(self) -> Faults:
        engine, tokens, page = self.engine, self.engine.kv_tokens, self.engine.page_size
        size = engine.tensor_parallel_size
        if engine.options is not None and not engine.hosted:
            yield "engine.options", "need engine.kind=vllm or sglang"
        if tokens is not None and engine.mem_fraction_static is not None:
            remedy = "set engine.kv_tokens=null, or engine.mem_fraction_static=null"
            yield "engine.mem_fraction_static", f"excludes engine.kv_tokens={tokens}", remedy
        if tokens is not None and (tokens < 1 or tokens % page):
            rule = f"must be a positive multiple of engine.page_size={page}"
            nearest = max(1, -(-tokens // page)) * page
            yield "engine.kv_tokens", rule, f"set engine.kv_tokens={nearest}"
        if size > 1 and engine.kv_cache_dtype == "fp4_e2m1":
            yield "engine.kv_cache_dtype", f"excludes engine.tensor_parallel_size={size}"
        if size % engine.expert_parallel:
            yield "engine.expert_parallel", f"must divide engine.tensor_parallel_size={size}"

    def _faults_of_exact(self) -> Faults:
        rounds = f"rounds, and exact={shown(self.exact)} compares bits"
        if self.engine.hosted:
            yield "engine.kind", f"computes other bits than exact={shown(self.exact)} promises"
        if self.engine.kv_cache_dtype != "auto":
            yield "engine.kv_cache_dtype", rounds
        if self.lora.rank:
            yield "lora.rank", f"{rounds}: the engine serves merged adapters"
        if self.correction_mode != "none":
            yield "correction.mode", f"has nothing to correct with exact={shown(self.exact)}"
        if self.updates_per_step > 1:
            key = "epochs" if self.loop.epochs > 1 else "mini_batches"
            rule = f"excludes exact={shown(self.exact)}, which compares in a step's only update"
            yield f"{self.algorithm}.{key}", rule

    def _faults_of_training(self) -> Faults:
        offload, rank = self.trainer.optimizer_offload, self.lora.rank
        layers = self.lora.target_modules
        if offload and self.trainer.dtype != "float32":
            yield "trainer.dtype", "trainer.optimizer_offload=true keeps float32 masters"
        if self.model.dtype == "float16" and self.trainer.dtype != "float32":
            yield "trainer.dtype", "model.dtype=float16 needs float32 masters"
        if offload and self.trainer.optimizer != "adamw":
            yield "trainer.optimizer", "excludes trainer.optimizer_offload=true"
        if offload and rank:
            rule = f"is not needed for adapters, which are small (lora.rank={rank})"
            yield "trainer.optimizer_offload", rule
        if self.trainer.batch_invariant and not (
            self.exact in (True, "warn") and self.trainer.keep_unsharded is True
        ):
            rule = "needs exact=true, or warn, and trainer.keep_unsharded=true"
            yield "trainer.batch_invariant", rule
        if self.trainer.batch_invariant and self.algorithm == "ppo":
            rule = "excludes algorithm=ppo: the values of a critic depend on the micro batch"
            yield "trainer.batch_invariant", rule
        if rank % 8 and "experts" in layers:
            rule = "must be a multiple of 8 for adapters of experts"
            yield "lora.rank", rule, f"set lora.rank={rank + -rank % 8}"
        if len({*layers}) < len(layers):
            yield "lora.target_modules", "names a layer twice"
        if self.checkpoint.max_restarts and not self.checkpoint.every:
            rule = "needs checkpoints to continue from, and checkpoint.every=0"
            yield "checkpoint.max_restarts", rule
        yield from self._faults_of_schedule()
        yield from self._faults_of_evaluation()
        yield from self._faults_of_loss()
        yield from self._faults_of_correction()
        yield from self._faults_of_ppo() if self.algorithm == "ppo" else self._faults_of_grpo()

    def _faults_of_schedule(self) -> Faults:
        first = self.ppo.critic_warmup_steps if self.algorithm == "ppo" else 0
        if 0 < self.steps - first <= self.trainer.warmup_steps:
            after = f" after ppo.critic_warmup_steps={first}" if first else ""
            rule = f"leaves none of steps={self.steps}{after} to the whole learning rate"
            yield "trainer.warmup_steps", rule

    def _faults_of_sampling(self) -> Faults:
        most, window = self.sampling.max_tokens, self.sampling.penalized_tokens
        if self.sampling.length_penalty and window > most:
            rule = f"exceeds sampling.max_tokens={most}"
            yield (
                "sampling.length_penalty_tokens",
                rule,
                f"set sampling.length_penalty_tokens={most}",
            )

    def _faults_of_evaluation(self) -> Faults:
        section, temperature = self.eval, self.eval.temperature
        if section.samples > 1 and not temperature:
            rule = "would all be the same greedy answer with eval.temperature=0"
            yield "eval.samples", rule, "set eval.samples=1, or eval.temperature=1.0"
        if 0 < temperature < COLDEST:
            yield "eval.temperature", f"must be 0 (greedy) or at least {COLDEST:g}"
        if section.patience and not section.every:
            yield "eval.patience", "needs evaluations, and eval.every=0"
        if section.patience and section.best is None:
            yield "eval.patience", "needs a figure to improve, and eval.best=null"

    def _faults_of_loss(self) -> Faults:
        answers = self.answers_per_step
        if self.loop.mini_batches > answers:
            yield f"{self.algorithm}.mini_batches", f"exceeds the step's {answers} answers"
        if self.loss.dual_clip is not None and self.loss.kind == "cispo":
            yield "loss.dual_clip", "excludes loss.kind=cispo, which limits all ratios"
        if self.reference_every and self.lora.rank:
            rule = "excludes adapters, whose frozen base is the reference"
            yield "loss.reference_every", f"{rule} (lora.rank={self.lora.rank})"
        if self.loss.kl_coef and self.kl_in == "loss" and self.kl_estimator == "k1":
            rule = "teaches nothing in a loss, because its expected gradient is 0"
            yield "loss.kl_estimator", rule, "set loss.kl_estimator=k3, or loss.kl_in=reward"

    def _faults_of_correction(self) -> Faults:
        section = self.correction
        if section.how == "mask" and section.low >= section.high:
            yield "correction.low", f"must be below correction.high={section.high}"
        if section.reject is not None and section.reject_above is None:
            rule = f"is the limit that correction.reject={section.reject} needs"
            yield "correction.reject_above", rule, "set correction.reject_above=0.1"
        if section.reject is None and section.reject_above is not None:
            yield "correction.reject_above", "needs correction.reject"
        if section.mode == "bypass" and self.loss.kl_coef and self.kl_in == "reward":
            rule = "lacks log-probabilities of the trainer for the KL divergence in the rewards"
            yield "correction.mode", rule, "set correction.mode=decoupled, or loss.kl_in=loss"

    def _faults_of_grpo(self) -> Faults:
        grpo = self.grpo
        if grpo.baseline == "batch" and grpo.scale == "group":
            yield "grpo.scale", "excludes grpo.baseline=batch", "set grpo.scale=batch"
        if grpo.baseline == "batch" and grpo.sampling_rounds > 1:
            yield "grpo.sampling_rounds", "needs advantages within groups, not grpo.baseline=batch"
        if grpo.baseline == "batch" and grpo.prompts_per_step * grpo.samples_per_prompt == 1:
            yield "grpo.prompts_per_step", "leaves grpo.baseline=batch a single answer"
        if grpo.baseline != "batch" and grpo.samples_per_prompt == 1:
            rule = f"leaves grpo.baseline={grpo.baseline} nothing to compare an answer with"
            yield "grpo.samples_per_prompt", rule, "set grpo.samples_per_prompt=8"

    def _faults_of_ppo(self) -> Faults:
        warmup = self.ppo.critic_warmup_steps
        if warmup >= self.steps:
            rule = f"leaves none of steps={self.steps} to the policy"
            yield "ppo.critic_warmup_steps", rule

    def _faults_of_devices(self) -> Faults:
        cluster, size = self.cluster, self.engine.tensor_parallel_size
        devices = cluster.machines * cluster.per_node
        if devices > 1 and self.driver == "inprocess":
            yield "driver", f"cannot drive {devices} devices", "set driver=ray"
        if devices > 1 and ":" in self.device:
            yield "device", f"names one of the {devices} devices of cluster"
        if cluster.address is not None and self.driver == "inprocess":
            yield "cluster.address", "excludes driver=inprocess", "set driver=ray"
        if (ports := cluster.port_range) and not 1024 <= ports[0] <= ports[1] <= 65535:
            yield "cluster.ports", "is not a range of ports from 1024 to 65535"
        if not cluster.colocate and not cluster.apart:
            rule = "leaves no device to the engines (cluster.rollout_gpus=0)"
            yield "cluster.colocate", rule
        kinds = {"rollout_gpus": cluster.rollout_gpus}
        if cluster.colocate:
            kinds = {"n_gpus_per_node": cluster.n_gpus_per_node, **kinds}
        if cluster.rollout_nodes and cluster.per_node % size:
            rule = f"does not divide the {cluster.per_node} devices of a machine"
            yield "engine.tensor_parallel_size", f"{rule} of cluster.rollout_nodes"
        for name, count in kinds.items():
            if count % size:
                rule = f"does not divide cluster.{name}={count}, the devices of one machine"
                yield "engine.tensor_parallel_size", rule

    def _faults_of_cycle(self) -> Faults:
        """Refuse absent tags. Whether the KV cache can grow is checked once the model is known."""
        cycle, absent = self.cycle, self.absent_tags()
        overlap = [] if cycle.overlap == "auto" else cycle.overlap
        for key, named in (("cycle.resident", cycle.named), ("cycle.overlap", overlap)):
            present = shown([tag for tag in named if tag not in absent])
            for tag in (tag for tag in absent if tag in named):
                yield key, f"{tag} exists only with {absent[tag]}", f"set {key}={present}"
        if overlap and cycle.hand_over == "always":
            rule = f"excludes cycle.overlap={shown(overlap)}"
            yield "cycle.hand_over", rule
        if not self.cluster.colocate:
            rule = "needs trainer and engine on one device (cluster.colocate=true)"
            for name, value in (("alias", cycle.alias), ("hand_over", cycle.hand_over)):
                if value == "always":
                    yield f"cycle.{name}", rule
            if overlap:
                yield "cycle.overlap", rule

    def _faults_of_hosted(self, name: str) -> Faults:
        """Refuse settings that a hosted engine cannot follow, or that change log-probabilities."""
        native, kind = "needs the native engine", self.engine.kind
        usual = {
            "engine.mem_fraction_static": f"does not account for {name}'s workspaces and graphs",
            "engine.kv_cache_dtype": "is untested",
            "engine.host_to_device_ratio": native,
            "model.fp32_router": native,
            f"{self.algorithm}.router_replay": native,
            "cluster.nnodes": "is untested above one machine",
            "cluster.rollout_gpus": "is untested",
            "cluster.rollout_nodes": "is untested",
        }
        if kind == "sglang":
            usual["engine.tensor_parallel_size"] = (
                "counts trainer ranks that share an engine; SGLang starts its own processes, set "
                "engine.options.tp_size"
            )
            usual["cluster.n_gpus_per_node"] = "is untested above one engine"
            size = (self.engine.options or {}).get("tp_size", 1)
            if size != 1 and self.driver == "ray":
                rule = f"cannot run engine.options.tp_size={size}: an actor sees one GPU"
                yield "driver", rule, "set driver=inprocess"
        faults = {key: rule for key, rule in usual.items() if self.value(key) != default_of(key)}
        if self.device == "cpu":
            faults["device"] = f"cannot run {name}'s kernels"
        if self.cycle.alias == "always":
            faults["cycle.alias"] = f"excludes {name}, whose buffers lie among its weights"
        if self.cycle.overlap not in ("auto", []):
            faults["cycle.overlap"] = f"needs a KV cache that grows, and {name}'s does not"
        for key in ("sampling.temperature", "eval.temperature"):
            if kind == "vllm" and 0 < self.value(key) < VLLM_COLDEST:
                faults[key] = f"is raised to {VLLM_COLDEST} by vLLM"
        for key, rule in faults.items():
            yield key, f"{rule}, with engine.kind={kind}"


def _fields() -> Iterator[tuple[str, FieldInfo]]:
    sections: Any = Recipe
    for name, field in sections.__pydantic_fields__.items():
        yield name, field
        for key, inner in getattr(field.annotation, "__pydantic_fields__", {}).items():
            yield f"{name}.{key}", inner


FIELDS = dict(_fields())
"""Fields of the dataclasses by section (`engine`) and by full key (`engine.kind`)."""


def keys_of(section: str) -> list[str]:
    """Return the full keys of a section or set in order; an empty name means the top level."""
    if field_of(section) != section:
        return [f"{section}.{name}" for name in sections.ProblemSection.__dataclass_fields__]
    return [key for key in FIELDS if key.rpartition(".")[0] == section]


def is_section(key: str) -> bool:
    """Return whether a key, which may be unknown, names a section."""
    return key in FIELDS and is_dataclass(FIELDS[key].annotation)


def field_of(key: str) -> str:
    """Return the key of `FIELDS` that describes a key; sets in lists are described in `task`.

    >>> field_of("eval.sets[0].data"), field_of("engine.kind")
    ('task.data', 'engine.kind')
    """
    return re.sub(r"^(task\.mixture|eval\.sets)\[\d+\]", "task", key)


def default_of(key: str) -> Any:
    """Return the default of a full key."""
    return FIELDS[field_of(key)].get_default(call_default_factory=True)


def remedy_of(key: str) -> str:
    """Return the setting of a key to a valid value: an example, or the default."""
    if is_section(field_of(key)):
        return f"set {key}.KEY=VALUE"
    value = (FIELDS[field_of(key)].examples or [default_of(key)])[0]
    return f"set {key}={shown(value)}"
