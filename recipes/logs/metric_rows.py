"""Rows of a run: metrics.jsonl and samples.jsonl, and what a row says."""

import contextlib
import functools
import json
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from recipes.loops.figures import renamed

METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
BULKY = ("stages", "sync", "memory", "peaks")  # parts of a row with many numbers
# Shares of right answers in an evaluation. avg@n and pass@1 equal the share of correct answers.
QUALITY = r"(correct|pass@(?!1\b|1_)\d+)(_.+)?"

Row = dict[str, Any]


def whole_rows(file: Path, apart_from: Collection[str] = ()) -> list[Row]:
    """Return the rows of a file; skip the half line that a killed run may leave.

    Rows of before, in which correct answers were called exact, are read with a line. Parts of the
    rows that `apart_from` names are left out.
    """
    rows = []
    for line in file.read_text().splitlines() if file.is_file() else []:
        with contextlib.suppress(ValueError):
            row = renamed(read := json.loads(line))
            if row != read:
                _tell_renamed(file)
            rows.append({name: row[name] for name in row if name not in apart_from})
    return rows


@functools.cache
def _tell_renamed(file: Path) -> None:
    print(f"memsaver: {file}: what its rows call exact is read as correct", file=sys.stderr)


def json_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return rows as JSON, each on a line of its own."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def position_of(row: Mapping[str, Any]) -> tuple[int, bool]:
    """Return where a row or sample stands in the order of rows: a step, then its evaluation."""
    return row["step"], row["kind"] == "eval"


def of_kind(rows: Iterable[Row], kind: str, *keys: str) -> list[Row]:
    """Return the rows of a kind ("train" or "eval") that have a value for every given key."""
    return [row for row in rows if row["kind"] == kind and None not in map(row.get, keys)]


def kind_of(stage: str) -> str:
    """Return the side that works in a stage ("rollout", "train"), or "switch" for moves."""
    if stage in ("generate_sequences", "select_groups", "evaluate"):
        return "rollout"
    works = ("compute_", "update_", "refresh_", "save_", "export")
    return "train" if stage.startswith(works) else "switch"


def switch_seconds(row: Mapping[str, Any]) -> float:
    """Return the seconds of a step in stages that switch sides, including the weight sync."""
    stages = row.get("stages", {}).items()
    return sum(seconds for stage, seconds in stages if kind_of(stage) == "switch")


def numbers_of(row: Mapping[str, Any], apart_from: Collection[str] = ()) -> dict[str, float]:
    """Return all numbers of a row but its step by name, nested ones as `stages/update_actor`."""
    parts = {name: value for name, value in row.items() if name not in {"step", *apart_from}}
    return {name: float(value) for name, value in flat(parts, "/") if isinstance(value, Real)}


def flat(values: Mapping[str, Any], separator: str) -> Iterator[tuple[str, Any]]:
    """Yield all values by name; the names of nested ones are joined by the separator."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            for inner, last in flat(value, separator):
                yield f"{name}{separator}{inner}", last
        else:
            yield name, value


def brief(value: float) -> str:
    """Return a number for people, with four digits unless it is whole or a thousand and more."""
    return f"{value:,.0f}" if value.is_integer() or abs(value) >= 1000 else f"{value:.4g}"
