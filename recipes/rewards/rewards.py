"""Rewards of answers: weighted sums of reward functions, called in worker processes."""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, Self

from recipes.errors import RecipeError, ScorerError, one_line, shown
from recipes.rewards.function import RewardFunction, Row, Source
from recipes.rewards.packaged import IN_PROCESS
from recipes.rewards.score import Outcome, Score, as_reward
from recipes.rewards.worker_pool import Outcomes, Part, Pool

if TYPE_CHECKING:
    from recipes.config.sections import Extract

MOST_WORKERS = 8


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer to score.

    Attributes:
        prompt: The user's turn as text, or the messages of a chat.
        text: The answer's text, without the end token.
        answer: Expected answer.
        ended: Whether the answer ended by the end token instead of being cut off.
        columns: Further columns of the problem by name.
        token_ids: Tokens of the answer.
        set: Name of the problem's set, if `Rewards` has several.
    """

    prompt: Any
    text: str
    answer: Any = ""
    ended: bool = True
    columns: Mapping[str, Any] = field(default_factory=dict)
    token_ids: Sequence[int] = ()
    set: str = ""

    def keywords(self) -> Row:
        """Return the keywords with which reward functions are called."""
        return {
            **self.columns,
            "prompt": self.prompt,
            "completion": self.text,
            "completion_ids": self.token_ids,
            "answer": self.answer,
            "ended": self.ended,
        }


@dataclass(frozen=True, kw_only=True)
class RewardSet:
    """Reward functions of one set of problems; an answer's reward is their weighted sum.

    Attributes:
        functions: Functions by name (`module:function`, exact_match, number or math), or callables.
        weights: Weight of each function; empty: 1 each.
        extract: Part of an answer that the packaged functions score, as `task.extract`.
        key: Section of a recipe that names the functions, for messages.

    Raises:
        RecipeError: A function is named twice, or weights are missing.
    """

    functions: Sequence[Source]
    weights: Sequence[float] = ()
    extract: Extract = "text"
    key: str = "task"

    def __post_init__(self) -> None:
        count, weights = len(self.functions), [f"{weight:g}" for weight in self.weights]
        if weights and len(weights) != count:
            setting = f"{self.key}.reward_weights={shown(weights)}"
            rule = f"has {len(weights)} numbers for {count} reward functions"
            raise RecipeError(f"{setting}: {rule}; set one for each")
        if twice := [label for label in self.labels if self.labels.count(label) > 1]:
            setting = f"{self.key}.rewards={shown(self.labels)}"
            raise RecipeError(f"{setting}: names {twice[0]} twice; drop one")

    @cached_property
    def labels(self) -> list[str]:
        """Return the functions as messages name them."""
        return list(map(_label, self.functions))

    @cached_property
    def names(self) -> list[str]:
        """Return the functions' names in figures; empty for the scorer of a task."""
        short = [label.rpartition(":")[2] for label in self.labels]
        pairs = zip(short, self.labels, strict=True)
        names = [name if short.count(name) == 1 else label for name, label in pairs]
        return ["" if _own(self.functions[i]) else name for i, name in enumerate(names)]

    def setting(self, index: int) -> str:
        """Return the key and value that name a function in a recipe."""
        name = "name" if _own(self.functions[index]) else "rewards"
        return f"{self.key}.{name}={self.labels[index]}"

    def score(self, outcomes: Sequence[Outcome], answer: Answer) -> Score:
        """Return the score of an answer from the outcomes of all functions."""
        figures = dict[str, float]()
        for name, outcome in zip(self.names, outcomes, strict=True):
            prefix = f"{name}_" if name else ""
            figures |= {prefix + key: value for key, value in (outcome.figures or {}).items()}
            if name and outcome.value is not None:
                figures[name] = outcome.value
        said = [outcome.exact for outcome in outcomes if outcome.exact is not None]
        exact = said[0] if said else answer.ended and (outcomes[0].value or 0.0) >= 1
        reward, fault = self._sum(outcomes)
        if fault:
            fault += f", for the answer {_quoted(answer.text)} to {_quoted(answer.prompt)}"
        return Score(reward=reward, exact=exact, figures=figures, fault=fault)

    def _sum(self, outcomes: Sequence[Outcome]) -> tuple[float | None, str]:
        """Return the weighted sum, and the first fault if there is one."""
        terms = []
        weights = self.weights or [1.0] * len(outcomes)
        for label, weight, outcome in zip(self.labels, weights, outcomes, strict=True):
            if outcome.fault:
                return None, f"{label}: {outcome.fault}"
            if outcome.value is not None:
                terms.append(weight * outcome.value)
        try:
            return as_reward(math.fsum(terms)) if terms else None, ""
        except ValueError as error:
            return None, f"{'+'.join(self.labels)}: weighted to {one_line(error)}"


def _label(source: Source) -> str:
    """Return a function as messages name it."""
    if isinstance(source, str):
        return source
    name = getattr(source, "label" if _own(source) else "__qualname__", type(source).__name__)
    return str(name)


def _own(source: Source) -> bool:
    """Return whether a function is the scorer of a task (`recipes.tasks.scoring`)."""
    return getattr(source, "scores_task", False) is True


def _quoted(text: Any) -> str:
    return shown(repr(text), 60)


class Rewards:
    """Scores answers by reward functions, in worker processes or in this process.

    A failure of a function costs the answer its reward: it raises, takes longer than `timeout`,
    ends its process, or returns no finite number. The score then says so in `Score.fault`.

    Callables are sent to workers by pickle, so a worker must be able to import their module.
    `submit`, waiting and `close` belong to one thread.

    Args:
        sets: Reward functions of all answers, or of each set of problems by name.
        timeout: Seconds that one call in a worker may take.
        workers: Number of worker processes; None: half of the CPUs, at most 8; 0: functions are
            called in this process, where only `async` functions have a timeout. In either case,
            exact_match and number are called in this process.
        most_workers: Largest number of worker processes.
        note: Shows a line about the faults of a step.

    Raises:
        RecipeError: A function that is called in this process cannot be found.
    """

    def __init__(
        self,
        sets: RewardSet | Mapping[str, RewardSet],
        *,
        timeout: float = 30.0,
        workers: int | None = None,
        most_workers: int | None = None,
        note: Callable[[str], None] | None = None,
    ) -> None:
        self._sets = {"": sets} if isinstance(sets, RewardSet) else dict(sets)
        self._note = note or (lambda text: None)
        self._functions: dict[str, range] = {}  # numbers of each set's functions
        self._here: dict[int, RewardFunction] = {}
        apart: dict[int, tuple[str, bytes]] = {}
        for name, group in self._sets.items():
            begin = len(self._here) + len(apart)
            self._functions[name] = range(begin, begin + len(group.functions))
            for index, source in enumerate(group.functions):
                arguments, setting = (source, group.extract, timeout), group.setting(index)
                if workers == 0 or _needs_no_worker(source):
                    self._here[begin + index] = _loaded(setting, *arguments)
                else:
                    apart[begin + index] = setting, _packed(setting, arguments)
        self._pool: Pool | None = None
        if apart:
            number = workers or min(MOST_WORKERS, max(1, len(os.sched_getaffinity(0)) // 2))
            self._pool = Pool(apart, min(number, most_workers or number), timeout)
            self._thread = ThreadPoolExecutor(1, "rewards")
            self._thread.submit(self._pool.start)

    def submit(
        self, answers: Sequence[Answer], *, required: bool = True
    ) -> Callable[[], list[Score]]:
        """Begin to score answers in the worker processes.

        Args:
            answers: The answers.
            required: Whether it is an error if faults leave no answer with a reward.

        Returns:
            A function that calls the functions of this process, waits for the others, and returns
            the scores in order. It raises a ScorerError if `required` rewards are missing.
        """
        scores = self._begin(answers)
        return lambda: self._checked(scores(), required)

    def _begin(self, answers: Sequence[Answer]) -> Callable[[], list[Score]]:
        parts = self._parts(answers)
        waiting = None
        if self._pool is not None:
            apart = [part for part in parts if part.function not in self._here]
            waiting = self._thread.submit(self._pool.outcomes, apart)

        def score(place: int, answer: Answer, outcomes: Outcomes) -> Score:
            own = [outcomes[number, place] for number in self._functions[answer.set]]
            return self._sets[answer.set].score(own, answer)

        def scores() -> list[Score]:
            outcomes: Outcomes = {}
            for part in parts:
                if (function := self._here.get(part.function)) is not None:
                    outcomes |= part.keyed(_outcomes(function, part.rows))
            outcomes |= waiting.result() if waiting is not None else {}
            return [score(place, answer, outcomes) for place, answer in enumerate(answers)]

        return scores

    def score(self, answers: Sequence[Answer]) -> list[Score]:
        """Score answers; see `submit`."""
        return self.submit(answers)()

    def check(self, answers: Sequence[Answer]) -> None:
        """Score answers, as a trial.

        Raises:
            RecipeError: A function cannot be found, or failed.
        """
        try:
            scores = self._begin(answers)()
        except ScorerError as error:
            raise RecipeError(str(error)) from error
        for answer, score in zip(answers, scores, strict=True):
            if score.fault:
                key, _, _ = self._sets[answer.set].setting(0).partition("=")
                raise RecipeError(f"{key}={score.fault}; correct it")

    def _parts(self, answers: Sequence[Answer]) -> list[Part]:
        places: dict[str, list[int]] = {}
        for place, answer in enumerate(answers):
            places.setdefault(answer.set, []).append(place)
        parts = []
        for name, chosen in places.items():
            absent = dict.fromkeys(chain.from_iterable(answers[place].columns for place in chosen))
            rows = [{**absent, **answers[place].keywords()} for place in chosen]
            parts += [Part(function, chosen, rows) for function in self._functions[name]]
        return parts

    def _checked(self, scores: list[Score], required: bool) -> list[Score]:
        faults = [score.fault for score in scores if score.fault]
        if faults:
            more = f" ({len(faults) - 1} more answers failed)" if len(faults) > 1 else ""
            if required and all(score.reward is None for score in scores):
                raise ScorerError(f"no answer has a reward: {faults[0]}{more}; correct it")
            self._note(f"no reward: {faults[0]}{more}")
        return scores

    def close(self) -> None:
        """End the worker processes, even busy ones."""
        if self._pool is not None:
            self._pool.close()
            self._thread.shutdown()
            self._pool = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _needs_no_worker(source: Source) -> bool:
    return getattr(source, "trusted", False) or source in IN_PROCESS


def _loaded(setting: str, source: Source, extract: Extract, timeout: float) -> RewardFunction:
    try:
        return RewardFunction(source, extract, timeout)
    except RecipeError as error:
        raise RecipeError(f"{setting}: {error}") from error


def _packed(setting: str, arguments: tuple[Source, Extract, float]) -> bytes:
    try:
        packed = pickle.dumps(arguments)
        if b"__main__" in packed:
            raise ValueError("it is defined in the script that runs")
    except Exception as error:
        rule = f"cannot be sent to a worker process: {one_line(error)}"
        remedy = "define it at the top of a module, or set task.workers=0"
        raise RecipeError(f"{setting}: {rule}; {remedy}") from error
    return packed


def _outcomes(function: RewardFunction, rows: Sequence[Row]) -> list[Outcome]:
    if outcomes := function.outcomes(rows, math.inf):
        return outcomes
    return list(chain.from_iterable(function.outcomes([row], math.inf) for row in rows))
