"""The folder of a run as a `Run`. A killed run leaves files out or half written: each such gap is a
sentence.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from memsaver import Event
from recipes.errors import RecipeError, one_line
from recipes.watch.history import STAGES, Row, Run

_SESSION = re.compile(r"-until-step-(\d+)-(\d+)$")
_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, YAMLError, OmegaConfBaseException)


def read_run(path: Path) -> Run:
    """Everything that can be read of the run in `path`; RecipeError where there is no run."""
    if not path.is_dir():
        rule = "no such folder; give the folder of a run, for example runs/tiny-..."
        raise RecipeError(f"report {path}: {rule}")
    if not any((path / name).is_file() for name in ("recipe.yaml", "metrics.jsonl", "trace.json")):
        rule = "holds no run (no recipe.yaml); give the folder that memsaver run printed"
        raise RecipeError(f"report {path}: {rule}")
    run = Run(path=path)
    for read in (_read_recipe, _read_rows, _read_traces, _read_environments):
        read(run)
    run.plan = _read_json(run, path / "plan.json")
    return run


@contextlib.contextmanager
def _gap_if_broken(run: Run, file: Path) -> Iterator[None]:
    """A file that cannot be read inside is a gap of the run."""
    try:
        yield
    except _UNREADABLE as error:
        run.gaps.append(f"{file.name} cannot be read: {type(error).__name__}: {one_line(error)}")


def _read_recipe(run: Run) -> None:
    file = run.path / "recipe.yaml"
    if not file.is_file():
        run.gaps.append("recipe.yaml is missing: what was asked for is not known.")
        return
    run.recipe_text = file.read_text(errors="replace")
    with _gap_if_broken(run, file):
        content = OmegaConf.to_container(OmegaConf.create(run.recipe_text))
        if isinstance(content, dict):
            run.recipe = {str(key): value for key, value in content.items()}


def _read_rows(run: Run) -> None:
    file = run.path / "metrics.jsonl"
    lines = file.read_text(errors="replace").splitlines() if file.is_file() else []
    run.rows = [row for line in lines if (row := _row(line)) is not None]
    broken = len(lines) - len(run.rows)
    if not file.is_file():
        run.gaps.append("metrics.jsonl is missing: there is no figure of any step.")
    elif broken:
        whole = f"{broken} of {len(lines)} lines are not whole and were left out."
        run.gaps.append(f"metrics.jsonl: {whole}")
    asked, done = run.recipe.get("steps"), run.train[-1]["step"] if run.train else 0
    if not run.train:
        run.gaps.append("No step was finished.")
    elif isinstance(asked, int) and done < asked:
        run.gaps.append(f"The run ended after step {done} of {asked}.")


def _row(line: str) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    known = isinstance(row, dict) and row.get("kind") in ("train", "eval")
    return row if known and isinstance(row.get("step"), int) else None


def _read_traces(run: Run) -> None:
    """Sessions in order: those a resume put aside, by the step they reached, then the newest."""
    earlier = []
    for file in run.path.glob("trace-*.json"):
        if found := _SESSION.search(file.stem):
            earlier.append((int(found[1]), int(found[2]), file))
    for file in [*(file for *_, file in sorted(earlier)), run.path / "trace.json"]:
        if file.is_file():
            with _gap_if_broken(run, file):
                _add_session(run, json.loads(file.read_text())["traceEvents"])
        else:
            lost = "stages and memory over time are not known for that session."
            run.gaps.append(f"{file.name} is missing: {lost}")


def _add_session(run: Run, entries: Sequence[Mapping[str, Any]]) -> None:
    names = {entry["pid"]: entry["args"]["name"] for entry in entries if entry["ph"] == "M"}
    session, shift = Run(), run.end
    for entry in [entry for entry in entries if entry["ph"] == "X"]:
        owner, start, seconds = names[entry["pid"]], entry["ts"] / 1e6 + shift, entry["dur"] / 1e6
        if owner == STAGES:
            session.spans.append((entry["name"], start, start + seconds))
        else:
            session.add_events(owner, [_event(entry, start, seconds)])
    if shift and (session.spans or session.events):
        run.breaks.append(shift)
        _end_processes(run, shift)
    run.spans += session.spans
    for owner, group in session.events.items():
        run.add_events(owner, group)


def _event(entry: Mapping[str, Any], start: float, seconds: float) -> Event:
    op, _, tag = entry["name"].partition(" ")
    sizes = entry["args"]
    return Event(
        time=start + seconds,
        seconds=seconds,
        op=op,
        tag=tag,
        committed_bytes=sizes["bytes"],
        backup_bytes=sizes.get("backup", 0),
    )


def _end_processes(run: Run, time: float) -> None:
    """The processes of a session are gone before the next: so is what they held."""
    for group in run.events.values():
        for event in {event.tag: event for event in group}.values():
            nothing = replace(event, committed_bytes=0, backup_bytes=0)
            group.append(replace(nothing, time=time, seconds=0.0, op="end"))


def _read_environments(run: Run) -> None:
    files = sorted(run.path.glob("environment*.json"), key=lambda file: file.stat().st_mtime)
    for file in files:
        run.environments += [content] if (content := _read_json(run, file)) else []
    if not files:
        run.gaps.append("environment.json is missing: hardware and versions were not recorded.")


def _read_json(run: Run, file: Path) -> Mapping[str, Any]:
    """Returns what a file holds; nothing where it is missing, broken, or no table of names."""
    with _gap_if_broken(run, file), contextlib.suppress(FileNotFoundError):
        content = json.loads(file.read_text())
        return content if isinstance(content, dict) else {}
    return {}
