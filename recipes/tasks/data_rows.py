"""Rows of data files and folders, and of data sets that the package `datasets` loads.

JSONL, JSON and CSV are read with Python's own modules: they need no extra, name the line of a
fault, and leave no cache. Parquet needs `pyarrow`; the Hub, clones of its data sets, and folders
of `save_to_disk` need `datasets`.
"""

import csv
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from recipes.config.sections import ProblemSection
from recipes.errors import RecipeError, counted, one_line, shown

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json")
"""Files beside the rows of a data set, which describe it."""


class DataRow(NamedTuple):
    """A row with its place.

    Attributes:
        place: File and line (`train.jsonl, line 3`), for messages.
        values: Values by column, as the file stores them.
        declared: Parts of the columns that the file declares as JSON, as `_json_parts` finds them.
    """

    place: str
    values: Mapping[str, Any]
    declared: Mapping[str, Any] = {}

    def value(self, column: str, *, padded: bool = True) -> Any:
        """Return the decoded value of a column, None if the row has none.

        Arrow gives all structs of a column the same keys, and fills in null. Without `padded`,
        nulls are left out of structs at every depth. Declared JSON keeps its own nulls.
        """
        value = self.values.get(column)
        value = value if padded else _without_nulls(value)
        return _decoded(f"{self.place}: {column}", value, self.declared.get(column))


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return list(map(_without_nulls, value)) if isinstance(value, list) else value


def _decoded(place: str, value: Any, parts: Any) -> Any:
    """Return a value with its declared JSON decoded; a list's items have the same parts."""
    if value is None or not parts:
        return value
    if isinstance(value, list):
        return [_decoded(place, item, parts) for item in value]
    if parts is True:
        return _parsed(place, value)
    return {key: _decoded(place, item, parts.get(key)) for key, item in value.items()}


class BadRow(ValueError):
    """Rows that cannot be read; the message is place, rule and remedy."""


def data_rows(section: ProblemSection, place: str) -> Iterator[DataRow]:
    """Yield the rows of `section.data`: a file, a folder, or a data set of the Hub.

    Raises:
        BadRow: Rows cannot be read.
        RecipeError: Keys of the section `place` do not suit the data.
    """
    data = str(section.data)
    path = Path(data).expanduser()
    if path.is_file():
        yield from _file(path)
    elif path.is_dir():
        yield from _folder(path, section, place)
    elif path.suffix in READERS or not HUB_NAME.fullmatch(data):
        where = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise BadRow(f"no such file or folder{where}; correct it, or name ORG/NAME on the Hub")
    else:
        yield from _data_set(data, section, place)


def _folder(path: Path, section: ProblemSection, place: str) -> Iterator[DataRow]:
    """Yield the rows of a folder's files, or of the data set that is saved in the folder."""
    files = [file for file in sorted(path.iterdir()) if _has_rows(file)]
    if _is_saved(path) or (not files and any(map(_has_rows, path.rglob("*.*")))):
        yield from _data_set(str(path.absolute()), section, place)
        return
    for key, value in (("subset", section.subset), ("split", section.split)):
        if value not in (None, "train"):
            rule = "only a data set on the Hub has one, and this is a folder; drop it"
            raise RecipeError(f"{place}.{key}={value}: {rule}")
    if not files:
        raise BadRow(f"has no rows in files of the kinds {', '.join(READERS)}; name another folder")
    for file in files:
        yield from _file(file)


def _is_saved(path: Path) -> bool:
    """Return whether `save_to_disk` wrote a folder."""
    one = (path / DESCRIPTIONS[0]).is_file() and (path / "state.json").is_file()
    return one or (path / "dataset_dict.json").is_file()


def _has_rows(file: Path) -> bool:
    return file.suffix in READERS and file.name not in DESCRIPTIONS


def _file(file: Path) -> Iterator[DataRow]:
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
                yield _object(place, _parsed(place, line.rstrip()))


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
        why = one_line(error)
        if "\n" not in text:  # The place names the line.
            why = why.replace(": line 1 column", ": column")
        raise BadRow(f"{place}: is no JSON: {why}; correct it") from None


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
            if any(name.startswith(" ") for name in header):
                lines.seek(0)  # Blanks after commas belong to no value.
                reader = csv.reader(lines, strict=True, skipinitialspace=True)
                header = next(reader)
            if len({*header}) < len(header):
                raise BadRow(f"{file.name}, line 1: names a column twice; rename one")
            for fields in filter(None, reader):
                place = f"{file.name}, line {reader.line_num}"
                if len(fields) != len(header):
                    rule = f"has {counted(len(fields), 'field')}, and the header has {len(header)}"
                    raise BadRow(f"{place}: {rule}; quote fields that have commas")
                yield DataRow(place, dict(zip(header, fields, strict=True)))
        except csv.Error as error:
            place = f"{file.name}, line {reader.line_num}"
            raise BadRow(f"{place}: is no CSV: {one_line(error)}; correct it") from None


def _parquet(file: Path) -> Iterator[DataRow]:
    parquet = _imported("pyarrow.parquet", f"{file.name} needs")
    try:
        table = parquet.ParquetFile(file).read()
    except Exception as error:
        rule = f"is no readable parquet: {one_line(error)}"
        raise BadRow(f"{file.name} {rule}; save it again") from None
    return _arrow(file.name, table)


READERS: dict[str, Callable[[Path], Iterator[DataRow]]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}
"""Readers of files by ending."""


def _arrow(name: str, table: Any) -> Iterator[DataRow]:
    """Yield the rows of an Arrow table."""
    described = json.loads((table.schema.metadata or {}).get(b"huggingface", "{}"))
    features = described.get("info", {}).get("features", {})
    declared = {}
    for index, column in enumerate(table.schema):
        declared[column.name] = _json_parts(column.type, features.get(column.name))
        if str(column.type) == "float":  # As a double, 0.1 would read 0.10000000149011612.
            values = table.column(index).cast("string").cast("double")
            table = table.set_column(index, column.name, values)
    for number, values in enumerate(table.to_pylist(), 1):
        yield DataRow(f"{name}, row {number}", values, declared)


def _json_parts(kind: Any, feature: Any) -> Any:
    """Return which parts of a column hold JSON: True for all, or parts by field of a struct.

    `kind` is the Arrow type, which can itself be JSON. `feature` is the type as `datasets` notes
    it in the file's metadata.
    """
    feature = {"feature": feature[0]} if isinstance(feature, list) else feature or {}
    if getattr(kind, "extension_name", "") == "arrow.json" or feature.get("_type") == "Json":
        return True
    if hasattr(kind, "value_type"):  # Lists of any kind
        return _json_parts(kind.value_type, feature.get("feature"))
    fields = kind if str(kind).startswith("struct<") else ()
    parts = {field.name: _json_parts(field.type, feature.get(field.name)) for field in fields}
    return {name: part for name, part in parts.items() if part}


def _data_set(data: str, section: ProblemSection, place: str) -> Iterator[DataRow]:
    """Yield the rows of a data set of the Hub, or of a folder with one."""
    local = "is the folder of a data set, which" if Path(data).is_dir() else ""
    datasets = _imported("datasets", f"{local or 'is no file or folder, and the Hub'} needs")
    errors = _imported("huggingface_hub.errors", "the Hub needs")
    try:
        table = _loaded(datasets, data, section).with_format("arrow")[:]
    except (datasets.exceptions.DatasetNotFoundError, errors.RepositoryNotFoundError) as error:
        if "is a gated dataset" in str(error) or isinstance(error, errors.GatedRepoError):
            page = f"https://huggingface.co/datasets/{section.data}"
            raise BadRow(f"is gated; accept its terms at {page}, and set HF_TOKEN") from error
        rule = "is no file or folder here, nor a public data set of the Hub"
        raise BadRow(f"{rule}; correct it, or set HF_TOKEN") from error
    except ConnectionError as error:
        raise BadRow(f"the Hub cannot be reached: {one_line(error)}; name a file") from error
    except Exception as error:  # Builders raise errors of any type.
        if not local and isinstance(error, OSError) and error.errno is not None:
            remedy = "set HF_HOME to a folder that you may write"
            raise BadRow(f"cannot be cached: {one_line(error)}; {remedy}") from error
        keys = f"{place}.subset={shown(section.subset)}, {place}.split={section.split}"
        raise BadRow(f"{shown(one_line(error), 400)}; correct it, or {keys}") from error
    yield from _arrow(str(section.data), table)


def _loaded(datasets: Any, data: str, section: ProblemSection) -> Any:
    if not _is_saved(Path(data)):
        return datasets.load_dataset(data, section.subset, split=section.split)
    saved = datasets.load_from_disk(data)
    splits = saved if isinstance(saved, dict) else {"train": saved}
    if section.subset is not None or section.split not in splits:
        raise ValueError(f"the folder of save_to_disk has the splits {[*splits]} and no subset")
    return splits[section.split]


def _imported(module: str, user: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise BadRow(f"{user} the package {package}; run: pip install 'memsaver[data]'") from None
