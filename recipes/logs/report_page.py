"""The command `memsaver report`: one HTML page about a run, from its folder alone."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import chain
from operator import or_, truediv
from pathlib import Path
from typing import Any

from memsaver.errors import format_bytes
from memsaver.system.files import replace_text
from recipes.config.yaml_values import read_values
from recipes.errors import RecipeError, one_line, shown, writable
from recipes.logs.curves import panels_of
from recipes.logs.metric_rows import (
    BULKY,
    METRICS,
    Row,
    brief,
    numbers_of,
    of_kind,
    switch_seconds,
    whole_rows,
)
from recipes.logs.peaks import ROLLOUT_GPU
from recipes.logs.recorded_samples import COLUMNS, cells, read_samples, shortened
from recipes.logs.run_folder import check_holds_run, read_json

TEMPLATE = Path(__file__).with_name("page.html")
ABOUT = ("algorithm", "task", "driver", "device")  # keys of the recipe at the top of the page
DEVICE = "device"  # name of the whole device among measured processes
FIRST = ("reward", "reward_std", "correct")  # in tables
WITHIN, UNDER = 3.0, 1.0  # percent that a plan may be above and below the measured peak


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Write one HTML page about a run and return its file, by default report.html in `run_dir`.

    The page needs no other file and no network. For an unfinished run it shows the available data
    and names the missing parts.

    Raises:
        RecipeError: The folder holds no run, the file cannot be written, or matplotlib or jinja2
            is missing.
    """
    check_holds_run("report", run_dir)
    try:
        html = render_page(run_dir)
    except ImportError as error:
        install = "pip install 'memsaver[plots]'"
        raise RecipeError(f"report: {one_line(error)}; run: {install}") from None
    file = out or run_dir / "report.html"
    with writable(f"--out {file}"):
        replace_text(file, html)
    return file


def render_page(path: Path) -> str:
    """Return the HTML of the run in `path`."""
    from jinja2 import Environment, StrictUndefined

    from recipes.logs.pictures import data_uri, draw_curves

    rows = whole_rows(path / METRICS)
    train, evaluations = of_kind(rows, "train"), of_kind(rows, "eval")
    recipe, memory = read_values(path / "recipe.yaml"), path / "memory.png"
    task = recipe.get("task")
    named = recipe | {"task": task.get("name") if isinstance(task, dict) else task}
    engine = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return engine.from_string(TEMPLATE.read_text()).render(
        name=path.resolve().name,
        about=[value for name in ABOUT if (value := named.get(name))],
        steps=recipe.get("steps"),
        done=len(train),
        figures=key_figures(rows),
        decisions=decided(read_json(path / "decisions.json")),
        curves=[(panel, data_uri(draw_curves([panel]))) for panel in panels_of(rows)],
        memory=data_uri(memory.read_bytes() if memory.is_file() else None),
        held=memory_held(rows),
        stages=longest_stages(rows),
        planned=planned_and_measured(rows, read_json(path / "plan.json")),
        within=WITHIN,
        under=UNDER,
        tables={"Evaluations": tabulated(evaluations), "Every step": tabulated(train)},
        samples=newest_samples(path),
        columns=COLUMNS,
        environment=read_json(path / "environment.json"),
        recipe=(path / "recipe.yaml").read_text(),
    )


def decided(decisions: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return name, value and reason of each decision."""
    reasons = decisions.pop("reasons", {})
    values = ((name, shown(value)) for name, value in decisions.items())
    return [(name, value, reasons.get(name, "")) for name, value in values]


def key_figures(rows: Sequence[Row]) -> dict[str, str]:
    """Return the available key figures of a run by name."""
    figures = {}
    if rewards := [row["reward"] for row in of_kind(rows, "train", "reward")]:
        figures["reward, first and last step"] = f"{rewards[0]:.3f} → {rewards[-1]:.3f}"
    if correct := [100 * row["correct"] for row in of_kind(rows, "eval", "correct")]:
        figures["held-out, correct"] = f"{correct[0]:.0f} % → {correct[-1]:.0f} %"
    keys = ("step_seconds", "tokens_per_second", "hidden_seconds")
    if timed := of_kind(rows, "train", "stages", *keys):

        def median(key: str) -> float:
            return statistics.median(row[key] for row in timed)

        switches = [switch_seconds(row) for row in timed]
        share = statistics.median(map(truediv, switches, [row["step_seconds"] for row in timed]))
        figures |= {
            "step, median": f"{median('step_seconds'):.2f} s",
            "switch, median": f"{statistics.median(switches):.3f} s, {share:.1%} of the step",
            "overlapped moves, median": f"{median('hidden_seconds'):.3f} s",
            "tokens per second, median": f"{median('tokens_per_second'):,.0f}",
        }
    if sent := [
        size for row in of_kind(rows, "train", "sync") if (size := row["sync"].get("node_bytes"))
    ]:
        figures["between machines in a sync"] = format_bytes(sent[-1])
    if mismatches := [row["mismatch_mean"] for row in of_kind(rows, "train", "mismatch_mean")]:
        median_mismatch = statistics.median(mismatches)
        figures["log-probability mismatch, median"] = f"{median_mismatch:.1e}"
    return figures


def memory_held(rows: Sequence[Row]) -> str:
    """Return a sentence about the bytes of the tags in each phase of the newest step, if any."""
    memories = [row["memory"] for row in rows if row.get("memory")]
    phases: dict[str, dict[str, int]] = memories[-1] if memories else {}
    held = {phase: sum(tags.values()) for phase, tags in phases.items()}
    together = reduce(or_, map(Counter, phases.values()), Counter[str]()).total()
    if not held or min(held.values()) == together:
        return f"Every tag stayed on the device: {format_bytes(together)}." if held else ""
    sizes = [f"{format_bytes(nbytes)} in phase {phase}" for phase, nbytes in held.items()]
    return f"Tags held {' and '.join(sizes)}; all of them have {format_bytes(together)}."


def newest_samples(path: Path) -> dict[str, list[list[Any]]]:
    """Return the samples of the newest evaluation and step, by title of their table."""
    tables: dict[str, list[list[Any]]] = {}
    recorded = read_samples(path)
    for kind, title in (("eval", "evaluation"), ("train", "step")):
        samples = [sample for sample in recorded if sample["kind"] == kind]
        newest = [sample for sample in samples if sample["step"] == samples[-1]["step"]]
        if newest:
            updates = newest[0]["step"]
            name = f"Answers of the newest {title} ({updates})"
            tables[name] = [list(map(_brief, cells(sample))) for sample in newest]
    return tables


def tabulated(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return the names of figures in their order in rows, and a line of cells for every row.

    Seconds of stages and bytes, of which a row has many, are left out.
    """
    numbers = [numbers_of(row, BULKY) for row in rows]
    names = dict.fromkeys(chain.from_iterable(numbers))
    ordered = sorted(names, key=lambda name: name not in FIRST)
    lines = [[row["step"], *map(own.get, ordered)] for row, own in zip(rows, numbers, strict=True)]
    return ["step", *ordered], [list(map(_brief, line)) for line in lines]


def _brief(cell: Any) -> str:
    if isinstance(cell, float):
        return brief(cell)
    return "–" if cell is None else shortened(str(cell))


def longest_stages(rows: Sequence[Row], count: int = 16) -> list[tuple[str, str, str]]:
    """Return the longest stages: name, median seconds, and share of all steps."""
    rows = of_kind(rows, "train", "stages", "step_seconds")
    spent: dict[str, list[float]] = {}
    for stage, seconds in chain.from_iterable(row["stages"].items() for row in rows):
        spent.setdefault(stage, []).append(seconds)
    whole = sum(row["step_seconds"] for row in rows)
    longest = sorted(spent.items(), key=lambda item: -sum(item[1]))[:count]
    return [
        (stage, brief(statistics.median(seconds)), f"{sum(seconds) / whole:.1%}")
        for stage, seconds in longest
    ]


def planned_and_measured(rows: Sequence[Row], plan: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Compare the plan with measured peaks, for each stage's fullest device and its processes.

    A row has stage or process, planned bytes, measured bytes, difference, and ✓ or ✗. There are no
    rows without a plan or without peaks.
    """
    peaks = measured_peaks(rows)
    compared: list[tuple[str, ...]] = []
    for entry in [entry for entry in plan.get("stages", ()) if entry["stage"] in peaks]:
        sides, measured = entry["device_bytes"], peaks[entry["stage"]]
        device = entry.get("used_bytes") or sum(sides.values())  # used_bytes include contexts
        whole = measured.get(DEVICE)
        compared.append((entry["stage"], *_compared(device, whole)))
        for side, nbytes in sides.items():
            compared.append((f"– {side}", *_compared(nbytes, measured.get(side), whole)))
    if compared and (outside := plan.get("outside")):
        sizes = outside["assumed"], outside["measured"], plan.get("gpu_bytes")
        compared.append(("outside of tags, at the start", *_compared(*sizes)))
    return compared


def measured_peaks(rows: Sequence[Row]) -> dict[str, dict[str, int]]:
    """Return the largest bytes of all rows by stage, for the device (DEVICE) and each process.

    A stage that only the first of several steps has is left out, because the first step runs before
    any update. Names of stages on devices without a trainer rank end with ROLLOUT_GPU.
    """
    peaks: dict[str, dict[str, int]] = {}
    steps = [row["peaks"] for row in rows if "peaks" in row]
    for stage in set().union(*(steps[1:] or steps)):
        for peak in [step[stage] for step in steps if stage in step]:
            held = {DEVICE: peak["device_bytes"], **peak["processes"]}
            held[f"{DEVICE}{ROLLOUT_GPU}"] = peak.get("rollout_device_bytes")
            trained = {owner.partition("[")[2] for owner in held if owner.startswith("trainer")}
            for owner, nbytes in held.items():
                side, _, place = owner.removesuffix(ROLLOUT_GPU).partition("[")
                apart = owner.endswith(ROLLOUT_GPU) or (side == "rollout" and place not in trained)
                if nbytes is not None:  # A CPU has no figure for the whole device.
                    largest = peaks.setdefault(stage + ROLLOUT_GPU if apart else stage, {})
                    largest[side] = max(largest.get(side, 0), nbytes)
    return peaks


def _compared(
    planned: int, measured: int | None, whole: int | None = None
) -> tuple[str, str, str, str]:
    """Format two sizes, their difference and a judgment.

    The judgment relates the difference to `whole` bytes if given, because an idle process holds
    next to nothing, else to the measured bytes.
    """
    if not measured:
        unknown = "not measured" if measured is None else format_bytes(0)
        return format_bytes(planned), unknown, "–", "" if measured is None or not planned else "✗"
    off = 100 * (planned - measured) / measured
    judged = 100 * (planned - measured) / (whole or measured)
    sign = "✓" if -UNDER <= judged <= WITHIN else "✗"
    return format_bytes(planned), format_bytes(measured), f"{off:+.1f} %", sign
