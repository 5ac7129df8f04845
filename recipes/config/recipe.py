"""The whole recipe: its sections, its top-level keys, and facts that follow from them.

The rules between keys are in `recipes.config.rules`.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import is_dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.fields import FieldInfo

from recipes.config import sections
from recipes.config.sections import TAGS, Tag, section
from recipes.errors import shown


@section
class Recipe:
    """A run of GRPO or PPO in which trainers and engines share their devices' memory.

    Attributes:
        model: The model of trainer and rollout.
        task: Problems and rewards.
        steps: Steps of the run.
        algorithm: Training algorithm; the section of its name applies, and `loop`.
        engine: The rollout engine and its KV pool.
        trainer: The optimizer and the training step.
        lora: Adapters.
        sampling: Sampling of training answers.
        loss: The loss of the policy's updates.
        correction: Correction of that loss for a rollout that computes other probabilities.
        loop: A step's samples and updates.
        grpo: Advantages of GRPO.
        ppo: Advantages and critic of PPO.
        eval: Evaluations.
        checkpoint: Checkpoints and restarts.
        cycle: The hand-over between trainer and rollout.
        cluster: The devices.
        trackers: Where figures and samples go besides the run's folder: tensorboard, wandb, mlflow,
            trackio, swanlab, prometheus, prometheus:PORT, or a function of yours.
        samples: Answers of each step and evaluation in samples.jsonl and in the trackers; 0: none.
        exact: Whether rollout and trainer compute the same bits, which updates check: true stops
            the run at a difference, warn only counts unequal_tokens; auto: warn on GPUs where
            nothing excludes it, else false.
        driver: Either inprocess (one device, in the process of the command) or ray (actors); auto:
            ray for several devices, with `cluster.address` and in a Ray job (RAY_ADDRESS), else
            inprocess.
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
    loop: sections.LoopSection = Field(default_factory=sections.LoopSection)
    grpo: sections.GrpoSection = Field(default_factory=sections.GrpoSection)
    ppo: sections.PpoSection = Field(default_factory=sections.PpoSection)
    eval: sections.EvalSection = Field(default_factory=sections.EvalSection)
    checkpoint: sections.CheckpointSection = Field(default_factory=sections.CheckpointSection)
    cycle: sections.CycleSection = Field(default_factory=sections.CycleSection)
    cluster: sections.ClusterSection = Field(default_factory=sections.ClusterSection)
    trackers: sections.Names = Field(default_factory=list)
    samples: Annotated[int, Field(ge=0)] = 16
    exact: bool | Literal["warn", "auto"] = False
    driver: Literal["inprocess", "ray", "auto"] = "auto"
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0

    @property
    def prompts_per_step(self) -> int:
        """Return the number of prompts of one step."""
        return self.loop.prompts_per_step or (8 if self.algorithm == "grpo" else 32)

    @property
    def samples_per_prompt(self) -> int:
        """Return the number of answers to each prompt."""
        return self.loop.samples_per_prompt or (8 if self.algorithm == "grpo" else 2)

    @property
    def updates_per_step(self) -> int:
        """Return the number of the policy's updates in one step."""
        return self.loop.epochs * self.loop.mini_batches

    @property
    def answers_per_step(self) -> int:
        """Return the number of answers of one step."""
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def answers_per_rank(self) -> int:
        """Return the largest number of answers of one step on a trainer rank."""
        return math.ceil(self.answers_per_step / self.cluster.size)

    @property
    def answers_per_update(self) -> int:
        """Return the largest number of answers of one update on a trainer rank."""
        return math.ceil(self.answers_per_rank / self.loop.mini_batches)

    @property
    def stored_dtype(self) -> str:
        """Return the dtype of the trainer's own parameters, adapters apart."""
        masters_elsewhere = self.lora.rank or self.trainer.optimizer_offload
        return self.model.dtype if masters_elsewhere else self.trainer.dtype

    @property
    def served_adapter(self) -> str | None:
        """Return the name under which the engine serves the adapters; None if none are served.

        `prepare` has turned merge=auto into true for models whose adapters must be merged.
        """
        merges = self.lora.merge if self.lora.merge != "auto" else bool(self.merged_because)
        return "policy" if self.lora.rank and not merges else None

    @property
    def merged_because(self) -> str:
        """Return the key for which adapters must be merged; empty if there is none."""
        reasons = {
            "engine.kind": self.engine.hosted,
            "lora.target_modules": "experts" in self.lora.target_modules,
            "cluster.rollout_nodes": bool(self.cluster.rollout_nodes),
        }
        return next((key for key, merges in reasons.items() if merges), "")

    def regathers(self, micro_batch_size: int) -> int:
        """Return how often a step may gather parameters again for a further micro batch.

        A rank of its own in forward's dtype gathers nothing (`run_alone`).

        Args:
            micro_batch_size: Sequences in a micro batch.

        Returns:
            The number of further micro batches of all updates.
        """
        if self.cluster.size == 1 and self.stored_dtype == self.model.dtype:
            return 0
        repeated = math.ceil(self.answers_per_update / micro_batch_size) - 1
        return repeated * self.updates_per_step

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
        if self.lora.rank and not self.served_adapter and self.model.dtype != "float32":
            return f"adapters merged into {self.model.dtype}"
        if self.loop.max_staleness:
            return f"loop.max_staleness={self.loop.max_staleness}"
        return f"engine.kind={self.engine.kind}" if self.engine.hosted else ""

    def loop_now(self) -> "Recipe":
        """Return a recipe that states the numbers of `loop` which its algorithm decides.

        Returns:
            An equivalent recipe.
        """
        counts = {name: getattr(self, name) for name in ("prompts_per_step", "samples_per_prompt")}
        return replace(self, loop=replace(self.loop, **counts))

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
