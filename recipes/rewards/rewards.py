"""Rewards of answers: weighted sums of reward functions, called in worker processes."""

import math
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from typing import Any, Self

from recipes.errors import RecipeError, ScorerError, counted, one_line
from recipes.rewards.function import RewardFunction
from recipes.rewards.reward_set import RewardSet, evaluates, is_linear, is_scorer
from recipes.rewards.score import Answer, Score, Scored
from recipes.rewards.worker_pool import Part, Pool, Scores

PATIENCE = 10.0
"""Seconds after which a line says what a step waits for, and between such lines."""
MOST_WORKERS = 8


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
                parts.append(Part(number, chosen, whole if is_scorer(source) else plain))
        return parts

    def _checked(self, scored: list[Scored], required: bool) -> list[Scored]:
        faults = [item.fault for item in scored if item.fault]
        if faults:
            rest = counted(len(faults) - 1, "more answer")
            more = f" ({rest} failed)" if len(faults) > 1 else ""
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
