"""Sets of problems from data files, and from data sets of the Hugging Face Hub.

JSONL, JSON and CSV are read with Python's own modules: they need no extra, name the line of a
fault, and leave no cache. Parquet and the Hub need `datasets`.
"""

import csv
import difflib
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from recipes.config.sections import ProblemSection
from recipes.errors import RecipeError, one_line, shown
from recipes.rewards.packaged import exact_match
from recipes.tasks.problem import Message, Problem, Task
from recipes.tasks.split import split

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
PROMPTS = ("question", "problem", "messages", "instruction", "input")
ANSWERS = ("solution", "target", "label", "output", "response")
"""Usual names of the columns, which messages suggest."""


class DataRow(NamedTuple):
    """A row with its place (`train.jsonl, line 3`)."""

    place: str
    values: Mapping[str, Any]


class BadRow(ValueError):
    """Rows that cannot be read; the message is place, rule and remedy."""


def read_file(section: ProblemSection, place: str) -> Task:
    """Return the problems of `section.data`, each prompt once, scored by `exact_match`.

    Raises:
        RecipeError: The data of the key `place` cannot be read, or a row is no problem.
    """
    problems: dict[str, Problem] = {}
    count = 0
    try:
        for count, row in enumerate(_rows(section, place), 1):  # noqa: B007
            problem = _problem(row, section, place)
            problems.setdefault(problem.text, problem)
        if not problems:
            raise BadRow("has no rows; name data with at least 2 problems")
    except BadRow as error:
        raise RecipeError(f"{place}.data={section.data}: {error}") from error
    sides = split([*problems.values()], section.held_out_fraction)
    again = count - len(problems)
    left_out = (f"{again} whose prompt an earlier row has",) if again else ()

    def score(problem: Problem, text: str, ended: bool) -> float:
        return exact_match(text, problem.answer, ended, section.extract)

    return Task(name="file", **sides, score=score, left_out=left_out)


def _rows(section: ProblemSection, place: str) -> Iterator[DataRow]:
    data = str(section.data)
    path = Path(data).expanduser()
    if not path.exists():
        if path.suffix in READERS or not HUB_NAME.fullmatch(data):
            where = "" if path.is_absolute() else f" in {Path.cwd()}"
            raise BadRow(f"no such file or folder{where}; correct it, or name ORG/NAME on the Hub")
        yield from _hub(section, place)
        return
    files = [path]
    if path.is_dir():
        for key, value in (("subset", section.subset), ("split", section.split)):
            if value not in (None, "train"):
                rule = "only a data set on the Hub has one, and this is a folder; drop it"
                raise RecipeError(f"{place}.{key}={value}: {rule}")
        files = sorted(file for file in path.iterdir() if file.suffix in READERS)
    for file in files:
        if (reader := READERS.get(file.suffix)) is None:
            rule = f"has the unknown ending {file.suffix or 'none'}"
            raise BadRow(f"{rule}; convert it to {', '.join(READERS)}")
        try:
            yield from reader(file)
        except UnicodeDecodeError as error:
            raise BadRow(f"{file.name} is not UTF-8: {one_line(error)}; convert it") from None
        except OSError as error:
            why = error.strerror or one_line(error)
            raise BadRow(f"{file.name} cannot be read: {why}; correct that") from None


def _jsonl(file: Path) -> Iterator[DataRow]:
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                place = f"{file.name}, line {number}"
                yield _object(place, _parsed(place, line))


def _json(file: Path) -> Iterator[DataRow]:
    text = file.read_text(encoding="utf-8-sig")
    if text.lstrip().startswith("{"):  # JSONL often has this ending, too.
        yield from _jsonl(file)
        return
    rows = _parsed(file.name, text)
    if not isinstance(rows, list):
        raise BadRow(f"{file.name} is no list of objects; write a list, or JSONL")
    for number, row in enumerate(rows, 1):
        yield _object(f"{file.name}, row {number}", row)


def _parsed(place: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRow(f"{place}: is no JSON: {one_line(error)}; correct it") from None


def _object(place: str, values: Any) -> DataRow:
    if not isinstance(values, dict):
        raise BadRow(f"{place}: is no object; write {{COLUMN: VALUE, ...}}")
    return DataRow(place, values)


def _csv(file: Path) -> Iterator[DataRow]:
    csv.field_size_limit(sys.maxsize)
    with file.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.reader(lines, strict=True)
        try:
            header = next(reader, [])
            if len({*header}) < len(header):
                raise BadRow(f"{file.name}, line 1: names a column twice; rename one")
            for fields in filter(None, reader):
                place = f"{file.name}, line {reader.line_num}"
                if len(fields) != len(header):
                    rule = f"has {len(fields)} fields, and the header has {len(header)}"
                    raise BadRow(f"{place}: {rule}; quote fields that have commas")
                yield DataRow(place, dict(zip(header, fields, strict=True)))
        except csv.Error as error:
            place = f"{file.name}, line {reader.line_num}"
            raise BadRow(f"{place}: is no CSV: {one_line(error)}; correct it") from None


def _parquet(file: Path) -> Iterator[DataRow]:
    parquet = _imported("pyarrow.parquet", f"{file.name} needs")
    try:
        rows = parquet.ParquetFile(file).read().to_pylist()
    except Exception as error:
        rule = f"is no readable parquet: {one_line(error)}"
        raise BadRow(f"{file.name} {rule}; save it again") from None
    return _numbered(file.name, rows)


READERS: dict[str, Callable[[Path], Iterator[DataRow]]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}
"""Readers of files by ending."""


def _hub(section: ProblemSection, place: str) -> Iterator[DataRow]:
    datasets = _imported("datasets", "is no file or folder, and the Hub needs")
    errors = _imported("huggingface_hub.errors", "the Hub needs")
    missing = (datasets.exceptions.DatasetNotFoundError, errors.RepositoryNotFoundError)
    try:
        rows = datasets.load_dataset(section.data, section.subset, split=section.split).to_list()
    except missing as error:
        if "is a gated dataset" in str(error) or isinstance(error, errors.GatedRepoError):
            page = f"https://huggingface.co/datasets/{section.data}"
            raise BadRow(f"is gated; accept its terms at {page}, and set HF_TOKEN") from error
        rule = "is no file or folder here, nor a public data set of the Hub"
        raise BadRow(f"{rule}; correct it, or set HF_TOKEN") from error
    except ConnectionError as error:
        raise BadRow(f"the Hub cannot be reached: {one_line(error)}; name a file") from error
    except Exception as error:  # Builders raise errors of any type.
        if isinstance(error, OSError) and error.errno is not None:
            remedy = "set HF_HOME to a folder that you may write"
            raise BadRow(f"cannot be cached: {one_line(error)}; {remedy}") from error
        keys = f"{place}.subset={shown(section.subset)}, {place}.split={section.split}"
        raise BadRow(f"{shown(one_line(error), 400)}; correct it, or {keys}") from error
    return _numbered(str(section.data), rows)


def _numbered(name: str, rows: Iterable[Mapping[str, Any]]) -> Iterator[DataRow]:
    for number, values in enumerate(rows, 1):
        yield DataRow(f"{name}, row {number}", values)


def _imported(module: str, user: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise BadRow(f"{user} the package {package}; run: pip install 'memsaver[data]'") from None


def _problem(row: DataRow, section: ProblemSection, place: str) -> Problem:
    columns = dict(row.values)
    prompt = _prompt(row.place, section.prompt_column, _column(row, section, place, "prompt"))
    answer = ""
    del columns[section.prompt_column]
    if section.answer_column is not None:
        answer = _answer(row.place, section, _column(row, section, place, "answer"))
        columns.pop(section.answer_column, None)
    return Problem(prompt=prompt, answer=answer, columns=columns)


def _column(row: DataRow, section: ProblemSection, place: str, what: str) -> Any:
    """Return the value in the column of the prompt or of the answer."""
    name: str = getattr(section, f"{what}_column")
    if name in row.values:
        return row.values[name]
    names = [*row.values]
    usual = PROMPTS if what == "prompt" else ANSWERS
    close = difflib.get_close_matches(name, names, n=1) or [c for c in usual if c in names]
    other = "COLUMN" if what == "prompt" else "null"
    rule = f"{row.place}: has no column {name}, only {shown(names)}"
    raise BadRow(f"{rule}; set {place}.{what}_column={(close or [other])[0]}")


def _prompt(place: str, column: str, value: Any) -> str | tuple[Message, ...]:
    if isinstance(value, list | tuple) and value:
        turns = tuple(_message(place, column, message) for message in value)
        if turns[-1]["role"] != "assistant":
            return turns
        rule = "ends with the assistant's turn, which the model is to write"
    elif not isinstance(value, str):
        rule = f"is {_kind(value)}, neither text nor messages"
    elif not value.strip():
        rule = "is empty"
    else:
        return _unicode(place, column, value)
    raise BadRow(f"{place}: {column} {rule}; correct the row, or remove it")


def _message(place: str, column: str, message: Any) -> Message:
    turn = message if isinstance(message, dict) else {}
    missing = [key for key in ("role", "content") if not isinstance(turn.get(key), str)]
    if missing:
        rule = f"a message of {column} has no text under {' and '.join(missing)}"
        raise BadRow(f"{place}: {rule}; write {{role: user, content: TEXT}}")
    _unicode(place, column, turn["content"])
    # Parquet fills in null for keys that only other messages have.
    return {key: value for key, value in turn.items() if value is not None}


def _answer(place: str, section: ProblemSection, value: Any) -> str:
    """Return the answer as text; only reward functions of the recipe can do without one."""
    column = str(section.answer_column)
    if value is None or value != value or not str(value).strip():  # pandas saves null as NaN
        if section.rewards:
            return ""
        raise BadRow(f"{place}: {column} is empty; correct the row, or remove it")
    if isinstance(value, str | int | float):
        return _unicode(place, column, str(value))
    rule = f"{column} is {_kind(value)}, neither text nor a number"
    raise BadRow(f"{place}: {rule}; name another answer_column, or null and a reward function")


def _unicode(place: str, column: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRow(f"{place}: {column} is no valid text: {one_line(error)}; correct it") from None
    return text


def _kind(value: Any) -> str:
    return "null" if value is None else f"{shown(value, 40)} ({type(value).__name__})"
