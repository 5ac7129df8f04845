"""Defines what is learnt, by which algorithm, and how the two sides take turns."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from recipes.recipe import rules
from recipes.recipe.rules import Rule, Section, at_least, different_digits, one_of, shown


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
    """A checkpoint every `every` steps and after the last; the newest `keep` stay."""

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

    keep: Any = "auto"  # or a list of tags
    # Of what leaves, the trainer's tags that leave while the rollout generates and come back while
    # the policy scores: auto (where the plan has room), or a list.
    overlap: Any = "auto"
    # The rollout serves the trainer's own pages: auto (where it can), always or never.
    alias: str = "auto"
    # What leaves goes to what the other side of the device takes next: auto (where nothing leaves
    # beside work, and the plan says that it gains), always, or never: through the driver.
    hand_over: str = "auto"

    def rules(self) -> Iterator[Rule]:
        for key, named, known in (("keep", self.keep, TAGS), ("overlap", self.overlap, TRAINED)):
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
        """Tags that `keep` names; none of auto."""
        return [] if self.keep == "auto" else self.keep


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
