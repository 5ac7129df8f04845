"""`memsaver report RUN [--out FILE.html]`: one HTML page about a run, from its folder alone."""

from __future__ import annotations

import io
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from operator import itemgetter, truediv
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from memsaver.errors import format_bytes
from memsaver.system.machine import replace_text
from recipes.errors import RecipeError, one_line, writable
from recipes.logs.history import (
    NOTABLE,
    TAG_COLOURS,
    Row,
    Run,
    beside_the_task,
    format_seconds,
    kind_of,
    read_run,
    seconds_of_stages,
    switch_seconds,
)

if TYPE_CHECKING:
    from recipes.logs.plots import Chart, Tip

FOLDER = Path(__file__).parent / "page"
NO_TRACE = "needs stages over time, and no trace.json could be read "
NO_TRACE += "(a run that was killed or still goes has none)."
NO_ROWS = "needs a finished step, and metrics.jsonl has none."
NO_PLAN = "needs plan.json of the planner and measured peaks in the rows; this run has not both."
NO_PLACE = "needs environment.json, which this run did not write."
DEVICE = "device"  # among the measured: everything on it, whoever holds it
WITHIN, UNDER = 3.0, 1.0  # percent that a plan may be off the measured peak, and may be under it
MEDIANS = (
    ("step_seconds", "step, median", format_seconds),
    ("tokens_per_second", "tokens a second, median", lambda value: f"{value:,.0f}"),
    ("mismatch_mean", "log-prob mismatch, median", lambda value: f"{value:.1e}"),
    ("mismatch_mean_unreplayed", "the same without replay", lambda value: f"{value:.1e}"),
    ("groups_without_signal", "groups without signal, median", lambda value: f"{value:.0f}"),
)
COLUMNS = (
    "reward reward_std groups_without_signal advantage_std exact_match loss value_loss "
    "kl_to_reference entropy grad_norm learning_rate mismatch_mean mismatch_max "
    "mismatch_mean_unreplayed "
    "response_length tokens tokens_per_second step_seconds"
)


class Missing(NamedTuple):
    """A figure that is not there, and why."""

    title: str
    reason: str


class Table(NamedTuple):
    """Cells as shown; all but the first column are numbers, unless `prose`. folded: on a click.
    note: behind the caption, which the page has under the title.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    prose: bool = False
    folded: bool = False
    note: str = ""


class Section(NamedTuple):
    """A part of the page; of its blocks, those are left out that are None."""

    name: str
    title: str
    blocks: Sequence[Chart | Table | Missing | None]


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
        figures=key_figures(run),
        gaps=run.gaps,
        sections=make_sections(run),
        svg_of=svg_of,
        recipe=run.recipe_text,
    )


def variables() -> dict[str, str]:
    """Names of the page's colours, which follow the theme, by colour of a figure."""
    from recipes.logs.plots import EDGE, GRID, INK, OTHER_COLOURS, PALE

    named = {INK: "ink", GRID: "grid", EDGE: "edge", PALE: "pale"}
    named |= {colour: tag.replace("_", "-") for tag, colour in TAG_COLOURS.items()}
    return named | {colour: f"other-{index}" for index, colour in enumerate(OTHER_COLOURS, 1)}


def svg_of(chart: Chart) -> str:
    """SVG in the page's colours, complete, with the tips as titles; for a page of HTML."""
    import matplotlib
    from matplotlib.figure import Figure

    from recipes.logs.plots import STYLE, WIDTH

    buffer, width, height = io.StringIO(), 72 * WIDTH, 72 * chart.height
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": chart.name}):
        figure = Figure(figsize=(WIDTH, chart.height), dpi=72, layout="constrained")
        tips = chart.draw(figure)
        unsigned = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", metadata=unsigned, transparent=True)
    inside = buffer.getvalue().partition("<svg")[2].partition(">")[2].rpartition("</svg>")[0]
    inside = re.sub(r' id="[a-zA-Z0-9]+_\d+"', "", inside).replace("xlink:href", "href")
    inside = re.sub(r"(\.\d\d)\d+", r"\1", inside)  # hundredths of a point are fine enough
    for colour, name in variables().items():
        inside = inside.replace(colour, f"var(--{name})")
    titles = "".join(_rectangle(tip, height) for tip in tips)
    box = f'viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(chart.title)}"'
    return f'<svg class="chart" {box}>{inside}<g class="tips">{titles}</g></svg>'


def _rectangle(tip: Tip, height: float) -> str:
    low, high = tip.axes.get_ylim() if tip.low is None or tip.high is None else (tip.low, tip.high)
    corners = tip.axes.transData.transform([(tip.left, low), (tip.right, high)])
    (left, right), (one, other) = sorted(corners[:, 0]), sorted(height - corners[:, 1])
    size = f'width="{max(right - left, 0.6):.2f}" height="{other - one:.2f}"'
    place = f'x="{left:.2f}" y="{one:.2f}" {size}'
    return f"<rect {place}><title>{escape(tip.text)}</title></rect>"


def make_sections(run: Run) -> list[Section]:
    """Lists what stands on the page, in order, and what is said where a figure cannot be drawn."""
    from recipes.logs import plots

    learnt = [
        plots.reward_chart(run) or Missing("Reward and evaluations", NO_ROWS),
        evaluations(run),
        plots.mismatch_chart(run) or Missing("Log-probability mismatch", NO_ROWS),
        plots.critic_chart(run),
    ]
    time = [
        plots.run_chart(run) or Missing("Stages of the whole run", NO_TRACE),
        plots.step_chart(run) or Missing("One step", NO_TRACE),
        plots.wake_up_chart(run) or Missing("The wake-up", NO_TRACE),
        slowest_stages(run) or Missing("Slowest stages", NO_ROWS),
        plots.seconds_chart(run),
    ]
    by_tag = plots.tags_chart(run) or plots.phases_chart(run)
    memory = [
        by_tag or Missing("Memory by tag", NO_TRACE),
        plots.processes_chart(run) or Missing("Memory by process", NO_TRACE),
        plots.devices_chart(run),
        planned_and_measured(run) or Missing("Planned and measured", NO_PLAN),
    ]
    speed = [
        plots.speed_chart(run) or Missing("Generation", NO_ROWS),
        plots.sync_chart(run) or Missing("Weight sync", NO_ROWS),
    ]
    itself = [environment(run) or Missing("Where it ran", NO_PLACE), every_step(run)]
    return [
        Section("learning", "What it learnt", learnt),
        Section("time", "Where the time went", time),
        Section("memory", "Who held the memory", memory),
        Section("speed", "Generation and weight sync", speed),
        Section("run", "The run itself", itself),
    ]


def key_figures(run: Run) -> list[tuple[str, str]]:
    """Name and value of what one wants to know first, as far as it is known."""
    done, asked = run.train[-1]["step"] if run.train else 0, run.recipe.get("steps", "?")
    found = [("steps", f"{done} of {asked}")]
    if rewards := [row["reward"] for row in run.rows_with("reward")]:
        found.append(("reward, first and last step", f"{rewards[0]:.3f} → {rewards[-1]:.3f}"))
    if exact := [100 * row["exact_match"] for row in run.evaluations if "exact_match" in row]:
        found.append(("held-out exact match", f"{exact[0]:.0f} % → {exact[-1]:.0f} %"))
    for key, name, show in MEDIANS:
        if values := [row[key] for row in run.rows_with(key)]:
            found.append((name, show(statistics.median(values))))
    if rows := run.rows_with("stages", "step_seconds"):
        switches = [switch_seconds(row) for row in rows]
        share = statistics.median(map(truediv, switches, [row["step_seconds"] for row in rows]))
        median = format_seconds(statistics.median(switches))
        found.append(("switch, median", f"{median}, {100 * share:.1f} % of the step"))
    hidden = [row["hidden_seconds"] for row in run.rows_with("hidden_seconds")]
    if hidden and statistics.median(hidden) >= NOTABLE:
        beside = format_seconds(statistics.median(hidden))
        found.append(("memory moved beside work, median", beside))
    if planned := (run.plan.get("switch") or {}).get("seconds"):
        found.append(("switch, planned", format_seconds(planned)))
    if syncs := seconds_of_stages(run.rows_with("stages")).get("sync_weights"):
        found.append(("weight sync, median", format_seconds(statistics.median(syncs))))
    if run.events:
        peak = run.levels(run.begin, run.end).peak
        found.append(("peak of all tags", format_bytes(peak)))
    if run.spans:
        found.append(("time in all", format_seconds(run.end - run.begin)))
    return found


def slowest_stages(run: Run) -> Table | None:
    """Stages by their share of all the steps' time, from the rows: it needs no trace."""
    rows = run.rows_with("stages", "step_seconds")
    if not rows:
        return None
    whole = sum(row["step_seconds"] for row in rows)
    return Table(
        title="Slowest stages",
        head=("stage", "who works", "share", "median", "largest", "in all", "times"),
        rows=[
            (
                name,
                kind_of(name),
                f"{100 * sum(times) / whole:.1f} %",
                *map(format_seconds, (statistics.median(times), max(times), sum(times))),
                str(len(times)),
            )
            for name, times in seconds_of_stages(rows).items()
        ],
    )


def planned_and_measured(run: Run) -> Table | None:
    """A line for each stage's fullest device and each process; None without plan or peaks."""
    peaks = measured_peaks(run.rows)
    rows: list[Sequence[str]] = []
    for entry in [entry for entry in run.plan.get("stages", ()) if entry["stage"] in peaks]:
        sides, measured = entry["device_bytes"], peaks[entry["stage"]]
        device = entry.get("used_bytes") or sum(sides.values())  # used: with contexts
        of = measured.get(DEVICE)
        rows.append((entry["stage"], *_compared(device, of)))
        for side, nbytes in sides.items():
            rows.append((f"– {side}", *_compared(nbytes, measured.get(side), of)))
    if not rows:
        return None
    gpu, size = run.plan.get("gpu"), run.plan.get("gpu_bytes")
    if outside := run.plan.get("outside"):
        sizes = outside["assumed"], outside["measured"]
        rows.append(("outside of tags, at the start", *_compared(*sizes, size)))
    on = f" on {gpu} ({format_bytes(size)})" if gpu and size else ""
    judged = (
        f"under by more than {UNDER:g} % of the device's bytes, or off by more than {WITHIN:g} %"
    )
    head = ("stage", "planned", "measured", "difference", "")
    note = f"Planned{on}. ✗: the plan is {judged}."
    return Table(title="Planned and measured", head=head, rows=rows, note=note)


def measured_peaks(rows: Sequence[Row]) -> dict[str, dict[str, int]]:
    """Returns, by stage, the most of all rows: of a device (DEVICE), of each side's process.

    Left out: a stage that only the first of several steps had, before there was an update.
    """
    found: dict[str, dict[str, int]] = {}
    peaks = [row["peaks"] for row in rows if "peaks" in row]
    later = set().union(*(peaks[1:] or peaks))
    for each in peaks:
        for stage, peak in each.items():
            if stage not in later:
                continue
            largest = found.setdefault(stage, {})
            by_owner = {DEVICE: peak.get("device_bytes"), **peak.get("processes", {})}
            for owner, nbytes in by_owner.items():
                side = owner.partition("[")[0]
                if nbytes is not None:  # the CPU has no figure of the whole device
                    largest[side] = max(largest.get(side, 0), nbytes)
    return found


def _compared(
    planned: int, measured: int | None, of: int | None = None
) -> tuple[str, str, str, str]:
    """of: what a difference is judged by; an idle process holds next to nothing."""
    if not measured:
        unknown = "not measured" if measured is None else format_bytes(0)
        return format_bytes(planned), unknown, "–", "" if measured is None or not planned else "✗"
    off = 100 * (planned - measured) / measured
    judged = 100 * (planned - measured) / (of or measured)
    sign = "✓" if -UNDER <= judged <= WITHIN else "✗"
    return format_bytes(planned), format_bytes(measured), f"{off:+.1f} %", sign


def evaluations(run: Run) -> Table | None:
    if not run.evaluations:
        return None
    keys = {"exact_match": "held-out"} | beside_the_task(*run.evaluations)
    rows = []
    for row in run.evaluations:
        cells = _cells(row, keys, ".3f")
        rows.append((str(row["step"]), *cells, str(row.get("problems", "–"))))
    head = ("updates", *keys.values(), "problems")
    return Table(title="Evaluations", head=head, rows=rows)


def every_step(run: Run) -> Table | None:
    keys = [key for key in COLUMNS.split() if run.rows_with(key)]
    if not keys:
        return None
    rows = [(str(row["step"]), *_cells(row, keys, ".4g")) for row in run.train]
    head = ("step", *(key.replace("_", " ") for key in keys))
    return Table(title="Every step", head=head, rows=rows, folded=True)


def _cells(row: Row, keys: Iterable[str], form: str) -> list[str]:
    return [f"{row[key]:{form}}" if key in row else "–" for key in keys]


def environment(run: Run) -> Table | None:
    """A column for each session that recorded where it ran."""
    if not run.environments:
        return None
    columns = [_described(found) for found in run.environments]
    names = ["date", "host", "cpus", "gpu", "driver", "python"]
    names += sorted(set().union(*columns) - set(names))
    filled = [dict.fromkeys(names, "–") | column for column in columns]
    rows = [(name, *map(itemgetter(name), filled)) for name in names]
    several = [f"session {number}" for number in range(1, 1 + len(columns))]
    head = ("", *(several if len(columns) > 1 else ["session"]))
    return Table(title="Where it ran", head=head, rows=rows, prose=True)


def _described(found: Mapping[str, Any]) -> dict[str, str]:
    gpus = found.get("gpus", [])
    names = ("date", "host", "cpus", "python")
    text = {name: str(found[name]) for name in names if name in found}
    cards = Counter(f"{gpu['name']}, {gpu['memory']}" for gpu in gpus)
    counted = [card if count == 1 else f"{count} x {card}" for card, count in cards.items()]
    text["gpu"] = "; ".join(counted) or "none"
    text["driver"] = "; ".join(dict.fromkeys(gpu["driver"] for gpu in gpus)) or "–"
    return text | found.get("packages", {})
