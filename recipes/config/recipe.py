"""One whole recipe."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from omegaconf import MISSING

from recipes.config.loops import (
    CheckpointSection,
    ClusterSection,
    CycleSection,
    EvalSection,
    GrpoSection,
    PpoSection,
    TaskSection,
)
from recipes.config.rules import FieldError, at_least, require
from recipes.config.sides import EngineSection, LoraSection, ModelSection, SamplingSection, TrainerSection


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One run of GRPO or PPO in which trainers and engines share their devices' memory."""

    model: ModelSection = MISSING
    engine: EngineSection = MISSING
    task: TaskSection = MISSING
    steps: int = MISSING
    algorithm: str = "grpo"
    status: str = "run"  # planned: nobody has run it yet
    trainer: TrainerSection = field(default_factory=TrainerSection)
    lora: LoraSection = field(default_factory=LoraSection)
    sampling: SamplingSection = field(default_factory=SamplingSection)
    grpo: GrpoSection = field(default_factory=GrpoSection)
    ppo: PpoSection = field(default_factory=PpoSection)
    eval: EvalSection = field(default_factory=EvalSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    cycle: CycleSection = field(default_factory=CycleSection)
    cluster: ClusterSection = field(default_factory=ClusterSection)
    driver: str = "inprocess"
    device: str = "auto"  # auto: cuda:0 where there is one, else cpu
    seed: int = 0

    def __post_init__(self) -> None:
        at_least(self, 1, steps="set steps=3")
        at_least(self, 0, seed="set seed=0")
        ok = self.algorithm in ("grpo", "ppo")
        require(self, "algorithm", ok, "must be grpo or ppo", "set algorithm=grpo")
        ok = self.status in ("run", "planned")
        require(self, "status", ok, "must be run or planned", "set status=planned until it has been run")
        ok = self.driver in ("inprocess", "ray")
        require(self, "driver", ok, "must be inprocess or ray", "set driver=inprocess")
        ok = re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device) is not None
        require(self, "device", ok, "must be auto, cpu, cuda or cuda:N", "set device=auto")
        if self.task.name != "toy" and self.model.random_init:
            rule = f"has no tokenizer for task.name={self.task.name}"
            raise FieldError("model.random_init", "true", rule, "set task.name=toy, or false and model.path=DIRECTORY")
        self._check_also_digits()
        self._check_cluster()

    @property
    def loop(self) -> GrpoSection | PpoSection:
        """Of the algorithm."""
        return self.grpo if self.algorithm == "grpo" else self.ppo

    def _check_cluster(self) -> None:
        size, tensor = self.cluster.size, self.engine.tensor_parallel_size
        if size > 1 and self.driver != "ray":
            raise FieldError("driver", self.driver, f"cannot drive {size} devices", "set driver=ray")
        if size % tensor:
            name = "engine.tensor_parallel_size"
            raise FieldError(name, tensor, f"does not divide the {size} devices of cluster", f"set {name}=1")

    def _check_also_digits(self) -> None:
        digits = self.eval.also_digits
        if digits and self.task.name != "chain_sum":
            rule = f"is not defined for task.name={self.task.name}"
            raise FieldError("eval.also_digits", digits, rule, "set eval.also_digits=[]")
        if self.task.num_digits in digits:
            rule = f"has task.num_digits={self.task.num_digits}, which `exact_match` is of"
            raise FieldError("eval.also_digits", digits, rule, f"drop {self.task.num_digits}")
