"""Reward functions: import, calls by each convention, and texts about failures."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.errors import RecipeError, one_line, shown
from recipes.importing import import_function
from recipes.rewards.packaged import PACKAGED
from recipes.rewards.score import Outcome, outcome_of

if TYPE_CHECKING:
    from recipes.config.sections import Extract

Row = Mapping[str, Any]
"""Keywords of one answer: prompt, completion, completion_ids, answer, ended and columns.

All rows of a call have the same names.
"""
Source = str | Callable[..., Any]
"""A reward function: its name in a recipe, or the callable itself."""

FAULTS = (Exception, SystemExit, asyncio.CancelledError)
KEYWORDS = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY


class RewardFunction:
    """A reward function, called by its own convention.

    A function with a parameter `completions` is batched: keywords are lists, and the result is a
    list. Any other function is called for each answer. Both may be `async`, and then calls are
    awaited together, each for at most `timeout` seconds.

    Raises:
        RecipeError: There is no such function.
    """

    def __init__(self, source: Source, extract: Extract, timeout: float) -> None:
        self._function = _find(source, extract)
        self._timeout = timeout
        try:
            parameters = inspect.signature(self._function).parameters
        except (TypeError, ValueError) as error:
            raise RecipeError(f"{one_line(error)}; wrap it in a function of your own") from error
        fixed = ("extract",) if source in PACKAGED else ()
        self._batched = "completions" in parameters
        self._takes_all = any(item.kind is item.VAR_KEYWORD for item in parameters.values())
        self._names = {
            name for name, item in parameters.items() if item.kind in KEYWORDS and name not in fixed
        }
        self._needs = [
            name
            for name, item in parameters.items()
            if item.default is item.empty
            and item.kind not in (item.VAR_KEYWORD, item.VAR_POSITIONAL)
        ]

    def outcomes(self, rows: Sequence[Row], seconds: float) -> list[Outcome]:
        """Call the function for as many of the rows as it finishes in about `seconds`, or for one.

        Returns:
            The outcomes of the first rows. The list is empty if a call for several rows failed; a
            call for each row alone then finds the culprit.
        """
        if self._batched:
            return self._batch(rows)
        if _is_async(self._function):
            return self._together(rows)
        outcomes, end = list[Outcome](), time.monotonic() + seconds
        for row in rows:
            outcomes.append(self._outcome(row))
            if time.monotonic() >= end:
                break
        return outcomes

    def _outcome(self, row: Row) -> Outcome:
        try:
            return _converted(_result(self._call(row), self._timeout))
        except FAULTS as error:
            return Outcome(fault=_fault(error))

    def _together(self, rows: Sequence[Row]) -> list[Outcome]:
        async def outcome(row: Row) -> Outcome:
            try:
                return _converted(await _within(self._timeout, self._call(row)))
            except FAULTS as error:
                return Outcome(fault=_fault(error))

        async def outcomes() -> list[Outcome]:
            return await asyncio.gather(*map(outcome, rows))

        return _runner().run(outcomes())

    def _batch(self, rows: Sequence[Row]) -> list[Outcome]:
        try:
            results = _result(self._call(_as_batch(rows)), self._timeout)
            results = [None] * len(rows) if results is None else list(results)
            if len(results) != len(rows):
                raise _RefusedCall(f"returned {len(results)} rewards for {len(rows)} answers")
        except FAULTS as error:
            return [] if len(rows) > 1 else [Outcome(fault=_fault(error))]
        return list(map(_converted, results))

    def _call(self, row: Row) -> Any:
        if missing := [name for name in self._needs if name not in row]:
            rule = f"has a parameter {missing[0]!r} that no column has"
            raise _RefusedCall(f"{rule}; columns: {', '.join(row)}")
        if self._takes_all:
            return self._function(**row)
        return self._function(**{name: row[name] for name in self._names if name in row})


PACKAGE = str(Path(__file__).parents[1]) + os.sep


class _RefusedCall(Exception):
    """A call that the conventions refuse; its text is the fault."""


def _converted(result: Any) -> Outcome:
    try:
        return outcome_of(result)
    except ValueError as error:
        return Outcome(fault=f"returned {one_line(error)}")


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
        raise RecipeError(f"is not packaged; take {packaged}, or name module:function")
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


def _result(result: Any, timeout: float) -> Any:
    """Return the result of a call, awaited if it is awaitable."""
    return _runner().run(_within(timeout, result)) if inspect.isawaitable(result) else result


async def _within(timeout: float, call: Any) -> Any:
    try:
        async with asyncio.timeout(timeout) as limit:
            return await call
    except TimeoutError:
        if limit.expired():
            raise _RefusedCall(too_long(timeout)) from None
        raise


def too_long(timeout: float) -> str:
    return f"took longer than {timeout:g} s"


@cache
def _runner() -> asyncio.Runner:
    """Return the one event loop of this process, so that functions can keep connections."""
    return asyncio.Runner()


def _as_batch(rows: Sequence[Row]) -> Row:
    """Return the keywords of a batched call, in which a chat has chats as completions."""
    lists = {name: list(map(itemgetter(name), rows)) for name in rows[0]}
    completions = [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(lists["prompt"], lists.pop("completion"), strict=True)
    ]
    return {"prompts": lists.pop("prompt"), "completions": completions, **lists}
