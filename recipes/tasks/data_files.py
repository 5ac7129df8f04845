"""Sets of problems from the rows of data files and of data sets of the Hugging Face Hub."""

import contextlib
import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from itertools import chain
from typing import Any

import yaml

from recipes.config.sections import ProblemSection
from recipes.errors import RecipeError, one_line, shown
from recipes.rewards.packaged import exact_match
from recipes.tasks.data_rows import BadRow, DataRow, data_rows
from recipes.tasks.problem import Message, Problem, Task
from recipes.tasks.split import split

PROMPTS = ("prompt", "question", "problem", "messages", "instruction", "input", "query")
ANSWERS = ("answer", "solution", "ground_truth", "target", "label", "output", "response")
"""Usual names of the columns, which messages suggest."""
TOOLS = "tools"
"""Column with the tools of a chat."""
ColumnPath = tuple[str, ...]
"""A column, and the names below it if the column holds others (`reward_model.ground_truth`)."""


def read_file(section: ProblemSection, place: str) -> Task:
    """Return the problems of `section.data`, each prompt once, scored by `exact_match`.

    Raises:
        RecipeError: The data of the key `place` cannot be read, or a row is no problem.
    """
    distinct: dict[str, Problem] = {}
    try:
        rows = [*data_rows(section, place)]
        if not rows:
            raise BadRow("has no rows; name data with at least 2 problems")
        for problem in _Reader(rows, section, place).problems():
            distinct.setdefault(problem.text, problem)
    except BadRow as error:
        raise RecipeError(f"{place}.data={section.data}: {error}") from error
    sides = split([*distinct.values()], section.held_out_fraction)
    again = len(rows) - len(distinct)
    left_out = (f"{again} whose prompt an earlier row has",) if again else ()

    def score(problem: Problem, text: str, ended: bool) -> float:
        return exact_match(text, problem.answer, ended, section.extract)

    return Task(name="file", **sides, score=score, left_out=left_out)


class _Reader:
    """Reader of the rows of one set as problems, which have the columns of the whole set.

    Raises:
        BadRow: A column that the section names is missing.
    """

    def __init__(self, rows: Sequence[DataRow], section: ProblemSection, place: str) -> None:
        self._rows = rows
        self._names = [*dict.fromkeys(chain.from_iterable(row.values for row in rows))]
        self._optional = bool(section.rewards or section.environments)
        self._prompt = self._located(section.prompt_column, f"{place}.prompt_column")
        self._answer: ColumnPath = ()
        if section.answer_column is not None:
            self._answer = self._located(section.answer_column, f"{place}.answer_column")

    def problems(self) -> Iterator[Problem]:
        for row in self._rows:
            yield Problem(
                prompt=_prompt(row, self._prompt),
                answer=_answer(row, self._answer, self._optional) if self._answer else "",
                columns={name: row.value(name) for name in self._names},
                tools=_tools(row),
            )

    def _located(self, wanted: str, key: str) -> ColumnPath:
        """Return the path of a column, which may lie in another one.

        Shells and YAML drop the blanks around a name, so a name is also found without its blanks.
        """
        row = self._rows[0]
        path = self._path(wanted, str) or self._path(wanted.strip(), str.strip)
        if path and not isinstance(_at(row, path), dict):
            return path
        rule = f"has no column {wanted}, only {shown(list(map(_quoted, self._names)))}"
        if path:
            rule = f"{wanted} has columns of its own, and is neither text nor a number"
        raise BadRow(f"{row.place}: {rule}; {self._instead(row, wanted, key)}")

    def _path(self, wanted: str, form: Callable[[str], str]) -> ColumnPath:
        """Return the first path whose text has the form `wanted`; empty if there is none."""
        columns = ((name,) for name in self._names)
        paths = chain(columns, chain.from_iterable(map(_paths, self._rows)))
        return next((path for path in paths if form(".".join(path)) == wanted), ())

    def _instead(self, row: DataRow, wanted: str, key: str) -> str:
        """Return a setting of `key` with which the row can be read, or other advice."""
        paths = {".".join(path): path for path in _paths(row)}
        of_prompt = key.endswith("prompt_column")
        usual = {path[-1]: name for name, path in reversed(paths.items())}
        names = difflib.get_close_matches(wanted, paths, n=1)
        names += [usual[name] for name in (PROMPTS if of_prompt else ANSWERS) if name in usual]
        names += [name for name in paths if name.startswith(f"{wanted}.")]
        read: Callable[[DataRow, ColumnPath], Any] = _prompt if of_prompt else _answer
        for name in names:
            with contextlib.suppress(BadRow):
                read(row, paths[name])
                return f"set {key}={_quoted(name)}"
        if self._optional and not of_prompt:
            return f"set {key}=null"
        return f"name data with a column of {'prompts' if of_prompt else 'answers'}"


def _paths(row: DataRow) -> list[ColumnPath]:
    """Return the paths of a row's columns and of the columns inside them."""
    paths: list[ColumnPath] = [(name,) for name in row.values]
    for path in paths:
        value = _at(row, path)
        paths += [(*path, key) for key in value] if isinstance(value, dict) else []
    return paths


def _at(row: DataRow, path: ColumnPath) -> Any:
    """Return the value at a path, None if the row has none."""
    value = row.value(path[0], padded=False)
    for key in path[1:]:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _quoted(name: str) -> str:
    """Return the name of a column as an override must have it, whose values are YAML."""
    plain = re.fullmatch(r"[^\W\d][\w.-]*", name) and yaml.safe_load(name) == name
    return name if plain else "'" + name.replace("'", "''") + "'"


def _prompt(row: DataRow, path: ColumnPath) -> str | tuple[Message, ...]:
    column, value = ".".join(path), _at(row, path)
    if isinstance(value, list) and value:
        turns = tuple(_message(row.place, column, message) for message in value)
        if turns[-1]["role"] != "assistant":
            return turns
        rule = "ends with the assistant's turn, which the model is to write"
    elif not isinstance(value, str):
        rule = f"is {_kind(value)}, neither text nor messages"
    elif not value.strip():
        rule = "is empty"
    else:
        _check_value(row.place, column, value)
        return value
    raise BadRow(f"{row.place}: {column} {rule}; correct the row, or remove it")


def _message(place: str, column: str, message: Any) -> Message:
    turn = message if isinstance(message, dict) else {}
    missing = [key for key in ("role", "content") if not isinstance(turn.get(key), str)]
    if missing:
        rule = f"a message of {column} has no text under {' and '.join(missing)}"
        raise BadRow(f"{place}: {rule}; write {{role: user, content: TEXT}}")
    for key, value in turn.items():
        _check_value(place, f"{key} in a message of {column}", value)
    return {key: value for key, value in turn.items() if value is not None}


def _tools(row: DataRow) -> tuple[Mapping[str, Any], ...]:
    """Return the tools of a row, which may be written as the text of a JSON list."""
    value = row.value(TOOLS, padded=False)
    if isinstance(value, str) and value.strip():
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    if isinstance(value, list) and all(isinstance(tool, dict) for tool in value):
        _check_value(row.place, TOOLS, value)
        return tuple(value)
    if value is None or value == "":
        return ()
    rule = f"{TOOLS} is {_kind(value)}, no list of JSON schemas for the chat template"
    raise BadRow(f"{row.place}: {rule}; correct it, or rename the column")


def _answer(row: DataRow, path: ColumnPath, optional: bool = False) -> str:
    """Return the answer as text; only reward functions of the recipe can do without one."""
    column, value = ".".join(path), _at(row, path)
    if (text := _written(value)) is None:
        rule = f"{column} is {_kind(value)}, neither text nor a finite number"
        remedy = "name another answer_column, or null and a reward function"
        raise BadRow(f"{row.place}: {rule}; {remedy}")
    if not text.strip() and not optional:
        raise BadRow(f"{row.place}: {column} is empty; correct the row, or remove it")
    _check_value(row.place, column, text)
    return text.strip() and text


def _written(value: Any) -> str | None:
    """Return an answer as a person writes it: 7 for 7.0, 0.00001 for 1e-05, true for True.

    The result is empty for null and NaN, as which pandas saves null, and None for other values.
    """
    if value is None or value != value:
        return ""
    if isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, float | Decimal):
        number = Decimal(str(value))
        if not number.is_finite():
            return None
        whole = number == number.to_integral_value()
        return str(int(number)) if whole else f"{number:f}".rstrip("0")
    return str(value) if isinstance(value, str | int) else None


def _check_value(place: str, column: str, value: Any) -> None:
    """Refuse a value that JSON, and so a chat template, cannot write."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise BadRow(f"{place}: {column} is no valid text: {one_line(error)}; correct it") from None
    except (TypeError, ValueError, RecursionError) as error:
        rule = f"{column} is no value of JSON: {one_line(error)}"
        raise BadRow(f"{place}: {rule}; write it as text, or remove it") from None


def _kind(value: Any) -> str:
    return "null" if value is None else f"{shown(value, 40)} ({type(value).__name__})"
