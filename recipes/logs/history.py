"""One reading of a run, for live view, pictures and report: rows, stages, and memory over time.

A running `RunFolder` fills a `Run` as it goes; `read_run` makes one from a folder.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from memsaver import Event
from recipes.errors import RecipeError, one_line

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
_MOVING = ("pause", "resume", "save", "prefetch")  # operations of a saver
OTHER_KINDS = "exact_match_"  # and the kind's name: keys of an evaluation's row
NOTABLE = 1e-3  # seconds of moves beside work that are worth a word
SLACK = 1e-6  # seconds by which the ends of stages and steps may differ
_SESSION = re.compile(r"-until-step-(\d+)-(\d+)$")
_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, YAMLError, OmegaConfBaseException)

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
        heads = ("offload_", "empty_cache", "wake_weights")
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
    """Yields when each pause, resume, save and prefetch began and ended."""
    for event in events:
        if event.op in _MOVING:
            yield event.time - event.seconds, event.time


def joined(spans: Iterable[tuple[float, float]], slack: float = 0.0) -> list[tuple[float, float]]:
    """Makes spans that touch, or are not more than `slack` apart, one, in order."""
    out: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if out and begin <= out[-1][1] + slack:
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
            untrained = kind not in row.get("also_trained", [kind])
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
    run.rows = [_typed(row) for row in whole_rows(lines)]
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


def whole_rows(lines: Iterable[str]) -> list[Row]:
    """Return the rows among the lines that are whole."""
    return [row for line in lines if (row := _row(line)) is not None]


def _row(line: str) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    known = isinstance(row, dict) and row.get("kind") in ("train", "eval")
    return row if known and type(row.get("step")) is int else None


_OF_A_STAGE = {"processes": {"": 0}, "torch": {"": 0}, "tags": {"": 0}, "device_bytes": None}
_FORMS: dict[str, Any] = {
    "kind": "",
    "also_trained": [""],
    "stages": {"": 0.0},
    "sync": {"": 0.0},
    "memory": {"": {"": 0}},
    "peaks": {"": _OF_A_STAGE},
}
"""What the figures of a row look like that are no numbers; the name "" stands for any."""


def _typed(row: Row) -> Row:
    """Return the row without figures of other types than a run writes: they cannot be drawn."""
    return {key: value for key, value in row.items() if _fits(value, _FORMS.get(key, 0.0))}


def _fits(value: Any, form: Any) -> bool:
    if isinstance(form, dict):
        forms = form.get
        return isinstance(value, dict) and all(
            _fits(inner, forms(name, forms("", 0))) for name, inner in value.items()
        )
    if isinstance(form, list):
        return isinstance(value, list) and all(_fits(inner, form[0]) for inner in value)
    if form is None and value is None:
        return True
    wanted = str if isinstance(form, str) else (int, float)
    return isinstance(value, wanted) and not isinstance(value, bool)


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
