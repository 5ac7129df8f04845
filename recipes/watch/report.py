"""`memsaver report RUN [--out FILE.html]`: one HTML page about a run, from its folder alone."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from memsaver import Event
from memsaver.common.machine import replace_text
from recipes.errors import RecipeError, one_line, writable
from recipes.watch import tables
from recipes.watch.history import STAGES, Row, Run

if TYPE_CHECKING:
    from recipes.watch.charts import Chart

FOLDER = Path(__file__).parent / "page"
NO_TRACE = "needs stages over time, and no trace.json could be read "
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


NO_TRACE += "(a run that was killed or still goes has none)."
NO_ROWS = "needs a finished step, and metrics.jsonl has none."
NO_PLAN = "needs plan.json of the planner and measured peaks in the rows; this run has not both."
NO_PLACE = "needs environment.json, which this run did not write."


class Missing(NamedTuple):
    """A figure that is not there, and why."""

    title: str
    reason: str


class Section(NamedTuple):
    """A part of the page; of its blocks, those are left out that are None."""

    name: str
    title: str
    blocks: Sequence[Chart | tables.Table | Missing | None]


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Writes one HTML page about the run in `run_dir` and returns its path (report.html there).

    The page needs no other file and no network. Of a run that was killed it shows what there is and
    says what is missing. RecipeError: no run there, nowhere to write, or no matplotlib.
    """
    run = read_run(run_dir)
    try:
        html = render_page(run)
    except ImportError as error:
        install = "pip install 'memsaver[plots]'"
        raise RecipeError(f"report: {one_line(error)}; run: {install}") from None
    file = out or run_dir / "report.html"
    with writable(f"--out {file}"):
        replace_text(file, html)
    return file


def render_page(run: Run) -> str:
    """HTML that holds everything it shows. ImportError without matplotlib or jinja2."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    engine = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    recipe, environments = run.recipe, run.environments
    task = (recipe.get("task") or {}).get("name")
    begun = environments[0].get("date") if environments else None
    return engine.get_template("page.html").render(
        name=run.path.resolve().name,
        about=[recipe.get("algorithm"), task, recipe.get("driver"), recipe.get("device"), begun],
        figures=tables.key_figures(run),
        gaps=run.gaps,
        sections=make_sections(run),
        recipe=run.recipe_text,
    )


def make_sections(run: Run) -> list[Section]:
    """Lists what stands on the page, in order, and what is said where a figure cannot be drawn."""
    from recipes.watch import charts, time_charts

    learnt = [
        charts.reward_chart(run) or Missing("Reward and evaluations", NO_ROWS),
        tables.evaluations(run),
        charts.gap_chart(run) or Missing("Log-probability gap", NO_ROWS),
        charts.critic_chart(run),
    ]
    time = [
        time_charts.run_chart(run) or Missing("Stages of the whole run", NO_TRACE),
        time_charts.step_chart(run) or Missing("One step", NO_TRACE),
        time_charts.wake_up_chart(run) or Missing("The wake-up", NO_TRACE),
        tables.slowest_stages(run) or Missing("Slowest stages", NO_ROWS),
        charts.seconds_chart(run),
    ]
    by_tag = time_charts.tags_chart(run) or time_charts.phases_chart(run)
    memory = [
        by_tag or Missing("Memory by tag", NO_TRACE),
        time_charts.processes_chart(run) or Missing("Memory by process", NO_TRACE),
        time_charts.devices_chart(run),
        tables.planned_and_measured(run) or Missing("Planned and measured", NO_PLAN),
    ]
    speed = [
        charts.speed_chart(run) or Missing("Generation", NO_ROWS),
        charts.sync_chart(run) or Missing("Weight sync", NO_ROWS),
    ]
    itself = [tables.environment(run) or Missing("Where it ran", NO_PLACE), tables.every_step(run)]
    return [
        Section("learning", "What it learnt", learnt),
        Section("time", "Where the time went", time),
        Section("memory", "Who held the memory", memory),
        Section("speed", "Generation and weight sync", speed),
        Section("run", "The run itself", itself),
    ]
