"""Figures of a run as rows of text: what it came to, slowest stages, planned against measured, where it ran."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memsaver.errors import format_bytes
from recipes.watch.history import by_tag, format_seconds, kind_of, levels
from recipes.watch.live import beside_the_task
from recipes.watch.report.reading import Row, RunRecord

DEVICE = "device"  # among the measured: everything on it, whoever holds it
WITHIN, UNDER = 3.0, 1.0  # percent that a plan may be off the measured peak, and may be under it


@dataclass(frozen=True, kw_only=True)
class Table:
    """Cells as shown; all but the first column are numbers, to the right, unless `prose`. folded: shown on a click."""

    title: str
    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    prose: bool = False
    folded: bool = False


def key_figures(run: RunRecord) -> list[tuple[str, str]]:
    """Name and value of what one wants to know first, as far as it is known."""
    train = run.train
    asked = run.recipe.get("steps", "?")
    found = [("steps", f"{train[-1]['step'] if train else 0} of {asked}")]
    rewards = [row["reward"] for row in run.rows_with("reward")]
    if rewards:
        found.append(("reward, first and last step", f"{rewards[0]:.3f} → {rewards[-1]:.3f}"))
    exact = [row["exact_match"] for row in run.evaluations if "exact_match" in row]
    if exact:
        found.append(("held-out exact match", " → ".join(f"{100 * value:.0f} %" for value in (exact[0], exact[-1]))))
    for key, name, show in MEDIANS:
        if values := [row[key] for row in run.rows_with(key)]:
            found.append((name, show(statistics.median(values))))
    syncs = [row["stages"]["sync_weights"] for row in run.rows_with("stages") if "sync_weights" in row["stages"]]
    if syncs:
        found.append(("weight sync, median", format_seconds(statistics.median(syncs))))
    if run.events:
        whole = levels(run.events, 0.0, run.end, by_tag)
        peak = max(whole.total(index) for index in range(len(whole.times)))
        found.append(("peak of all tags", format_bytes(peak)))
    if run.spans:
        found.append(("time in all", format_seconds(run.end)))
    return found


MEDIANS = (
    ("step_seconds", "step, median", format_seconds),
    ("tokens_per_second", "tokens a second, median", lambda value: f"{value:,.0f}"),
    ("gap_mean", "log-probability gap, median", lambda value: f"{value:.1e}"),
)


def slowest_stages(run: RunRecord) -> Table | None:
    """Stages by their share of all the steps' time; from the rows, so also of a run that left no trace."""
    rows = run.rows_with("stages", "step_seconds")
    if not rows:
        return None
    spent: dict[str, list[float]] = {}
    for row in rows:
        for name, seconds in row["stages"].items():
            spent.setdefault(name, []).append(seconds)
    whole = sum(row["step_seconds"] for row in rows)
    order = sorted(spent.items(), key=lambda item: -sum(item[1]))
    return Table(
        title="Slowest stages",
        caption="What to speed up first. A largest time far above the median is one bad step, not a slow stage.",
        head=("stage", "who works", "share", "median", "largest", "in all", "times"),
        rows=[
            (
                name,
                kind_of(name),
                f"{100 * sum(times) / whole:.1f} %",
                format_seconds(statistics.median(times)),
                format_seconds(max(times)),
                format_seconds(sum(times)),
                str(len(times)),
            )
            for name, times in order
        ],
    )


def planned_and_measured(run: RunRecord) -> Table | None:
    """A line for each stage's fullest device and one for each process; None without a plan, or without peaks."""
    peaks = measured_peaks(run.rows)
    planned = {entry["stage"]: entry["device_bytes"] for entry in run.plan.get("stages", ())}
    whole = {entry["stage"]: entry.get("used_bytes") for entry in run.plan.get("stages", ())}  # with contexts
    rows: list[Sequence[str]] = []
    for stage in [name for name in planned if name in peaks]:
        device = whole[stage] or sum(planned[stage].values())
        rows.append((stage, *_compared(device, peaks[stage].get(DEVICE))))
        sides, of = planned[stage].items(), peaks[stage].get(DEVICE)
        rows += [(f"– {side}", *_compared(nbytes, peaks[stage].get(side), of)) for side, nbytes in sides]
    if not rows:
        return None
    gpu, size = run.plan.get("gpu"), run.plan.get("gpu_bytes")
    on = f" on {gpu} ({format_bytes(size)})" if gpu and size else ""
    caption = (
        f"The planner's bytes of each stage{on} beside the largest that any step measured. ✗: the plan is under by "
        f"more than {UNDER:g} % of the device's bytes, or off by more than {WITHIN:g} %."
    )
    head = ("stage", "planned", "measured", "difference", "")
    return Table(title="Planned and measured", caption=caption, head=head, rows=rows)


def measured_peaks(rows: Sequence[Row]) -> dict[str, dict[str, int]]:
    """By stage, the most of all rows: of the fullest device under DEVICE, and of each side's fullest process."""
    found: dict[str, dict[str, int]] = {}
    for row in rows:
        for stage, peak in row.get("peaks", {}).items():
            largest = found.setdefault(stage, {})
            sides = [(owner.partition("[")[0], nbytes) for owner, nbytes in peak.get("processes", {}).items()]
            for name, nbytes in [(DEVICE, peak.get("device_bytes")), *sides]:
                if nbytes is not None:  # the CPU has no figure of the whole device
                    largest[name] = max(largest.get(name, 0), nbytes)
    return found


def _compared(planned: int, measured: int | None, of: int | None = None) -> tuple[str, str, str, str]:
    """of: what a difference is judged by in place of the measured bytes: an idle process holds next to nothing."""
    if not measured:
        unknown = "not measured" if measured is None else format_bytes(0)
        return format_bytes(planned), unknown, "–", "" if measured is None or not planned else "✗"
    off = 100 * (planned - measured) / measured
    judged = 100 * (planned - measured) / (of or measured)
    return format_bytes(planned), format_bytes(measured), f"{off:+.1f} %", "✓" if -UNDER <= judged <= WITHIN else "✗"


def evaluations(run: RunRecord) -> Table | None:
    if not run.evaluations:
        return None
    keys = {"exact_match": "held-out"}
    for row in run.evaluations:
        keys |= beside_the_task(row)
    rows = [
        (str(row["step"]), *(f"{row[key]:.3f}" if key in row else "–" for key in keys), str(row.get("problems", "–")))
        for row in run.evaluations
    ]
    caption = (
        "Exact match of greedy answers to problems never trained on, after so many updates; untrained: nor were any of "
        "their kind."
    )
    return Table(title="Evaluations", caption=caption, head=("updates", *keys.values(), "problems"), rows=rows)


def every_step(run: RunRecord) -> Table | None:
    keys = [key for key in _COLUMNS if run.rows_with(key)]
    if not keys:
        return None
    rows = [(str(row["step"]), *(f"{row[key]:.4g}" if key in row else "–" for key in keys)) for row in run.train]
    head = ("step", *(key.replace("_", " ") for key in keys))
    return Table(title="Every step", caption="The rows of metrics.jsonl.", head=head, rows=rows, folded=True)


_COLUMNS = (
    "reward",
    "exact_match",
    "loss",
    "value_loss",
    "kl_to_reference",
    "entropy",
    "grad_norm",
    "gap_mean",
    "gap_max",
    "response_length",
    "tokens",
    "tokens_per_second",
    "step_seconds",
)


def environment(run: RunRecord) -> Table | None:
    """A column for each session that recorded where it ran."""
    if not run.environments:
        return None
    names = ["date", "host", "cpus", "gpu", "driver", "python"]
    names += sorted({name for found in run.environments for name in found.get("packages", {})})
    columns = [_described(found) for found in run.environments]
    rows = [(name, *(column.get(name, "–") for column in columns)) for name in names]
    sessions = ["session"] if len(columns) == 1 else [f"session {number}" for number in range(1, 1 + len(columns))]
    caption = "Recorded when a session began. Compare only runs whose rows are the same here."
    return Table(title="Where it ran", caption=caption, head=("", *sessions), rows=rows, prose=True)


def _described(found: Any) -> dict[str, str]:
    gpus = found.get("gpus", [])
    text = {name: str(found[name]) for name in ("date", "host", "cpus", "python") if name in found}
    text["gpu"] = "; ".join(_counted([f"{gpu['name']}, {gpu['memory']}" for gpu in gpus])) or "none"
    text["driver"] = "; ".join(_counted([gpu["driver"] for gpu in gpus])).split(" x ")[-1] or "–"
    return text | found.get("packages", {})


def _counted(words: list[str]) -> list[str]:
    return [word if words.count(word) == 1 else f"{words.count(word)} x {word}" for word in dict.fromkeys(words)]
