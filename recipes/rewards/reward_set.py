"""Reward functions of one set of problems: their names, weights, and the sum for an answer."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from recipes.config.literals import Extract
from recipes.errors import RecipeError, counted, one_line, shown
from recipes.rewards.packaged import IN_PROCESS, PACKAGED
from recipes.rewards.score import Answer, Score, Scored, as_reward

Source = str | Callable[..., Any]
"""A reward function: its name in a recipe, or the callable itself."""


class EnvironmentReward:
    """The reward that an environment gives, as a reward function.

    Args:
        label: Name of the environment's class, or of a function that takes the environment.
        function: The function; empty: the environment itself gives the reward.
        key: Key of the set that names it.
    """

    linear = True

    def __init__(self, label: str, function: str = "", key: str = "environment") -> None:
        self.label, self.function, self.key = label, function, key

    def __call__(self, answer: Answer) -> Score:
        """Return what was said of the conversation in the environment's process."""
        return answer.earned.get(self.function, Score())


@dataclass(frozen=True, kw_only=True)
class RewardSet:
    """Reward functions of one set of problems; an answer's reward is their weighted sum.

    Attributes:
        functions: Functions by name (exact_match, number, math, `module:function` or
            `file.py:function`), or callables.
        weights: Weight of each function; empty: 1 each.
        extract: Part of an answer that the packaged functions score, as `task.extract`.
        columns: Columns of the data set; an answer without one has None there.
        answer_column: Column of the expected answer; None: there is none, and the argument `answer`
            is the column of that name.
        correct_by: Function of `functions` that decides whether an answer is correct. None: the
            first that says so, else the first that takes the expected answer, else the first.
        key: Section of a recipe that names the functions, for messages.

    Raises:
        RecipeError: A function is named twice, or weights are missing.
    """

    functions: Sequence[Source]
    weights: Sequence[float] = ()
    extract: Extract = "text"
    columns: tuple[str, ...] = ()
    answer_column: str | None = "answer"
    correct_by: str | None = None
    key: str = "task"

    def __post_init__(self) -> None:
        count, weights = len(self.functions), [f"{weight:g}" for weight in self.weights]
        if weights and len(weights) != count:
            setting = f"{self.key}.reward_weights={shown(weights)}"
            rule = f"has {counted(len(weights), 'number')} for {counted(count, 'reward function')}"
            raise RecipeError(f"{setting}: {rule}; set one for each")
        named = [source for source in self.functions if isinstance(source, str)]
        if twice := [name for name in named if named.count(name) > 1]:
            setting = f"{self.key}.rewards={shown(named)}"
            raise RecipeError(f"{setting}: names {twice[0]} twice; drop one of them")
        if self.correct_by not in (None, *self.labels):
            setting = f"{self.key}.correct_by={self.correct_by}"
            rule = f"is no reward function of this set; set one of {', '.join(self.labels)}"
            raise RecipeError(f"{setting}: {rule}")

    @cached_property
    def labels(self) -> list[str]:
        """Return the functions as messages name them; callables of one name are numbered."""
        labels = list[str]()
        for label in map(_label, self.functions):
            several = sum(other.partition("#")[0] == label for other in labels)
            labels.append(f"{label}#{several + 1}" if several else label)
        return labels

    @cached_property
    def names(self) -> list[str]:
        """Return the functions' names in figures; empty for the scorer of a task."""
        short = [label.rpartition(":")[2] for label in self.labels]
        pairs = zip(short, self.labels, strict=True)
        names = [name if short.count(name) == 1 else label for name, label in pairs]
        return ["" if is_scorer(self.functions[i]) else name for i, name in enumerate(names)]

    def setting(self, index: int) -> str:
        """Return the key and value that name a function in a recipe."""
        source = self.functions[index]
        name = "name" if is_scorer(source) else "rewards"
        if isinstance(source, EnvironmentReward) and not source.function:
            name = source.key
        return f"{self.key}.{name}={self.labels[index]}"

    def scored(self, scores: Sequence[Score], answer: Answer) -> Scored:
        """Return the record of an answer from the scores of all functions."""
        figures = dict[str, float]()
        for name, score in zip(self.names, scores, strict=True):
            prefix = f"{name}_" if name else ""
            figures |= {prefix + key: value for key, value in score.figures.items()}
            if name and score.reward is not None:
                figures[name] = score.reward
        reward, fault = self._sum(scores)
        if fault:
            fault += f", for the answer {_quoted(answer.text)} to {_quoted(answer.prompt)}"
        correct = self._is_correct(scores, answer)
        return Scored(answer=answer, reward=reward, correct=correct, figures=figures, fault=fault)

    def _is_correct(self, scores: Sequence[Score], answer: Answer) -> bool:
        if self.correct_by:
            scores = [scores[self.labels.index(self.correct_by)]]
        said = [score.correct for score in scores if score.correct is not None]
        if said:
            return said[0]
        judge = next((score for score in scores if score.judges), scores[0])
        return answer.ended and (judge.reward or 0.0) >= 1

    def _sum(self, scores: Sequence[Score]) -> tuple[float | None, str]:
        """Return the weighted sum, and the first fault if there is one."""
        terms = []
        weights = self.weights or [1.0] * len(scores)
        for label, weight, score in zip(self.labels, weights, scores, strict=True):
            if score.fault:
                return None, f"{label}: {score.fault}"
            if score.reward is not None:
                terms.append(weight * score.reward)
        try:
            return as_reward(math.fsum(terms)) if terms else None, ""
        except ValueError as error:
            return None, f"{'+'.join(self.labels)}: weighted to {one_line(error)}"


def _label(source: Source) -> str:
    """Return a function as messages name it."""
    if isinstance(source, str):
        return source
    if isinstance(source, partial):
        return _label(source.func)
    own = is_scorer(source) or isinstance(source, EnvironmentReward)
    return str(getattr(source, "label" if own else "__qualname__", type(source).__name__))


def is_scorer(source: Source) -> bool:
    """Return whether a function is the scorer of a task (`recipes.tasks.scoring`)."""
    return getattr(source, "scores_task", False) is True


def _quoted(text: Any) -> str:
    return shown(repr(text), 60)


def is_linear(source: Source) -> bool:
    """Return whether a function of ours takes time linear in the answer and evaluates nothing."""
    return getattr(source, "linear", False) or source in IN_PROCESS


def evaluates(source: Source) -> bool:
    """Return whether a function of ours parses or evaluates what the model wrote."""
    return getattr(source, "evaluates", False) or source in PACKAGED
