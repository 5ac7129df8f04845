"""Rewards of answers: weighted sums of reward functions, called in worker processes."""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Self

from recipes.errors import RecipeError, ScorerError, one_line, shown
from recipes.rewards.function import RewardFunction, Source
from recipes.rewards.packaged import IN_PROCESS, PACKAGED
from recipes.rewards.score import Answer, Score, Scored, as_reward
from recipes.rewards.worker_pool import Part, Pool, Scores

if TYPE_CHECKING:
    from recipes.config.sections import Extract

PATIENCE = 10.0
"""Seconds after which a line says what a step waits for, and between such lines."""
MOST_WORKERS = 8


@dataclass(frozen=True, kw_only=True)
class RewardSet:
    """Reward functions of one set of problems; an answer's reward is their weighted sum.

    Attributes:
        functions: Functions by name (`module:function`, exact_match, number or math), or callables.
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
            rule = f"has {len(weights)} numbers for {count} reward functions"
            raise RecipeError(f"{setting}: {rule}; set one for each")
        named = [source for source in self.functions if isinstance(source, str)]
        if twice := [name for name in named if named.count(name) > 1]:
            setting = f"{self.key}.rewards={shown(named)}"
            raise RecipeError(f"{setting}: names {twice[0]} twice; drop one")
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
        return ["" if _own(self.functions[i]) else name for i, name in enumerate(names)]

    def setting(self, index: int) -> str:
        """Return the key and value that name a function in a recipe."""
        name = "name" if _own(self.functions[index]) else "rewards"
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
    ends its process, or returns no finite number. A failure of a batched function costs all answers
    to one prompt their rewards. `Scored.fault` says so.

    Callables are sent to workers by pickle, so a worker must be able to import their module.
    `submit`, waiting and `close` belong to one thread.

    Args:
        sets: Reward functions of all answers, or of each set of problems by name.
        timeout: Seconds that one call in a worker may take.
        workers: Number of worker processes; None: half of the CPUs, at most 8; 0: functions are
            called in this process, where only `async` functions have a timeout. In either case,
            exact_match and number are called in this process, math and the scorers of
            reasoning-gym in workers.
        most_workers: Largest number of worker processes.
        concurrency: Largest number of calls of an `async` function at a time; None: no limit.
        note: Shows a line about the faults of a step, or what it waits for.

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
        concurrency: int | None = None,
        note: Callable[[str], None] | None = None,
    ) -> None:
        self._sets = {"": sets} if isinstance(sets, RewardSet) else dict(sets)
        self._note = note or (lambda text: None)
        self._renamed = False  # whether the line about `exact` was shown
        self._functions: dict[str, range] = {}  # numbers of each set's functions
        self._here: dict[int, RewardFunction] = {}
        apart: dict[int, tuple[str, bytes]] = {}
        for name, group in self._sets.items():
            begin = len(self._here) + len(apart)
            self._functions[name] = range(begin, begin + len(group.functions))
            bare = replace(group, functions=(), weights=(), correct_by=None)
            for index, source in enumerate(group.functions):
                arguments, setting = (source, bare, timeout, concurrency), group.setting(index)
                if is_linear(source) or (workers == 0 and not evaluates(source)):
                    self._here[begin + index] = _loaded(setting, *arguments)
                else:
                    apart[begin + index] = setting, _packed(setting, arguments)
        self._pool: Pool | None = None
        if apart:
            number = workers or min(MOST_WORKERS, max(1, len(os.sched_getaffinity(0)) // 2))
            self._pool = Pool(apart, min(number, most_workers or number), timeout, concurrency)
            self._thread = ThreadPoolExecutor(1, "rewards")
            self._thread.submit(self._pool.start)

    def submit(
        self, answers: Sequence[Answer], *, required: bool = True
    ) -> Callable[[], list[Scored]]:
        """Begin to score answers in the worker processes.

        Args:
            answers: The answers.
            required: Whether it is an error if faults leave no answer with a reward.

        Returns:
            A function that calls the functions of this process, waits for the others, and returns
            the records in order. It raises a ScorerError if `required` rewards are missing.
        """
        scored = self._begin(answers)
        return lambda: self._checked(scored(), required)

    def _begin(self, answers: Sequence[Answer]) -> Callable[[], list[Scored]]:
        parts = self._parts(answers)
        waiting = None
        if self._pool is not None:
            apart = [part for part in parts if part.function not in self._here]
            waiting = self._thread.submit(self._pool.scores, apart)

        def scored(place: int, answer: Answer, scores: Scores) -> Scored:
            own = [scores[number, place] for number in self._functions[answer.set]]
            return self._sets[answer.set].scored(own, answer)

        def all_scored() -> list[Scored]:
            scores: Scores = {}
            for part in parts:
                if (function := self._here.get(part.function)) is not None:
                    scores |= part.keyed(_called(function, part))
            scores |= self._waited(waiting) if waiting is not None else {}
            self._tell_renamed(scores)
            return [scored(place, answer, scores) for place, answer in enumerate(answers)]

        return all_scored

    def _waited(self, waiting: Future[Scores]) -> Scores:
        """Wait for the workers, and say every few seconds what they are busy with."""
        while True:
            try:
                return waiting.result(timeout=PATIENCE)
            except TimeoutError:
                if waiting.done() or self._pool is None:
                    raise
                if self._pool.state:
                    self._note(f"waiting for rewards: {self._pool.state}")

    def _tell_renamed(self, scores: Scores) -> None:
        if not self._renamed and any(score.renamed for score in scores.values()):
            self._renamed = True
            self._note("a reward function says exact, which is called correct now; rename it")

    def score(self, answers: Sequence[Answer]) -> list[Scored]:
        """Score answers; see `submit`."""
        return self.submit(answers)()

    def check(self, answers: Sequence[Answer]) -> list[Scored]:
        """Score answers, as a trial.

        Raises:
            RecipeError: A function cannot be found, or failed.
        """
        try:
            scored = self._begin(answers)()
        except ScorerError as error:
            raise RecipeError(str(error)) from error
        for answer, item in zip(answers, scored, strict=True):
            if item.fault:
                key, _, _ = self._sets[answer.set].setting(0).partition("=")
                raise RecipeError(f"{key}={item.fault}; correct it")
        return scored

    def _parts(self, answers: Sequence[Answer]) -> list[Part]:
        places: dict[str, list[int]] = {}
        for place, answer in enumerate(answers):
            places.setdefault(answer.set, []).append(place)
        parts = []
        for name, chosen in places.items():
            whole = [answers[place] for place in chosen]
            # A worker that gets no problem need not import the tasks.
            plain = [replace(answer, problem=None) for answer in whole]
            for number, source in zip(
                self._functions[name], self._sets[name].functions, strict=True
            ):
                parts.append(Part(number, chosen, whole if _own(source) else plain))
        return parts

    def _checked(self, scored: list[Scored], required: bool) -> list[Scored]:
        faults = [item.fault for item in scored if item.fault]
        if faults:
            more = f" ({len(faults) - 1} more answers failed)" if len(faults) > 1 else ""
            if required and all(item.reward is None for item in scored):
                raise ScorerError(f"no answer has a reward: {faults[0]}{more}; correct it")
            self._note(f"no reward: {faults[0]}{more}")
        return scored

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


def is_linear(source: Source) -> bool:
    """Return whether a function of ours takes time linear in the answer and evaluates nothing."""
    return getattr(source, "linear", False) or source in IN_PROCESS


def evaluates(source: Source) -> bool:
    """Return whether a function of ours parses or evaluates what the model wrote."""
    return getattr(source, "evaluates", False) or source in PACKAGED


def _loaded(setting: str, *arguments: Any) -> RewardFunction:
    try:
        return RewardFunction(*arguments)
    except RecipeError as error:
        raise RecipeError(f"{setting}: {error}") from error


def _packed(setting: str, arguments: tuple[Any, ...]) -> bytes:
    try:
        packed = pickle.dumps(arguments)
        if b"__main__" in packed:
            raise ValueError("it is defined in the script that runs")
    except Exception as error:
        rule = f"cannot be sent to a worker process: {one_line(error)}"
        remedy = "define it at the top of a module, or set task.workers=0"
        raise RecipeError(f"{setting}: {rule}; {remedy}") from error
    return packed


def _called(function: RewardFunction, part: Part) -> list[Score]:
    """Call a function in this process; a batched call that fails is repeated for each prompt."""
    if scores := [*function.scores(part.answers, math.inf)]:
        return scores
    units = (function.scores(unit.answers, math.inf) for unit in part.units(function.kind))
    return list(chain.from_iterable(units))
