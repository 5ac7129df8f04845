"""One reading of a run, for live view, pictures and report: rows, stages, and memory over time.

A running `RunFolder` fills a `Run` as it goes; `report.read_run` makes one from a folder.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from memsaver import Event

TAG_COLOURS = {  # tags are shown in this order; others follow by name
    "weights": "#3b6fb6",
    "kv_cache": "#f0a73a",
    "cuda_graph": "#7bb662",
    "params": "#8566ab",
    "optim": "#c95d63",
    "critic": "#2c7f78",
    "critic_optim": "#e08fa5",
    "reference": "#6b6f76",
}
STAGES = "stages"  # the process of a trace that holds them
MOVES = "memory moves"  # as a lane beside the stages
_MOVING = ("pause", "resume", "save", "arrive")  # operations of a saver
OTHER_KINDS = "exact_match_"  # and the kind's name: keys of an evaluation's row
NOTABLE = 1e-3  # seconds of moves beside work that are worth a word
SLACK = 1e-6  # seconds by which the ends of stages and steps may differ

Row = dict[str, Any]
Span = tuple[str, float, float]
"""A stage or a whole step: its name, and when it began and ended, in seconds."""
Key = Callable[[str, str], str]
"""Names the sum that an event counts in, by the event's owner and tag."""


def by_tag(owner: str, tag: str) -> str:
    return tag


def by_process(owner: str, tag: str) -> str:
    return owner


def by_device(owner: str, tag: str) -> str:
    """The number behind an owner's name ("trainer[1]") is its device's, where there are several."""
    return f"device {owner.partition('[')[2][:-1]}" if owner.endswith("]") else "the device"


class Moment(NamedTuple):
    """Bytes from `time` on: `held` on the device, by name, and `kept` on the host."""

    time: float
    held: dict[str, int]
    kept: int

    @property
    def total(self) -> int:
        return sum(self.held.values())


@dataclass(frozen=True, kw_only=True)
class Levels:
    """Bytes over time. The last moment repeats the one before, at the end of the time asked for."""

    names: list[str]
    moments: list[Moment]

    @property
    def times(self) -> list[float]:
        return [moment.time for moment in self.moments]

    @property
    def peak(self) -> int:
        return max(moment.total for moment in self.moments)

    def held(self, name: str) -> list[int]:
        return [moment.held[name] for moment in self.moments]

    def thinned(self, columns: int) -> Levels:
        """At most two moments for each of `columns` columns: the one that holds most, from when the
        column's first change came, and the last. So each was true.
        """
        if len(self.moments) <= 2 * columns + 1:
            return self
        first, last = self.moments[0].time, self.moments[-1].time
        width = (last - first) / columns or 1.0

        def column(moment: Moment) -> int:
            return min(int((moment.time - first) / width), columns - 1)

        chosen: list[Moment] = []
        for _, members in itertools.groupby(self.moments[:-1], column):
            group = list(members)
            fullest = max(group, key=lambda moment: moment.total)
            chosen.append(Moment(group[0].time, fullest.held, fullest.kept))
            chosen += group[-1:] if len(group) > 1 else []
        return Levels(names=self.names, moments=[*chosen, self.moments[-1]])


@dataclass(kw_only=True)
class Run:
    """Holds what is known of a run. Times are seconds on one clock; sessions follow one another.

    events: by owner. breaks: where a resumed session begins. plan: plan.json. environments: newest
    last. gaps: what is not there, or not whole, as sentences.
    """

    path: Path = Path()
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
        return [row for row in self.train if None not in map(row.get, keys)]

    def add_events(self, owner: str, events: Iterable[Event]) -> None:
        self.events.setdefault(owner, []).extend(events)

    @property
    def begin(self) -> float:
        """Returns when the first stage or operation began; 0 where there is none."""
        starts = [event.time - event.seconds for event in self._all_events()]
        return min([*starts, *(begin for _, begin, _ in self.spans)], default=0.0)

    @property
    def end(self) -> float:
        """Returns when the last stage or operation ended; 0 where there is none."""
        times = [event.time for event in self._all_events()]
        return max([*times, *(finish for _, _, finish in self.spans)], default=0.0)

    def _all_events(self) -> Iterator[Event]:
        return itertools.chain.from_iterable(self.events.values())

    def stages(self, first: float = float("-inf"), last: float = float("inf")) -> list[Span]:
        """The stages, no whole steps, that lie between these times."""
        inside = [
            span for span in self.spans if first - SLACK <= span[1] and span[2] <= last + SLACK
        ]
        return [span for span in inside if not _is_step(span)]

    def moves(self, first: float = float("-inf"), last: float = float("inf")) -> list[Span]:
        """Returns when memory moved between these times, whoever's it was, by the name MOVES."""
        spans = joined(spans_of_moves(self._all_events()))
        return [(MOVES, begin, end) for begin, end in spans if first <= begin and end <= last]

    def one_step(self) -> Span:
        """The last step, best one that neither evaluated nor saved; else the whole time."""
        steps = [span for span in self.spans if _is_step(span)]
        if not steps:
            return "incomplete", self.begin, self.end
        extra = [span[1] for span in self.spans if span[0] in ("evaluate", "save_checkpoint")]
        for step in reversed(steps):
            if not any(step[1] <= time <= step[2] for time in extra):
                return step
        return steps[-1]

    def wake_up(self) -> Span | None:
        """Returns the span from the first stage of that step's to_rollout to its last."""
        step, first, last = self.one_step()
        inside = [span for span in self.spans if first - SLACK <= span[1] <= last]
        heads = ("park_", "empty_cache", "wake_weights")
        begins = [begin for name, begin, _ in inside if name.startswith(heads)]
        ends = [finish for name, _, finish in inside if name == "wake_kv_cache"]
        if not begins or not ends:
            return None
        return step, begins[0], ends[0] + 0.08 * (ends[0] - begins[0])

    def levels(self, first: float, last: float, key: Key = by_tag) -> Levels:
        """Committed and kept bytes between two times, summed over all events of the same `key`."""
        flat: list[tuple[Event, str]] = []
        for owner, group in self.events.items():
            flat += ((event, owner) for event in group)
        flat.sort(key=lambda pair: pair[0].time)
        names = in_order({key(owner, event.tag) for event, owner in flat})
        now: dict[tuple[str, str], Event] = {}
        moments = [Moment(first, dict.fromkeys(names, 0), 0)]
        for event, owner in flat:
            if event.time > last:
                break
            now[owner, event.tag] = event
            held = dict.fromkeys(names, 0)
            for (holder, tag), newest in now.items():
                held[key(holder, tag)] += newest.committed_bytes
            kept = sum(newest.backup_bytes for newest in now.values())
            if event.time < first:
                moments.pop()
            moments.append(Moment(max(event.time, first), held, kept))
        return Levels(names=names, moments=[*moments, Moment(last, *moments[-1][1:])])


def seconds_of_stages(rows: Iterable[Row]) -> dict[str, list[float]]:
    """Seconds of each stage, one a row that has it; those that took most in all first."""
    spent: dict[str, list[float]] = {}
    for row in rows:
        for name, seconds in row["stages"].items():
            spent.setdefault(name, []).append(seconds)
    return dict(sorted(spent.items(), key=lambda item: -sum(item[1])))


def switch_seconds(row: Mapping[str, Any]) -> float:
    """Sums the stages of a step in which memory changed hands, the sync among them."""
    stages = row.get("stages", {}).items()
    return sum(seconds for name, seconds in stages if kind_of(name) == "switch")


def spans_of_moves(events: Iterable[Event]) -> Iterator[tuple[float, float]]:
    """Yields when each pause, resume, save and arrival began and ended."""
    for event in events:
        if event.op in _MOVING:
            yield event.time - event.seconds, event.time


def joined(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Makes spans that touch one, in order."""
    out: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if out and begin <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], end)
        else:
            out.append((begin, end))
    return out


def seconds_beside(
    moves: Iterable[tuple[float, float]], switches: Iterable[tuple[float, float]]
) -> float:
    """Seconds of the moves that lie in no stage of the switch: they were hidden beside work.

    >>> seconds_beside([(0, 4), (3, 6)], [(5, 9)])
    5
    """
    switches = list(switches)
    both = joined([*moves, *switches])
    return sum(end - begin for begin, end in both) - sum(
        end - begin for begin, end in joined(switches)
    )


def in_order(tags: set[str]) -> list[str]:
    known = [tag for tag in TAG_COLOURS if tag in tags]
    return known + sorted(tags - set(known))


def _is_step(span: Span) -> bool:
    return span[0].startswith("step ")


def kind_of(stage: str) -> str:
    """Tells who works in a stage: rollout, train, or nobody while memory changes hands (switch)."""
    if stage == MOVES:
        return "moves"
    if stage in ("generate_sequences", "evaluate"):
        return "rollout"
    return "train" if stage.startswith(("compute_", "update_", "save_")) else "switch"


def beside_the_task(*rows: Mapping[str, Any]) -> dict[str, str]:
    """Keys of the evaluations' other exact matches, and what to call them: exact_match_2_digits ->
    "2 digits".

    A kind of which no problem at all was trained on is called so; rows of older runs do not tell.
    """
    names = {}
    for row in rows:
        for key in [key for key in row if key.startswith(OTHER_KINDS)]:
            kind = key.removeprefix(OTHER_KINDS)
            untrained = kind not in row.get("trained_beside", [kind])
            names[key] = kind.replace("_", " ") + (" (untrained)" if untrained else "")
    return names


def format_seconds(seconds: float) -> str:
    """
    >>> format_seconds(0.0321), format_seconds(1.5), format_seconds(150)
    ('32.1 ms', '1.50 s', '2 min 30 s')
    """
    if seconds >= 100:
        return f"{int(seconds) // 60} min {int(seconds) % 60} s"
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.1f} ms"
