"""What happened in a run, worked out for the pictures: memory over time, and which step is worth a closer look."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memsaver import Event

TAGS = (
    "weights",
    "kv_cache",
    "cuda_graph",
    "params",
    "optim",
    "critic",
    "critic_optim",
    "reference",
)  # in this order; others follow by name

Span = tuple[str, float, float]
"""A stage: name, start and end in seconds."""


@dataclass(frozen=True, kw_only=True)
class Levels:
    """Bytes over time: `held[key][i]` on the device and `kept[i]` on the host hold from `times[i]` to `times[i + 1]`.

    The last entry repeats the one before, at the end of the time asked for.
    """

    times: list[float]
    held: dict[str, list[int]]
    kept: list[int]

    def total(self, index: int) -> int:
        return sum(held[index] for held in self.held.values())

    def thinned(self, columns: int) -> Levels:
        """At most two moments for each of `columns` columns: the one that holds most, from when the column's first
        change came, and the last, from when it came. So what holds beyond a column is always what held in truth.
        """
        if len(self.times) <= 2 * columns + 1:
            return self
        width = (self.times[-1] - self.times[0]) / columns or 1.0
        groups: dict[int, list[int]] = {}
        for index, time in enumerate(self.times[:-1]):
            groups.setdefault(min(int((time - self.times[0]) / width), columns - 1), []).append(index)
        chosen: list[tuple[float, int]] = []
        for group in groups.values():
            chosen.append((self.times[group[0]], max(group, key=self.total)))
            if len(group) > 1:
                chosen.append((self.times[group[-1]], group[-1]))
        chosen.append((self.times[-1], len(self.times) - 1))
        return Levels(
            times=[time for time, _ in chosen],
            held={key: [held[index] for _, index in chosen] for key, held in self.held.items()},
            kept=[self.kept[index] for _, index in chosen],
        )


def by_tag(owner: str, tag: str) -> str:
    return tag


def by_process(owner: str, tag: str) -> str:
    return owner


def levels(
    events: Mapping[str, Sequence[Event]], first: float, last: float, key: Callable[[str, str], str] = by_tag
) -> Levels:
    """Committed and kept bytes between two times, summed over everything with the same `key(owner, tag)`."""
    flat = [(event, owner) for owner, group in events.items() for event in group]
    flat.sort(key=lambda pair: pair[0].time)
    keys = in_order({key(owner, event.tag) for event, owner in flat})
    now: dict[tuple[str, str], Event] = {}
    found = Levels(times=[first], held={name: [0] for name in keys}, kept=[0])
    for event, owner in flat:
        if event.time > last:
            break
        now[owner, event.tag] = event
        before = event.time < first
        _enter(found, now, key, first if before else event.time, replace=before)
    found.times.append(last)
    for column in (*found.held.values(), found.kept):
        column.append(column[-1])
    return found


def _enter(
    found: Levels,
    now: Mapping[tuple[str, str], Event],
    key: Callable[[str, str], str],
    time: float,
    replace: bool,
) -> None:
    """Adds the bytes of `now` as of `time`, or puts them in the place of the newest entry."""
    sums = dict.fromkeys(found.held, 0)
    for (owner, tag), event in now.items():
        sums[key(owner, tag)] += event.committed_bytes
    if replace:
        found.times.pop()
    found.times.append(time)
    kept = sum(event.backup_bytes for event in now.values())
    for column, value in zip((*found.held.values(), found.kept), (*sums.values(), kept), strict=True):
        if replace:
            column.pop()
        column.append(value)


def in_order(tags: set[str]) -> list[str]:
    known = [tag for tag in TAGS if tag in tags]
    return known + sorted(tags - set(known))


def one_step(spans: Sequence[Span]) -> tuple[float, float, str]:
    """The last step that neither evaluated nor saved, or else the last one; the whole time where there is none."""
    steps = [span for span in spans if is_step(span[0])]
    if not steps:
        return min(begin for _, begin, _ in spans), max(finish for _, _, finish in spans), "incomplete"
    extra = [begin for name, begin, _ in spans if name in ("evaluate", "save_checkpoint")]
    plain = [span for span in steps if not any(span[1] <= begin <= span[2] for begin in extra)]
    name, begin, finish = (plain or steps)[-1]
    return begin, finish, name


def wake_up(spans: Sequence[Span], first: float, last: float) -> tuple[float, float] | None:
    """From the first stage of the step's to_rollout, which depends on cycle.keep and the algorithm, to its last."""
    inside = [span for span in spans if first - 1e-6 <= span[1] <= last]
    begins = [begin for name, begin, _ in inside if name.startswith(("park_", "empty_cache", "wake_weights"))]
    ends = [finish for name, _, finish in inside if name == "wake_kv_cache"]
    return (begins[0], ends[0] + 0.08 * (ends[0] - begins[0])) if begins and ends else None


def stages_between(spans: Sequence[Span], first: float, last: float) -> list[Span]:
    """The stages (no whole steps) that lie inside, a microsecond of slack on both sides."""
    return [span for span in spans if not is_step(span[0]) and span[1] >= first - 1e-6 and span[2] <= last + 1e-6]


def is_step(name: str) -> bool:
    return name.startswith("step ")


def kind_of(stage: str) -> str:
    """Who works in a stage: rollout, train, or nobody while memory changes hands (switch)."""
    if stage in ("generate_sequences", "evaluate"):
        return "rollout"
    return "train" if stage.startswith(("compute_", "update_", "save_")) else "switch"


def format_seconds(seconds: float) -> str:
    """
    >>> format_seconds(0.0321), format_seconds(1.5), format_seconds(150)
    ('32.1 ms', '1.50 s', '2 min 30 s')
    """
    if seconds >= 100:
        return f"{int(seconds) // 60} min {int(seconds) % 60} s"
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.1f} ms"


def smooth(values: Sequence[float], weight: float = 0.7) -> list[float]:
    """Exponential moving average."""
    out: list[float] = []
    for value in values:
        out.append(value if not out else weight * out[-1] + (1 - weight) * value)
    return out
