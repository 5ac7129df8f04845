"""Defines what a recipe says: frozen sections, each with its own rules.

A section checks what it can see by itself, `Recipe` what takes two of them,
`recipes.setup.preparation` what takes the disk or the machine.
"""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace

from omegaconf import MISSING

from recipes.config.rules import FieldError, Rule, Section, at_least, one_of, shown
from recipes.config.sections import (
    COOL,
    GPUS,
    HOSTED,
    OF_PPO,
    OPTIM,
    REFERENCE,
    SAVED,
    TAGS,
    CheckpointSection,
    ClusterSection,
    CycleSection,
    EngineSection,
    EvalSection,
    GrpoSection,
    LoraSection,
    ModelSection,
    PpoSection,
    SamplingSection,
    TaskSection,
    TrainerSection,
)

__all__ = [
    "GPUS",
    "SAVED",
    "TAGS",
    "CheckpointSection",
    "ClusterSection",
    "CycleSection",
    "EngineSection",
    "EvalSection",
    "FieldError",
    "GrpoSection",
    "LoraSection",
    "ModelSection",
    "PpoSection",
    "Recipe",
    "SamplingSection",
    "TaskSection",
    "TrainerSection",
    "switching",
]


@dataclass(frozen=True, kw_only=True)
class Recipe(Section):
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

    @property
    def loop(self) -> GrpoSection | PpoSection:
        """Returns the section of the algorithm."""
        return self.grpo if self.algorithm == "grpo" else self.ppo

    def rules(self) -> Iterator[Rule]:
        yield Rule("steps", *at_least(1), "set steps=3")
        yield Rule("seed", 0 <= self.seed < 2**63, "must lie in [0, 2**63)")
        yield Rule("algorithm", *one_of("grpo", "ppo"))
        yield Rule("status", *one_of("run", "planned"), "set status=planned until it has been run")
        yield Rule("driver", *one_of("inprocess", "ray"))
        device = re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device)
        yield Rule("device", device, "must be auto, cpu, cuda or cuda:N")
        sums, remedy = self.task.name == "chain_sum", "set task.name=toy, or model.path=DIRECTORY"
        words = "a random model has no tokenizer for it"
        yield Rule("task.name", not (sums and self.model.random_init), words, remedy)
        yield from self._rules_of_digits(sums)
        yield from self._rules_of_devices()
        yield from self._rules_of_tags()
        yield from self._rules_of_overlap()
        if self.engine.kind in HOSTED:
            yield from self._rules_of_hosted(HOSTED[self.engine.kind])
        words = f"adapters are small, and lora.rank={self.lora.rank}"
        good = not (self.trainer.optimizer_offload and self.lora.rank)
        key = "trainer.optimizer_offload"
        yield Rule(key, good, words, f"set {key}=false")
        warmup, remedy = self.ppo.critic_warmup_steps, "set ppo.critic_warmup_steps=0, or steps="
        words = f"leaves none of steps={self.steps} to the policy"
        good = self.algorithm != "ppo" or warmup < self.steps
        yield Rule("ppo.critic_warmup_steps", good, words, f"{remedy}{warmup + 1}")

    def _rules_of_digits(self, sums: bool) -> Iterator[Rule]:
        also, own, key = self.eval.also_digits, self.task.num_digits, "eval.also_digits"
        undefined = f"is not defined for task.name={self.task.name}"
        yield Rule(key, sums or not also, undefined, f"set {key}=[]")
        words = f"has task.num_digits={own}, which `exact_match` is of"
        others = shown([each for each in also if each != own])
        yield Rule(key, own not in also, words, f"set {key}={others}")

    def _rules_of_devices(self) -> Iterator[Rule]:
        size, each = self.cluster.size, self.cluster.n_gpus_per_node
        good = size == 1 or self.driver == "ray"
        yield Rule("driver", good, f"cannot drive {size} devices", "set driver=ray")
        good = size == 1 or ":" not in self.device
        yield Rule("device", good, f"names one of the {size} devices of cluster")
        key, words = "engine.tensor_parallel_size", "and an engine stays on one machine"
        words = f"does not divide cluster.n_gpus_per_node={each}, {words}"
        good = each % self.engine.tensor_parallel_size == 0
        yield Rule(key, good, words, f"set {key}=1")

    def _rules_of_tags(self) -> Iterator[Rule]:
        """Only tags that this recipe has are kept."""
        absent = self.absent_tags()
        lists = {"cycle.resident": self.cycle.resident, "cycle.overlap": self.cycle.overlap}
        for key, named in lists.items():
            if isinstance(named, list):
                there = shown([tag for tag in named if tag not in absent])
                for tag, words in absent.items():
                    words = f"{tag} is there with {words} only"
                    yield Rule(key, tag not in named, words, f"set {key}={there}")

    def _rules_of_overlap(self) -> Iterator[Rule]:
        """Refuse what `rollout.config.why_one_size` has against a pool that grows; of a model it
        is asked when that is there.
        """
        engine, named = self.engine, self.cycle.overlap not in ("auto", [])
        ranks, tier = "engine.tensor_parallel_size", "engine.host_to_device_ratio"
        fixed = {f"{ranks}={engine.tensor_parallel_size}": engine.tensor_parallel_size > 1}
        fixed[f"{tier}={engine.host_to_device_ratio}"] = engine.host_to_device_ratio > 0
        for setting, applies in fixed.items():
            words = f"needs a KV cache that grows, and with {setting} it does not"
            yield Rule("cycle.overlap", not (named and applies), words, "set cycle.overlap=auto")

    def _rules_of_hosted(self, name: str) -> Iterator[Rule]:
        """Refuses what an engine as it comes cannot do, or would do to log-probabilities."""
        beside = f"with engine.kind={self.engine.kind}"
        words = f"is not for {name}'s kernels, {beside}"
        remedy = "set device=auto where there is a GPU, or engine.kind=native"
        yield Rule("device", self.device != "cpu", words, remedy)
        words = f"takes several engines, and one was tried, {beside}"
        one = self.cluster.n_gpus_per_node == 1 or name == "vLLM"
        yield Rule("cluster.n_gpus_per_node", one, words, "set cluster.n_gpus_per_node=1")
        words = f"takes several machines, and one was tried, {beside}"
        yield Rule("cluster.nnodes", self.cluster.nnodes == 1, words, "set cluster.nnodes=1")
        words = f"is not for weights that {name}'s buffers lie among, {beside}"
        yield Rule("cycle.alias", self.cycle.alias != "always", words, "set cycle.alias=never")
        words = f"needs a KV cache that grows, and {name}'s does not, {beside}"
        grows_not = self.cycle.overlap in ("auto", [])
        yield Rule("cycle.overlap", grows_not, words, "set cycle.overlap=auto")
        words = f"is the native engine's, {beside}"
        yield Rule(f"{self.algorithm}.router_replay", not self.loop.router_replay, words)
        yield Rule("model.fp32_router", not self.model.fp32_router, words)
        if name == "vLLM" and self.sampling.temperature < COOL:
            from rollout.vllm import COLDEST

            words = f"is raised to {COLDEST} by vLLM, {beside}"
            warm = self.sampling.temperature >= COLDEST
            yield Rule("sampling.temperature", warm, words, "set sampling.temperature=1.0")

    def absent_tags(self) -> dict[str, str]:
        """Tags that this recipe does not have, and the setting that each is there with."""
        absent = {} if self.algorithm == "ppo" else dict.fromkeys(OF_PPO, "algorithm=ppo")
        if not self.loop.kl_coef:
            absent[REFERENCE] = f"{self.algorithm}.kl_coef above 0"
        elif self.lora.rank:
            absent[REFERENCE] = "lora.rank=0"
        if self.trainer.optimizer_offload:
            absent[OPTIM] = "trainer.optimizer_offload=false"
        return absent

    def keepable_tags(self) -> list[str]:
        """Tags that `cycle.resident` may name; with `cycle.alias` the weights have no pages."""
        absent = {*self.absent_tags(), *(["weights"] if self.cycle.alias == "always" else [])}
        return [tag for tag in TAGS if tag not in absent]


def switching(
    recipe: Recipe, resident: Collection[str], overlap: Collection[str] = (), hand_over: bool = True
) -> Recipe:
    """Returns the recipe with its switch decided; what leaves beside work is not handed over."""
    way = "always" if hand_over and not overlap else "never"
    decided = replace(recipe.cycle, resident=list(resident), overlap=list(overlap), hand_over=way)
    return replace(recipe, cycle=decided)
