"""The folder of a run as plain data. A killed run leaves files out or half written: each such gap is a sentence."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from memsaver import Event
from recipes.errors import RecipeError, one_line
from recipes.watch.history import Span

Row = dict[str, Any]
STAGES = "stages"  # the process of the trace that holds them
_SESSION = re.compile(r"-until-step-(\d+)-(\d+)$")


@dataclass(kw_only=True)
class RunRecord:
    """What the files say. Times are seconds since the first session began; sessions stand one behind the other.

    breaks: where a resumed session begins. plan: plan.json. environments: newest last. gaps: what is not there, or
    not whole, as sentences.
    """

    path: Path
    recipe_text: str = ""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    events: dict[str, list[Event]] = field(default_factory=dict)
    breaks: list[float] = field(default_factory=list)
    plan: Mapping[str, Any] = field(default_factory=dict)
    environments: list[Mapping[str, Any]] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)

    @property
    def train(self) -> list[Row]:
        return [row for row in self.rows if row["kind"] == "train"]

    @property
    def evaluations(self) -> list[Row]:
        return [row for row in self.rows if row["kind"] == "eval"]

    def rows_with(self, *keys: str) -> list[Row]:
        """Training rows that have all of these."""
        return [row for row in self.train if all(row.get(key) is not None for key in keys)]

    @property
    def end(self) -> float:
        """When the last stage or operation ended."""
        times = [finish for _, _, finish in self.spans]
        return max([0.0, *times, *(event.time for group in self.events.values() for event in group)])


def read_run(path: Path) -> RunRecord:
    """Everything that can be read of the run in `path`; RecipeError where there is no run at all."""
    if not path.is_dir():
        raise RecipeError(f"report {path}: no such folder; give the folder of a run, for example runs/tiny-...")
    if not any((path / name).is_file() for name in ("recipe.yaml", "metrics.jsonl", "trace.json")):
        raise RecipeError(f"report {path}: holds no run (no recipe.yaml); give the folder that memsaver run printed")
    run = RunRecord(path=path)
    _read_recipe(run)
    _read_rows(run)
    _read_traces(run)
    _read_environments(run)
    _read_plan(run)
    return run


def _read_recipe(run: RunRecord) -> None:
    file = run.path / "recipe.yaml"
    if not file.is_file():
        run.gaps.append("recipe.yaml is missing: what was asked for is not known.")
        return
    run.recipe_text = file.read_text(errors="replace")
    try:
        content = OmegaConf.to_container(OmegaConf.create(run.recipe_text))
    except (YAMLError, OmegaConfBaseException) as error:
        run.gaps.append(f"recipe.yaml cannot be read: {one_line(error)}")
        return
    if isinstance(content, dict):
        run.recipe = {str(key): value for key, value in content.items()}


def _read_rows(run: RunRecord) -> None:
    file = run.path / "metrics.jsonl"
    lines = file.read_text(errors="replace").splitlines() if file.is_file() else []
    broken = 0
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and row.get("kind") in ("train", "eval") and isinstance(row.get("step"), int):
            run.rows.append(row)
        else:
            broken += 1
    if not file.is_file():
        run.gaps.append("metrics.jsonl is missing: there is no figure of any step.")
    elif broken:
        run.gaps.append(f"metrics.jsonl: {broken} of {len(lines)} lines are not whole and were left out.")
    asked, done = run.recipe.get("steps"), run.train[-1]["step"] if run.train else 0
    if not run.train:
        run.gaps.append("No step was finished.")
    elif isinstance(asked, int) and done < asked:
        run.gaps.append(f"The run ended after step {done} of {asked}.")


def _read_traces(run: RunRecord) -> None:
    """The sessions in order: those a resume put aside, by the step they reached, then the newest."""
    earlier = [(found, file) for file in run.path.glob("trace-*.json") if (found := _SESSION.search(file.stem))]
    earlier.sort(key=lambda pair: (int(pair[0][1]), int(pair[0][2])))
    newest = run.path / "trace.json"
    for file in [*(file for _, file in earlier), newest]:
        if not file.is_file():
            run.gaps.append(f"{file.name} is missing: stages and memory over time are not known for that session.")
            continue
        try:
            _add_session(run, json.loads(file.read_text())["traceEvents"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            run.gaps.append(f"{file.name} cannot be read: {type(error).__name__}: {one_line(error)}")


def _add_session(run: RunRecord, entries: list[dict[str, Any]]) -> None:
    names = {entry["pid"]: entry["args"]["name"] for entry in entries if entry["ph"] == "M"}
    spans: list[Span] = []
    events: dict[str, list[Event]] = {}
    shift = run.end
    for entry in (entry for entry in entries if entry["ph"] == "X"):
        owner, start, seconds = names[entry["pid"]], entry["ts"] / 1e6 + shift, entry["dur"] / 1e6
        if owner == STAGES:
            spans.append((entry["name"], start, start + seconds))
        else:
            events.setdefault(owner, []).append(_event(entry, start, seconds))
    if shift and (spans or events):
        run.breaks.append(shift)
        _end_processes(run, shift)
    run.spans += spans
    for owner, group in events.items():
        run.events.setdefault(owner, []).extend(group)


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


def _end_processes(run: RunRecord, time: float) -> None:
    """The processes of a session are gone before the next: so is what they held."""
    for group in run.events.values():
        last = {event.tag: event for event in group}
        group += [
            replace(event, time=time, seconds=0.0, op="end", committed_bytes=0, backup_bytes=0)
            for event in last.values()
        ]


def _read_environments(run: RunRecord) -> None:
    files = sorted(run.path.glob("environment*.json"), key=lambda file: file.stat().st_mtime)
    for file in files:
        if isinstance(content := _json_or_gap(run, file), dict):
            run.environments.append(content)
    if not files:
        run.gaps.append("environment.json is missing: hardware and versions were not recorded.")


def _read_plan(run: RunRecord) -> None:
    file = run.path / "plan.json"
    if file.is_file() and isinstance(content := _json_or_gap(run, file), dict):
        run.plan = content


def _json_or_gap(run: RunRecord, file: Path) -> Any:
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        run.gaps.append(f"{file.name} cannot be read: {one_line(error)}")
        return None
