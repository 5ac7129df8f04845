"""The command `memsaver report`: one HTML page about a run, from its folder alone."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from memsaver.errors import format_bytes
from memsaver.system.files import replace_text
from recipes.config.yaml_values import read_values
from recipes.errors import RecipeError, one_line, shown, writable
from recipes.logs.curves import panels_of
from recipes.logs.metric_rows import BULKY, Row, brief, numbers_of, of_kind, switch_seconds
from recipes.logs.peaks import ROLLOUT_GPU
from recipes.logs.recorded_samples import COLUMNS, cells, read_samples, shortened
from recipes.logs.run_folder import RunFolder, check_holds_run, read_json

TEMPLATE = Path(__file__).with_name("page.html")
DEVICE = "device"  # name of the whole device among measured processes
FIRST = ("reward", "reward_std", "correct")  # in tables
MEDIANS = {  # figures of steps whose median is shown: label and format
    "step_seconds": ("step", "{:.2f} s"),
    "hidden_seconds": ("overlapped moves", "{:.3f} s"),
    "tokens_per_second": ("tokens per second", "{:,.0f}"),
    "update_tflops": ("update, TFLOP/s a device", "{:,.3g}"),
    "mismatch_mean": ("log-probability mismatch", "{:.1e}"),
}
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

    rows = RunFolder(path).rows()
    memory = path / "memory.png"
    recipe, decisions = read_values(path / "recipe.yaml"), read_json(path / "decisions.json")
    engine = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return engine.from_string(TEMPLATE.read_text()).render(
        name=path.resolve().name,
        recipe=recipe,
        figures=key_figures(rows),
        driver=decisions.get("driver", recipe.get("driver")),
        decisions=decided(decisions),
        curves=[(panel, data_uri(draw_curves([panel]))) for panel in panels_of(rows)],
        memory=data_uri(memory.read_bytes() if memory.is_file() else None),
        held=memory_held(rows) if recipe.get("cluster", {}).get("colocate", True) else "",
        stages=longest_stages(rows),
        planned=planned_and_measured(rows, read_json(path / "plan.json")),
        within=WITHIN,
        under=UNDER,
        evaluations=tabulated(of_kind(rows, "eval")),
        train=tabulated(of_kind(rows, "train")),
        samples=newest_samples(path),
        columns=COLUMNS,
        environment=read_json(path / "environment.json"),
        recipe_text=(path / "recipe.yaml").read_text(),
    )


def decided(decisions: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return name, value and reason of each decision."""
    reasons = decisions.get("reasons", {})
    values = [(name, value) for name, value in decisions.items() if name != "reasons"]
    return [(name, shown(value), reasons.get(name, "")) for name, value in values]


def key_figures(rows: Sequence[Row]) -> dict[str, str]:
    """Return the available key figures of a run by name."""
    figures = {}
    if rewards := _values(rows, "train", "reward"):
        figures["reward, first and last step"] = f"{rewards[0]:.3f} → {rewards[-1]:.3f}"
    if correct := _values(rows, "eval", "correct"):
        figures["held-out, correct"] = f"{correct[0]:.0%} → {correct[-1]:.0%}"
    for key, (label, form) in MEDIANS.items():
        if values := _values(rows, "train", key):
            figures[f"{label}, median"] = form.format(median(values))
    if timed := of_kind(rows, "train", "stages", "step_seconds"):
        share = median(switch_seconds(row) / row["step_seconds"] for row in timed)
        seconds = median(map(switch_seconds, timed))
        figures["switch, median"] = f"{seconds:.3f} s, {share:.1%} of a step"
    sent = [sync.get("node_bytes", 0) for sync in _values(rows, "train", "sync")]
    if any(sent):
        figures["between machines in a sync"] = format_bytes(max(sent))
    return figures


def _values(rows: Sequence[Row], kind: str, key: str) -> list[Any]:
    return [row[key] for row in of_kind(rows, kind, key)]


def memory_held(rows: Sequence[Row]) -> str:
    """Return a sentence about the bytes of the tags in each phase of the newest step, if any."""
    phases = [{}, *_values(rows, "train", "memory")][-1]
    rollout, train = (Counter[str](phases.get(phase)) for phase in ("rollout", "train"))
    sizes = [format_bytes(held.total()) for held in (rollout, train, rollout | train)]
    if rollout == train:
        return f"Every tag stayed on the device: {sizes[0]}." if phases else ""
    return "Tags held {} in phase rollout, {} in phase train; together they need {}.".format(*sizes)


def newest_samples(path: Path) -> dict[str, list[list[Any]]]:
    """Return the samples of the newest evaluation and step, by title of their table."""
    tables: dict[str, list[list[Any]]] = {}
    recorded = read_samples(path)
    for kind, title in (("eval", "evaluation"), ("train", "step")):
        samples = of_kind(recorded, kind)
        if newest := [sample for sample in samples if sample["step"] == samples[-1]["step"]]:
            name = f"Answers of the newest {title} ({newest[0]['step']})"
            tables[name] = [list(map(_brief, cells(sample))) for sample in newest]
    return tables


def tabulated(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return the names of figures in their order in rows, and a line of cells for every row.

    Seconds of stages and bytes, of which a row has many, are left out.
    """
    numbers = [numbers_of(row, BULKY) for row in rows]
    names = sorted(dict.fromkeys(chain.from_iterable(numbers)), key=lambda name: name not in FIRST)
    lines = [[row["step"], *map(own.get, names)] for row, own in zip(rows, numbers, strict=True)]
    return ["step", *names], [list(map(_brief, line)) for line in lines]


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
    return [(stage, brief(median(own)), f"{sum(own) / whole:.1%}") for stage, own in longest]


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


def _compared(planned: int, measured: int | None, whole: int | None = None) -> tuple[str, ...]:
    """Format two sizes, their difference and a judgment.

    The judgment relates the difference to `whole` bytes if given, because an idle process holds
    next to nothing, else to the measured bytes.
    """
    if not measured:
        unknown = "not measured" if measured is None else format_bytes(0)
        return format_bytes(planned), unknown, "–", "" if measured is None or not planned else "✗"
    off = 100 * (planned - measured)
    sign = "✓" if -UNDER <= off / (whole or measured) <= WITHIN else "✗"
    return format_bytes(planned), format_bytes(measured), f"{off / measured:+.1f} %", sign
