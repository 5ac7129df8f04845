"""Defines what is learnt, by which algorithm, and how the two sides take turns."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from omegaconf import MISSING

from recipes.recipe.rules import at_least, require


@dataclass(frozen=True, kw_only=True)
class GrpoSection:
    """One step: `prompts_per_step` prompts, `samples_per_prompt` answers to each."""

    prompts_per_step: int = 8
    samples_per_prompt: int = 8
    normalize_std: bool = True  # divide a group's centred rewards by their standard deviation
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0.0  # of the distance to the first weights, in the loss; 0: no reference model

    def __post_init__(self) -> None:
        at_least(self, 1, prompts_per_step="set grpo.prompts_per_step=8")
        ok = self.samples_per_prompt >= 2
        rule = "must be at least 2: an advantage compares the samples of one prompt"
        require(self, "samples_per_prompt", ok, rule, "set grpo.samples_per_prompt=8")
        for name in ("clip_low", "clip_high"):
            ok = 0 < getattr(self, name) < 1
            require(self, name, ok, "must lie between 0 and 1", f"set grpo.{name}=0.2")
        ok = 0 <= self.kl_coef < math.inf
        require(
            self, "kl_coef", ok, "must not be negative, nor infinite", "set grpo.kl_coef=0 (off)"
        )


@dataclass(frozen=True, kw_only=True)
class PpoSection:
    """One step: `samples_per_prompt` answers to each of `prompts_per_step` prompts, advantages by a
    critic (GAE), `epochs` passes.
    """

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

    def __post_init__(self) -> None:
        at_least(self, 1, prompts_per_step="set ppo.prompts_per_step=32")
        at_least(self, 1, samples_per_prompt="set ppo.samples_per_prompt=2")
        at_least(self, 1, epochs="set ppo.epochs=1", mini_batches="set ppo.mini_batches=1")
        at_least(self, 0, critic_warmup_steps="set ppo.critic_warmup_steps=0")
        answers = self.prompts_per_step * self.samples_per_prompt
        rule = f"exceeds the step's {answers} answers"
        require(self, "mini_batches", self.mini_batches <= answers, rule, "set ppo.mini_batches=1")
        for name, usual in (("gamma", 1.0), ("gae_lambda", 0.95)):
            ok = 0 < getattr(self, name) <= 1
            require(self, name, ok, "must lie in (0, 1]", f"set ppo.{name}={usual}")
        for name in ("clip_low", "clip_high"):
            ok = 0 < getattr(self, name) < 1
            require(self, name, ok, "must lie between 0 and 1", f"set ppo.{name}=0.2")
        ok = 0 <= self.kl_coef < math.inf
        rule = "must not be negative, nor infinite"
        require(self, "kl_coef", ok, rule, "set ppo.kl_coef=0 (off)")
        ok = 0 < self.critic_learning_rate < 1
        remedy = "set ppo.critic_learning_rate=1e-5"
        require(self, "critic_learning_rate", ok, "must lie between 0 and 1", remedy)
        ok = 0 < self.value_clip < math.inf
        require(self, "value_clip", ok, "must be positive", "set ppo.value_clip=0.2")


TASKS = ("toy", "chain_sum")
OWN_TASK = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@dataclass(frozen=True, kw_only=True)
class TaskSection:
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

    def __post_init__(self) -> None:
        ok = self.name in TASKS or OWN_TASK.fullmatch(self.name) is not None
        rule = f"must be one of {', '.join(TASKS)}, or package.module:function"
        require(self, "name", ok, rule, "set task.name=chain_sum")
        at_least(self, 2, num_terms="set task.num_terms=2")
        at_least(self, 1, num_digits="set task.num_digits=1")
        self._check_also_train_digits()
        ok = 0 < self.held_out_fraction < 1
        rule = "must lie between 0 and 1"
        require(self, "held_out_fraction", ok, rule, "set task.held_out_fraction=0.2")
        ok = 0 <= self.partial_credit < 1
        require(self, "partial_credit", ok, "must lie in [0, 1)", "set task.partial_credit=0")
        ok = self.name != "chain_sum" or self.partial_credit == 0
        rule = f"is not defined for task.name={self.name}"
        require(self, "partial_credit", ok, rule, "set task.partial_credit=0")

    def _check_also_train_digits(self) -> None:
        name, digits = "also_train_digits", self.also_train_digits
        remedy = "set task.also_train_digits=[]"
        ok = not digits or self.name == "chain_sum"
        require(self, name, ok, f"is not defined for task.name={self.name}", remedy)
        different = len({self.num_digits, *digits}) == 1 + len(digits)
        ok = different and all(number >= 1 for number in digits)
        rule = "must be different numbers of at least 1"
        rule += f", other than task.num_digits={self.num_digits}"
        require(self, name, ok, rule, remedy)


@dataclass(frozen=True, kw_only=True)
class EvalSection:
    """Greedy answers to held-out problems, before the first step, every `every` steps and after the
    last.
    """

    every: int = 10  # 0: never
    problems: int = 64  # at most so many held-out problems
    # chain_sum: the same on held-out sums of other digits.
    also_digits: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        at_least(self, 0, every="set eval.every=0 (off)")
        at_least(self, 1, problems="set eval.problems=64")
        different = len(set(self.also_digits)) == len(self.also_digits)
        ok = different and all(digits >= 1 for digits in self.also_digits)
        rule = "must be different numbers of at least 1"
        require(self, "also_digits", ok, rule, "set eval.also_digits=[2]")


@dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    """A checkpoint every `every` steps and after the last; the newest `keep` stay."""

    every: int = 10  # 0: never
    keep: int = 1
    # How often a run goes on by itself from its last checkpoint when an actor is lost.
    max_restarts: int = 0

    def __post_init__(self) -> None:
        at_least(self, 0, every="set checkpoint.every=0 (off)")
        at_least(self, 1, keep="set checkpoint.keep=1")
        at_least(self, 0, max_restarts="set checkpoint.max_restarts=0")
        ok = self.every > 0 or self.max_restarts == 0
        rule = "needs checkpoints to go on from, and checkpoint.every=0"
        remedy = "set checkpoint.every=10, or checkpoint.max_restarts=0"
        require(self, "max_restarts", ok, rule, remedy)


OF_PPO = ("critic", "critic_optim")
REFERENCE = "reference"
# The trainer's, then the rollout's.
TAGS = ("params", "optim", *OF_PPO, REFERENCE, "weights", "kv_cache", "cuda_graph")


@dataclass(frozen=True, kw_only=True)
class CycleSection:
    """The hand-over: the tags in `keep` stay on the device, where there is room for both sides'
    memory.
    """

    keep: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        unknown = [tag for tag in self.keep if tag not in TAGS]
        rule = f"names unknown tags {', '.join(unknown)}; known: {', '.join(TAGS)}"
        require(self, "keep", not unknown, rule, "set cycle.keep=[] to keep none")


GPUS = ("h100-80gb", "h200-141gb", "a100-80gb", "b200-192gb")


@dataclass(frozen=True, kw_only=True)
class ClusterSection:
    """Says how many devices a run takes: one trainer rank each, engines of
    `engine.tensor_parallel_size` devices.

    On the CPU a device is a process pair.
    """

    nnodes: int = 1
    n_gpus_per_node: int = 1
    gpu: str = "h100-80gb"  # what `memsaver plan` reckons with where it is not told
    # Seconds for one call of all actors: a stage of a large model may take longer.
    call_timeout: float = 600.0

    @property
    def size(self) -> int:
        return self.nnodes * self.n_gpus_per_node

    def __post_init__(self) -> None:
        at_least(
            self, 1, nnodes="set cluster.nnodes=1", n_gpus_per_node="set cluster.n_gpus_per_node=1"
        )
        ok = 0 < self.call_timeout < math.inf
        require(self, "call_timeout", ok, "must be positive", "set cluster.call_timeout=600")
        rule = f"must be one of {', '.join(GPUS)}"
        require(self, "gpu", self.gpu in GPUS, rule, "set cluster.gpu=h100-80gb")
