"""One whole recipe."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from omegaconf import MISSING

from recipes.recipe.loops import (
    OF_PPO,
    REFERENCE,
    CheckpointSection,
    ClusterSection,
    CycleSection,
    EvalSection,
    GrpoSection,
    PpoSection,
    TaskSection,
)
from recipes.recipe.rules import FieldError, at_least, require
from recipes.recipe.sides import (
    EngineSection,
    LoraSection,
    ModelSection,
    SamplingSection,
    TrainerSection,
)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One run of GRPO or PPO in which trainers and engines share their devices' memory."""

    model: ModelSection = MISSING
    task: TaskSection = MISSING
    steps: int = MISSING
    algorithm: str = "grpo"
    status: str = "run"  # planned: nobody has run it yet
    engine: EngineSection = field(default_factory=EngineSection)
    trainer: TrainerSection = field(default_factory=TrainerSection)
    lora: LoraSection = field(default_factory=LoraSection)
    sampling: SamplingSection = field(default_factory=SamplingSection)
    grpo: GrpoSection = field(default_factory=GrpoSection)
    ppo: PpoSection = field(default_factory=PpoSection)
    eval: EvalSection = field(default_factory=EvalSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    cycle: CycleSection = field(default_factory=CycleSection)
    cluster: ClusterSection = field(default_factory=ClusterSection)
    driver: str = "ray"
    device: str = "auto"  # auto: cuda:0 where there is one, else cpu
    seed: int = 0

    def __post_init__(self) -> None:
        if self.engine.kv_tokens is None and self.engine.mem_fraction_static is None:
            object.__setattr__(self, "engine", replace(self.engine, mem_fraction_static=0.9))
        at_least(self, 1, steps="set steps=3")
        require(self, "seed", 0 <= self.seed < 2**63, "must lie in [0, 2**63)", "set seed=0")
        ok = self.algorithm in ("grpo", "ppo")
        require(self, "algorithm", ok, "must be grpo or ppo", "set algorithm=grpo")
        ok = self.status in ("run", "planned")
        require(
            self, "status", ok, "must be run or planned", "set status=planned until it has been run"
        )
        ok = self.driver in ("inprocess", "ray")
        require(self, "driver", ok, "must be inprocess or ray", "set driver=ray")
        ok = re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device) is not None
        require(self, "device", ok, "must be auto, cpu, cuda or cuda:N", "set device=auto")
        if self.task.name == "chain_sum" and self.model.random_init:
            rule = "a random model has no tokenizer for it"
            raise FieldError(
                "task.name", self.task.name, rule, "set task.name=toy, or model.path=DIRECTORY"
            )
        self._check_also_digits()
        self._check_cluster()
        self._check_keep()
        self._check_warmup()

    @property
    def loop(self) -> GrpoSection | PpoSection:
        """Returns the section of the algorithm."""
        return self.grpo if self.algorithm == "grpo" else self.ppo

    def _check_cluster(self) -> None:
        size, tensor = self.cluster.size, self.engine.tensor_parallel_size
        if size > 1 and self.driver != "ray":
            rule = f"cannot drive {size} devices"
            raise FieldError("driver", self.driver, rule, "set driver=ray")
        if size > 1 and ":" in self.device:
            rule = f"names one of the {size} devices of cluster"
            raise FieldError("device", self.device, rule, "set device=auto")
        if (each := self.cluster.n_gpus_per_node) % tensor:
            name = "engine.tensor_parallel_size"
            rule = f"does not divide cluster.n_gpus_per_node={each}, "
            rule += "and an engine stays on one machine"
            raise FieldError(name, tensor, rule, f"set {name}=1")

    def _check_keep(self) -> None:
        """Only tags that this recipe has."""
        absent = {} if self.algorithm == "ppo" else dict.fromkeys(OF_PPO, "algorithm=ppo")
        if not self.loop.kl_coef:
            absent[REFERENCE] = f"{self.algorithm}.kl_coef above 0"
        elif self.lora.rank:
            absent[REFERENCE] = "lora.rank=0"
        for tag in self.cycle.keep:
            if tag in absent:
                shown = f"[{','.join(tag for tag in self.cycle.keep if tag not in absent)}]"
                rule = f"{tag} is there with {absent[tag]} only"
                raise FieldError("cycle.keep", self.cycle.keep, rule, f"set cycle.keep={shown}")

    def _check_warmup(self) -> None:
        name, warmup = "ppo.critic_warmup_steps", self.ppo.critic_warmup_steps
        if self.algorithm == "ppo" and warmup >= self.steps:
            rule = f"leaves none of steps={self.steps} to the policy"
            raise FieldError(name, warmup, rule, f"set {name}=0, or steps={warmup + 1}")

    def _check_also_digits(self) -> None:
        digits, name = self.eval.also_digits, "eval.also_digits"
        if digits and self.task.name != "chain_sum":
            rule = f"is not defined for task.name={self.task.name}"
            raise FieldError(name, digits, rule, f"set {name}=[]")
        if self.task.num_digits in digits:
            rule = f"has task.num_digits={self.task.num_digits}, which `exact_match` is of"
            others = ",".join(str(each) for each in digits if each != self.task.num_digits)
            raise FieldError(name, digits, rule, f"set {name}=[{others}]")
