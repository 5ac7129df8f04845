"""Reward functions: import, calls by each convention, and texts about failures."""

import asyncio
import contextlib
import copy
import inspect
import os
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

from recipes.awaited import run_awaited
from recipes.config.literals import Extract
from recipes.errors import RecipeError, counted, one_line, shown
from recipes.importing import import_function
from recipes.rewards.packaged import PACKAGED
from recipes.rewards.reward_set import EnvironmentReward, RewardSet, Source, is_scorer
from recipes.rewards.score import Answer, Score, score_of

Kind = Literal["each", "together", "groups"]
"""How a function is called: for each answer, for all and awaited, or for whole groups (batched)."""

FAULTS = (Exception, SystemExit, asyncio.CancelledError)
NAMED = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
CLEAN_UP = 5.0
"""Seconds that a late asynchronous call may take to clean up, at most as many as its time-out."""
BATCHED = {"prompt": "prompts", "completion": "completions", "rendered_prompt": "rendered_prompts"}
"""Arguments that batched functions get under another name."""
ARGUMENTS = ("prompt", "completion", "completion_ids", "answer", "ended", "rendered_prompt")
"""Arguments of reward functions besides the columns of the data."""
PREFIX = "column_"
"""Begins the argument for a column whose name an argument has."""


class RewardFunction:
    """A reward function, called by its own convention.

    A function with a parameter `completions` is batched: keywords are lists, and the result is a
    list. Any other function is called for each answer. Both may be `async`, and then calls are
    awaited together, each for at most `timeout` seconds. Each call gets copies of its arguments.

    Args:
        source: The function or its name.
        group: Its set, of which the columns and the extracted part count.
        timeout: Seconds that one call may take.
        concurrency: Largest number of calls of an `async` function at a time; None: no limit.

    Attributes:
        kind: The convention.
        judges: Whether the function takes the expected answer.

    Raises:
        RecipeError: There is no such function.
    """

    def __init__(
        self, source: Source, group: RewardSet, timeout: float, concurrency: int | None = None
    ) -> None:
        self._function = _find(source, group.extract)
        self._group, self._timeout, self._concurrency = group, timeout, concurrency
        try:
            parameters = inspect.signature(self._function).parameters
        except (TypeError, ValueError) as error:
            raise RecipeError(f"{one_line(error)}; wrap it in a function of your own") from error
        fixed = ("extract",) if source in PACKAGED else ()
        # The scorer of a task takes the problem itself.
        self._scores_task = is_scorer(source)
        self._takes_all = any(item.kind is item.VAR_KEYWORD for item in parameters.values())
        self._names = {
            name for name, item in parameters.items() if item.kind in NAMED and name not in fixed
        }
        self._needs = [
            name
            for name, item in parameters.items()
            if item.default is item.empty
            and item.kind not in (item.VAR_KEYWORD, item.VAR_POSITIONAL)
        ]
        self._async, batched = _is_async(self._function), "completions" in parameters
        self.kind: Kind = "groups" if batched else "together" if self._async else "each"
        self._arguments = [BATCHED.get(name, name) if batched else name for name in ARGUMENTS]
        self.judges = self._scores_task or bool(self._names & {"answer", group.answer_column})

    @property
    def seconds(self) -> float:
        """Return the seconds that a call may take, with the time to clean up."""
        return self._timeout + (self._clean_up if self._async else 0.0)

    @property
    def _clean_up(self) -> float:
        return min(CLEAN_UP, self._timeout)

    def scores(self, answers: Sequence[Answer], seconds: float) -> Iterator[Score]:
        """Call the function for as many of the answers as it finishes in about `seconds`, or one.

        Yields:
            The scores of the first answers. There are none if a batched call for answers to several
            prompts failed; a call for each prompt then finds the culprit.
        """
        if self.kind == "groups":
            yield from self._batch(answers)
        elif self.kind == "together":
            yield from run_awaited(self._together(answers))
        else:
            end = time.monotonic() + seconds
            for answer in answers:
                yield self._score(answer)
                if time.monotonic() >= end:
                    break

    def _score(self, answer: Answer) -> Score:
        if isinstance(self._function, EnvironmentReward):
            return self._function(answer)
        try:
            return self._converted(self._result(self._call_alone(answer)))
        except FAULTS as error:
            return Score(fault=_fault(error))

    async def _together(self, answers: Sequence[Answer]) -> list[Score]:
        turns = asyncio.Semaphore(self._concurrency or len(answers))

        async def score(answer: Answer) -> Score:
            async with turns:
                try:
                    return self._converted(await self._in_time(self._call_alone(answer)))
                except FAULTS as error:
                    return Score(fault=_fault(error))

        return await asyncio.gather(*map(score, answers))

    def _batch(self, answers: Sequence[Answer]) -> list[Score]:
        try:
            results = self._result(self._call(self._lists(answers)))
            results = [None] * len(answers) if results is None else list(results)
            if len(results) != len(answers):
                got, due = counted(len(results), "reward"), counted(len(answers), "answer")
                raise _RefusedCall(f"returned {got} for {due}")
        except FAULTS as error:
            several = any(answer.prompt != answers[0].prompt for answer in answers)
            return [] if several else [Score(fault=_fault(error))] * len(answers)
        return list(map(self._converted, results))

    def _call_alone(self, answer: Answer) -> Any:
        if self._scores_task:
            return self._function(answer.problem, answer.text, answer.ended)
        return self._call(self._keywords(answer))

    def _call(self, keywords: Mapping[str, Any]) -> Any:
        if missing := [name for name in self._needs if name not in keywords]:
            rule = f"has a parameter {missing[0]!r} that no column has"
            raise _RefusedCall(f"{rule}; columns: {', '.join(keywords)}")
        taken = keywords if self._takes_all else self._names & keywords.keys()
        return self._function(**{name: copy.deepcopy(keywords[name]) for name in taken})

    def _keywords(self, answer: Answer) -> dict[str, Any]:
        """Return the arguments of a call; those of the product precede columns of the same name."""
        expected, columns = answer.answer, answer.columns
        if self._group.answer_column is None:
            expected = columns.get("answer", expected)
        own = answer.prompt, answer.text, answer.token_ids, expected, answer.ended
        keywords = dict(zip(self._arguments, (*own, answer.rendered_prompt), strict=True))
        for name in dict.fromkeys((*self._group.columns, *columns)):
            keywords[PREFIX + name if name in keywords else name] = columns.get(name)
        return keywords

    def _lists(self, answers: Sequence[Answer]) -> dict[str, list[Any]]:
        """Return the arguments of a batched call, in which a chat has chats as completions."""
        rows = list(map(self._keywords, answers))
        common = set.intersection(*map(set, rows))
        lists = {name: list(map(itemgetter(name), rows)) for name in rows[0] if name in common}
        lists["completions"] = [
            text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(lists["prompts"], lists["completions"], strict=True)
        ]
        return lists

    def _converted(self, result: Any) -> Score:
        try:
            return score_of(result, self.judges)
        except ValueError as error:
            return Score(fault=f"returned {one_line(error)}")

    def _result(self, result: Any) -> Any:
        """Return the result of a call, awaited if it is awaitable."""
        return run_awaited(self._in_time(result)) if inspect.isawaitable(result) else result

    async def _in_time(self, call: Awaitable[Any]) -> Any:
        """Await a call; cancel a late one, and give it time to clean up."""
        task = asyncio.ensure_future(call)
        done, _ = await asyncio.wait([task], timeout=self._timeout)
        if not done:
            task.cancel()
            await asyncio.wait([task], timeout=self._clean_up)
            raise _RefusedCall(too_long(self._timeout))
        return task.result()


PACKAGE = str(Path(__file__).parents[1]) + os.sep


class _RefusedCall(Exception):
    """A call that the conventions refuse; its text is the fault."""


def _fault(error: BaseException) -> str:
    """Return the text about an exception of a call, with its first place outside this package."""
    if isinstance(error, _RefusedCall):
        return str(error)
    raised = f"raised {type(error).__name__}"
    with contextlib.suppress(Exception):  # Even the text of an error may raise.
        raised += f": {shown(one_line(error), 200)}"
    for file, line, *_ in traceback.extract_tb(error.__traceback__):
        if not file.startswith(PACKAGE):
            inside = file.startswith(os.getcwd() + os.sep)
            return f"{raised} ({os.path.relpath(file) if inside else file}:{line})"
    return raised


def _find(source: Source, extract: Extract) -> Callable[..., Any]:
    if not isinstance(source, str):
        return source
    if source in PACKAGED:
        return partial(PACKAGED[source], extract=extract)
    if not all(source.partition(":")):
        packaged = ", ".join(sorted(PACKAGED))
        raise RecipeError(f"is not packaged; take {packaged}, or name my_rewards.py:function")
    try:
        function = import_function(source, source)
    except RecipeError as error:
        raise RecipeError(str(error).removeprefix(f"{source}: ")) from error
    made: Any = function() if inspect.isclass(function) else function
    if not callable(made):
        raise RecipeError("is a class without __call__; define it")
    return made


def _is_async(function: Callable[..., Any]) -> bool:
    call = getattr(function, "__call__", None)  # noqa: B004 (of a class with an async __call__)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def too_long(timeout: float) -> str:
    return f"took longer than {timeout:g} s"
