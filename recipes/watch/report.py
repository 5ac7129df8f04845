"""`memsaver report RUN [--out FILE.html]`: one HTML page about a run, from its folder alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from memsaver.common.files import replace_text
from recipes.errors import RecipeError, one_line, writable
from recipes.watch import tables
from recipes.watch.history import Run
from recipes.watch.reading import read_run

if TYPE_CHECKING:
    from recipes.watch.charts import Chart

FOLDER = Path(__file__).parent / "page"
NO_TRACE = "needs stages over time, and no trace.json could be read "
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
    """Writes one HTML page about the run in `run_dir` and returns its path: `out`, or report.html
    in the folder.

    The page needs no other file and no network. Of a run that was killed it shows what there is and
    says what is missing. RecipeError: no run there, nowhere to write, or matplotlib is not
    installed.
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
    """HTML that holds everything it shows.

    ImportError where matplotlib or jinja2 is not installed.
    """
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
