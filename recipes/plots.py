"""The two pictures of a run. Imported only where they are drawn, because it needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes

from recipes.live import beside_the_task

if TYPE_CHECKING:
    from memsaver import Event

MIB = 2**20
TAG_COLOURS = {
    "weights": "#3b6fb6",
    "kv_cache": "#f0a73a",
    "cuda_graph": "#7bb662",
    "params": "#8566ab",
    "optim": "#c95d63",
    "critic": "#2c7f78",
    "critic_optim": "#e08fa5",
    "reference": "#6b6f76",
}
OTHER_COLOURS = ("#5aa7a7", "#b58863", "#8a8f98", "#d18ad0")
BAND_COLOURS = {"rollout": "#eaf2fb", "train": "#fbeeee", "switch": "#f4f4f4"}

# Of to_rollout: what comes first depends on cycle.keep.
FIRST_STAGES = ("park_optim", "park_critic", "park_critic_optim", "empty_cache", "wake_weights")

Span = tuple[str, float, float]


def draw_reward(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Reward and exact match above, log-probability gap below, over steps."""
    train = [row for row in rows if row["kind"] == "train"]
    steps = [row["step"] for row in train]
    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(9, 7), sharex=True, height_ratios=(2, 1))
    top.plot(steps, [row["reward"] for row in train], color="#9db8d9", linewidth=1.2, label="reward, mean of the step")
    top.plot(steps, _smooth([row["reward"] for row in train]), color="#3b6fb6", linewidth=2.2, label="reward, smoothed")
    exact = [row["exact_match"] for row in train]
    top.plot(steps, exact, color="#7bb662", linewidth=1.4, linestyle="--", label="exact match of samples")
    _evaluations(top, [row for row in rows if row["kind"] == "eval"])
    top.set(ylabel="reward", ylim=(-0.03, 1.03))
    top.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, fontsize=9, frameon=False)
    if train:
        bottom.semilogy(steps, [max(row["gap_mean"], 1e-9) for row in train], color="#8566ab", label="mean")
        bottom.semilogy(steps, [max(row["gap_max"], 1e-9) for row in train], color="#f0a73a", label="max")
        if away := [row for row in train if row.get("kl_to_reference", 0) > 0]:
            distance = [row["kl_to_reference"] for row in away]
            style: dict[str, Any] = {"color": "#8a8f98", "linestyle": "--", "label": "KL from the reference"}
            bottom.semilogy([row["step"] for row in away], distance, **style)
        bottom.legend(loc="best", fontsize=9, framealpha=0.9)
    bottom.set(xlabel="step", ylabel="nats a token", title="Log-probability gap, rollout against trainer")
    for axes in (top, bottom):
        _tidy(axes)
    _save(figure, file)


def _evaluations(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """A curve for the held-out problems and one for each other set, over the rows that have it."""
    curves = {"exact_match": "held-out exact match, greedy"} if rows else {}
    for row in rows:
        curves |= {key: f"{name}, never trained on, greedy" for key, name in beside_the_task(row).items()}
    for (key, label), colour in zip(curves.items(), ("#c95d63", *OTHER_COLOURS * len(curves)), strict=False):
        points = [(row["step"], row[key]) for row in rows if key in row]
        axes.plot(*zip(*points, strict=True), "o-", color=colour, linewidth=1.8, markersize=5, label=label)


def draw_memory(spans: Sequence[Span], events: Mapping[str, Sequence[Event]], file: Path) -> None:
    """Bytes per tag over real seconds: the whole session, one step with its stages, and the wake-up inside it.

    events: by owner; of several devices the first one's are drawn.
    """
    start = min(begin for _, begin, _ in spans)
    end = max(finish for _, _, finish in spans)
    shown = [group for owner, group in events.items() if owner.partition("[")[2] in ("", "0]")]
    flat = sorted((event for group in shown for event in group), key=lambda event: event.time)
    origin = min([start, *(event.time - event.seconds for event in flat)])
    panels = [("Memory on the device by tag, whole session", origin, end)]
    first, last, step = _one_step(spans)
    panels.append((f"One step ({step}) and its stages", first, last))
    if wake_up := _wake_up(spans, first, last):
        panels.append((f"The wake-up of {step}, stage by stage", *wake_up))
    heights = [1.0, 1.3, 1.3][: len(panels)]
    figure, rows = pyplot.subplots(len(panels), 1, figsize=(12, 1.2 + 3.2 * len(panels)), height_ratios=heights)
    for axes, (title, left, right) in zip(rows, panels, strict=True):
        _stack(axes, flat, origin, left, right, headroom=1.15 if axes is rows[0] else 1.5)  # room for stage names
        axes.set(title=title, ylabel="MiB")
        if axes is not rows[0]:
            _bands(axes, [span for span in spans if span[1] >= left - 1e-6 and span[2] <= right + 1e-6], origin)
        _tidy(axes)
    rows[-1].set_xlabel("seconds since the run began")
    handles, labels = rows[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=len(labels), fontsize=9, frameon=False)
    _save(figure, file, top=0.96)


def _stack(axes: Axes, events: Sequence[Event], origin: float, first: float, last: float, headroom: float) -> None:
    """Committed bytes of every tag, stacked, as steps; the dashed line is what the host keeps for paused tags."""
    tags = _in_order({event.tag for event in events})
    now, backup = dict.fromkeys(tags, 0), dict.fromkeys(tags, 0)
    times, held, kept = [first - origin], [dict(now)], [0]
    for event in events:
        if event.time > last:
            break
        now[event.tag], backup[event.tag] = event.committed_bytes, event.backup_bytes
        if event.time < first:
            held[0], kept[0] = dict(now), sum(backup.values())
            continue
        times.append(event.time - origin)
        held.append(dict(now))
        kept.append(sum(backup.values()))
    times.append(last - origin)
    held.append(held[-1])
    kept.append(kept[-1])
    base = [0.0] * len(times)
    spare = iter(OTHER_COLOURS * (1 + len(tags)))
    for tag in tags:
        upper = [low + row[tag] / MIB for low, row in zip(base, held, strict=True)]
        colour = TAG_COLOURS.get(tag) or next(spare)
        axes.fill_between(times, base, upper, step="post", color=colour, alpha=0.9, linewidth=0, label=tag, zorder=2)
        base = upper
    kept_mib = [nbytes / MIB for nbytes in kept]
    style: dict[str, Any] = {"color": "#222222", "linestyle": "--", "linewidth": 1.1, "zorder": 3}
    axes.step(times, kept_mib, where="post", label="host backup", **style)
    axes.set_xlim(first - origin, last - origin)
    axes.set_ylim(0, headroom * max([*base, *kept_mib, 1e-3]))


def _in_order(tags: set[str]) -> list[str]:
    known = [tag for tag in TAG_COLOURS if tag in tags]
    return known + sorted(tags - set(known))


def _one_step(spans: Sequence[Span]) -> tuple[float, float, str]:
    """The last step that neither evaluated nor saved, or else the last one; the whole time where there is none."""
    steps = [span for span in spans if span[0].startswith("step ")]
    if not steps:
        return min(begin for _, begin, _ in spans), max(finish for _, _, finish in spans), "incomplete"
    extra = [begin for name, begin, _ in spans if name in ("evaluate", "save_checkpoint")]
    plain = [span for span in steps if not any(span[1] <= begin <= span[2] for begin in extra)]
    name, begin, finish = (plain or steps)[-1]
    return begin, finish, name


def _wake_up(spans: Sequence[Span], first: float, last: float) -> tuple[float, float] | None:
    """From the first stage of the step's to_rollout to its last."""
    inside = [span for span in spans if first - 1e-6 <= span[1] <= last]
    begins = [begin for name, begin, _ in inside if name in FIRST_STAGES]
    ends = [finish for name, _, finish in inside if name == "wake_kv_cache"]
    return (begins[0], ends[0] + 0.08 * (ends[0] - begins[0])) if begins and ends else None


def _bands(axes: Axes, spans: Sequence[Span], origin: float) -> None:
    """Shades the stages and names those wide enough to read."""
    left, right = axes.get_xlim()
    top = axes.get_ylim()[1]
    for name, begin, finish in spans:
        if name.startswith("step "):
            continue
        colour = BAND_COLOURS[_kind(name)]
        axes.axvspan(begin - origin, finish - origin, color=colour, zorder=0, linewidth=0)
        axes.axvline(begin - origin, color="#bbbbbb", linewidth=0.6, zorder=1)
        if finish - begin > 0.012 * (right - left):
            middle = (begin + finish) / 2 - origin
            wide = finish - begin > 0.14 * (right - left)
            text = f"{name}\n{_duration(finish - begin)}" if wide else name
            place: dict[str, Any] = {"rotation": 0 if wide else 90, "ha": "center", "va": "top", "fontsize": 8.5}
            axes.text(middle, top * 0.985, text, color="#333333", zorder=4, **place)


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.1f} ms"


def _kind(stage: str) -> str:
    if stage in ("generate_sequences", "evaluate"):
        return "rollout"
    return "train" if stage.startswith(("compute_", "update_", "save_")) else "switch"


def _smooth(values: Sequence[float], weight: float = 0.7) -> list[float]:
    """Exponential moving average."""
    out: list[float] = []
    for value in values:
        out.append(value if not out else weight * out[-1] + (1 - weight) * value)
    return out


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e3e3e3", linewidth=0.7, zorder=0)
    axes.title.set_fontsize(11)


def _save(figure: Any, file: Path, top: float = 1.0) -> None:
    figure.tight_layout(rect=(0, 0, 1, top))
    figure.savefig(file, dpi=130)
    pyplot.close(figure)
