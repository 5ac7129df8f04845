"""Folder of a run, and the record of the run in it.

    recipe.yaml         the resolved recipe, which `load` reads
    metrics.jsonl       a line for each step (kind "train") and evaluation (kind "eval")
    samples.jsonl       some answers of each row of metrics.jsonl
    trackers.jsonl      rows that trackers have, and their names of the run
    trace.json          stages and memory of the last steps as a Chrome trace (ui.perfetto.dev)
    environment.json    date, host, GPUs and versions
    decisions.json      what was decided for this session, with reasons (`Decisions`)
    plan.json           the plan of the run's memory, if there was one
    outside.json        with a hosted engine, bytes outside of the planned tags at the start
    reward.png, memory.png
    restarts.jsonl      a line for each restart after the loss of a worker, and for each engine that
                        was lost and replaced
    checkpoints/step_N/
    checkpoints/latest  name of the newest complete checkpoint
    checkpoints/best    name of the checkpoint of the best evaluation, if one is kept
    exports/step_N/     the model as a Hugging Face folder
    mismatch/           weights and sequences of the first difference with `exact`
    model/              config and tokenizer of a random model
    .lock               locked while a run uses the folder

Rows are flushed immediately. Other files are replaced atomically and synced to disk.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import importlib.metadata
import itertools
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

from memsaver import Event
from memsaver.report import Timeline
from memsaver.system.files import replace_text, sync
from recipes.config.load import recipe_text
from recipes.config.recipe import Recipe
from recipes.errors import RecipeError, RunError, one_line
from trainer_bridge.errors import RankFailed
from trainer_bridge.models import read_values

LOCK = ".lock"
OUTSIDE = "outside.json"
SAMPLES = "samples.jsonl"
STAGES = "stages"  # process of a trace for stages and steps
PACKAGES = ("memsaver", "torch", "triton", "ray", "transformers")
FULL = (errno.ENOSPC, errno.EDQUOT)
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)  # from a file system without locks
# Stages that few steps have.
_EXTRA = ("evaluate", "refresh_reference", "save_checkpoint", "export")
ROLLOUT_GPU = " (engine's GPU)"  # ends the name of a stage on a GPU without a trainer rank
BULKY = ("stages", "sync", "memory", "peaks")  # parts of a row with many numbers
KEPT_ROWS = 1000  # newest rows whose spans, events and bulky figures stay in memory
FIRST = ("reward", "reward_std", "correct")  # in tables
QUALITIES = ("correct", "avg@", "pass@")  # beginnings of names of shares of right answers

Row = dict[str, Any]


class Span(NamedTuple):
    """A stage or a whole step ("step N"), with its times in seconds of `steady_time`."""

    name: str
    begin: float
    end: float

    @property
    def is_step(self) -> bool:
        return self.name.startswith("step ")


@dataclass(kw_only=True)
class Run:
    """Record of a run.

    Attributes:
        rows: Rows of metrics.jsonl; old ones without their bulky figures.
        spans: Stages and steps, of the newest rows.
        events: Memory events by owner, of the newest rows.
    """

    rows: list[Row] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    events: dict[str, list[Event]] = field(default_factory=dict)

    @property
    def evaluations(self) -> list[Row]:
        return [row for row in self.rows if row["kind"] == "eval"]

    @property
    def newest_evaluation(self) -> Row | None:
        """Return the evaluation that follows the last step; None if there is none yet."""
        evaluated = self.rows and self.rows[-1]["kind"] == "eval"
        return self.rows[-1] if evaluated else None

    def train(self, *keys: str) -> list[Row]:
        """Return the rows of training steps that have a value for every given key."""
        rows = [row for row in self.rows if row["kind"] == "train"]
        return [row for row in rows if None not in map(row.get, keys)]

    def forget_old(self) -> None:
        """Drop spans, events and bulky figures from before the newest KEPT_ROWS rows.

        Memory, trace.json and the time to write it stay bounded in a run of 100,000 steps.
        """
        steps = [span for span in self.spans if span.is_step][-KEPT_ROWS:]
        begin = steps[0].begin if steps else 0.0
        self.spans = [span for span in self.spans if span.begin >= begin]
        for owner, events in self.events.items():
            self.events[owner] = [event for event in events if event.time >= begin]
        for row in self.rows[:-KEPT_ROWS]:
            for name in BULKY:
                row.pop(name, None)

    def one_step(self) -> Span | None:
        """Return the last step without a stage that few steps have, or else the last step."""
        steps = [span for span in self.spans if span.is_step]
        extra = [span for span in self.spans if span.name in _EXTRA]
        for step in reversed(steps):
            if not any(step.begin <= span.begin < step.end for span in extra):
                return step
        return steps[-1] if steps else None


def kind_of(stage: str) -> str:
    """Return the side that works in a stage ("rollout", "train"), or "switch" for moves."""
    if stage in ("generate_sequences", "select_groups", "evaluate"):
        return "rollout"
    works = ("compute_", "update_", "refresh_", "save_", "export")
    return "train" if stage.startswith(works) else "switch"


def switch_seconds(row: Mapping[str, Any]) -> float:
    """Return the seconds of a step in stages that switch sides, including the weight sync."""
    stages = row.get("stages", {}).items()
    return sum(seconds for stage, seconds in stages if kind_of(stage) == "switch")


def numbers_of(row: Mapping[str, Any], apart_from: Collection[str] = ()) -> dict[str, float]:
    """Return all numbers of a row but its step by name, nested ones as `stages/update_actor`."""
    numbers: dict[str, float] = {}
    for name, value in row.items():
        if name in apart_from:
            continue
        if isinstance(value, Mapping):
            numbers |= {f"{name}/{inner}": number for inner, number in numbers_of(value).items()}
        elif isinstance(value, Real) and name != "step":
            numbers[name] = float(value)
    return numbers


def tabulated(rows: Iterable[Mapping[str, Any]]) -> tuple[list[str], list[dict[str, float]]]:
    """Return the names of figures in their order in rows, and the figures of every row.

    Seconds of stages and bytes, of which a row has many, are left out.
    """
    numbers = [numbers_of(row, BULKY) for row in rows]
    names = dict.fromkeys(itertools.chain.from_iterable(numbers))
    return sorted(names, key=lambda name: name not in FIRST), numbers


def qualities(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the shares of right answers in an evaluation, by name."""
    return {name: value for name, value in row.items() if name.startswith(QUALITIES)}


def whole_rows(file: Path) -> list[Row]:
    """Return the rows of a metrics.jsonl; skip the half line that a killed run may leave.

    Rows of before, in which correct answers were called exact, are read with a line.
    """
    rows = []
    for line in file.read_text().splitlines() if file.is_file() else []:
        with contextlib.suppress(ValueError):
            rows.append(_renamed(json.loads(line), file))
    return rows


def _renamed(row: Any, file: Path) -> Any:
    """Return a row in which correct answers are called so, in the figures of each set, too."""
    if not isinstance(row, dict):
        return row
    names = {name: re.sub("^exact(_match)?(?=_|$)", "correct", name) for name in row}
    if names.keys() - {*names.values()}:
        _tell_renamed(file)
    row = {names[name]: value for name, value in row.items()}
    if isinstance(row.get("sets"), dict):
        row["sets"] = {name: _renamed(figures, file) for name, figures in row["sets"].items()}
    return row


@functools.cache
def _tell_renamed(file: Path) -> None:
    print(f"memsaver: {file}: what its rows call exact is read as correct", file=sys.stderr)


def json_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return rows as JSON, each on a line of its own."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def check_holds_run(option: str, path: Path) -> None:
    """Raise a RecipeError unless the folder that an option names holds a run."""
    if not (path / "recipe.yaml").is_file():
        rule = "holds no run (no recipe.yaml); give the folder that memsaver run printed"
        raise RecipeError(f"{option} {path}: {rule}")


@contextlib.contextmanager
def new_folder(path: Path | None, recipe: str) -> Iterator[Path]:
    """Create and lock the folder of a new run; remove it if the run fails before its first files.

    Without `path`, the folder is a new one under runs/, named after the recipe and the time, with a
    number if that name is taken.

    Raises:
        RecipeError: The folder is not empty, cannot be created, or is in a Ray job's working_dir.
    """
    if path is not None and any(part.startswith("_ray_pkg_") for part in path.absolute().parts):
        rule = "is in a job's working_dir, which Ray deletes"
        raise RecipeError(f"--run-dir {path}: {rule}; give a folder on shared storage")
    path = _make_numbered(recipe) if path is None else _make(path)
    with at_work(path):
        try:
            yield path
        finally:
            if not (path / "metrics.jsonl").exists():
                shutil.rmtree(path, ignore_errors=True)


def newest_run(parent: Path = Path("runs")) -> Path:
    """Return the folder of the run under `parent` that was written last, among those with rows.

    Raises:
        RecipeError: There is no such run.
    """
    files = [file for file in parent.glob("*/metrics.jsonl") if file.stat().st_size]
    if not files:
        rule = f"no run under {parent}/ has begun"
        raise RecipeError(f"--resume: {rule}; name its folder: memsaver run --resume DIR")
    return max(files, key=lambda file: file.stat().st_mtime_ns).parent


def _make_numbered(recipe: str) -> Path:
    name = f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in itertools.count(1):
        path = Path("runs") / (name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
    raise AssertionError("itertools.count ended")


def _make(path: Path) -> Path:
    with contextlib.suppress(OSError):
        path.rmdir()  # Replace an empty folder, so that its owner is this user.
    try:
        path.mkdir(parents=True)
    except OSError as error:
        why = f"{error.strerror}; give another folder"
        if (path / "metrics.jsonl").exists():
            why = f"already holds a run; use --resume {path}, or another folder"
        raise RecipeError(f"--run-dir {path}: {why}") from None
    return path


@contextlib.contextmanager
def at_work(path: Path) -> Iterator[None]:
    """Lock a run's folder inside the block.

    Raises:
        RecipeError: Another run uses the folder, it cannot be written, or it belongs to another
            user, who could redirect writes by links.
    """
    with contextlib.ExitStack() as stack:
        try:
            if (owner := path.stat().st_uid) != os.geteuid():
                rule = f"belongs to user {owner}, not to {os.geteuid()}"
                raise RecipeError(f"{path}: {rule}; give another folder; nothing was written")
            lock = stack.enter_context(open(path / LOCK, "a", opener=open_itself))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(lock.fileno()), (path / LOCK).stat()):
                raise BlockingIOError  # The folder was removed and created again meanwhile.
        except BlockingIOError:
            rule = "another run uses it; wait, or give another folder"
            raise RecipeError(f"{path}: {rule}") from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise RecipeError(f"{path}: {error.strerror}; give another folder") from error
        yield


def open_itself(file: str | Path, flags: int) -> int:
    """Open a file without following a symbolic link; for `open(opener=...)`."""
    return os.open(file, flags | os.O_NOFOLLOW, 0o644)


class RunFolder:
    """Owner of the files of a run, with the run's record in memory for trace and pictures.

    Attributes:
        path: The folder.
        run: The record of this session and of the rows before it.
        place: Progress of the run in words, such as "in step 3".
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run = Run()
        self.place = "during setup"
        self._latest = path / "checkpoints" / "latest"
        self._best = path / "checkpoints" / "best"

    @classmethod
    def create(cls, path: Path, recipe: Recipe) -> RunFolder:
        """Write the first files of a new run."""
        folder = cls(path)
        with folder.writing("the run's folder"):
            path.mkdir(parents=True, exist_ok=True)
            folder._describe(recipe)
            replace_text(path / "metrics.jsonl", "")
        return folder

    @classmethod
    def reopen(cls, path: Path, recipe: Recipe) -> RunFolder:
        """Cut an earlier run back to its last checkpoint, or to its start if it has none.

        Rows of later steps are dropped. Trace, memory picture and environment of the previous
        session are kept under other names.
        """
        folder = cls(path)
        with folder.writing("the run's folder"):
            folder._cut_back()
            folder._describe(recipe)
        return folder

    def _cut_back(self) -> None:
        step = self.done
        self.run = self.rows_until(step)
        kept = {(row["kind"], row["step"]) for row in self.run.rows}
        # Samples first: while a row exists, its samples do. A killed run may have samples only.
        for name in (SAMPLES, "metrics.jsonl"):
            if (file := self.path / name).is_file():
                rows = [row for row in whole_rows(file) if (row["kind"], row["step"]) in kept]
                replace_text(file, json_lines(rows))
        for name in ("trace.json", "memory.png", "environment.json"):
            file = self.path / name
            if file.exists():
                stems = (f"{file.stem}-until-step-{step}-{n}" for n in itertools.count(1))
                targets = (file.with_stem(stem) for stem in stems)
                file.rename(next(target for target in targets if not target.exists()))

    def rows_until(self, step: int) -> Run:
        """Return the rows of metrics.jsonl up to a step, its evaluation included."""
        rows = whole_rows(self.path / "metrics.jsonl")
        return Run(rows=[row for row in rows if row["step"] <= step])

    @property
    def mismatch_dir(self) -> Path:
        return self.path.absolute() / "mismatch"  # Actors may have another working directory.

    def _describe(self, recipe: Recipe) -> None:
        replace_text(self.path / "recipe.yaml", recipe_text(recipe))
        environment = json.dumps(describe_environment(), indent=2)
        replace_text(self.path / "environment.json", environment + "\n")

    def add_nodes(self, nodes: Mapping[str, str]) -> None:
        """Record the actors on each Ray node in environment.json."""
        file = self.path / "environment.json"
        environment = json.loads(file.read_text()) | {"nodes": dict(nodes)}
        replace_text(file, json.dumps(environment, indent=2) + "\n")

    def add_row(self, row: Row, samples: Sequence[Row] = ()) -> None:
        """Write a row, also of a loop that names figures as before, and its samples."""
        row = _renamed(row, self.path / "metrics.jsonl")
        self.run.rows.append(row)
        if len(self.run.rows) % KEPT_ROWS == 0:
            self.run.forget_old()
        if samples:  # before the row, so that a row has all of its samples
            self._append(SAMPLES, *samples)
        self._append("metrics.jsonl", row)

    def add_restart(self, number: int, cause: str) -> None:
        """Record a restart from the last checkpoint, with its number and its cause."""
        restart = {"time": time.time(), "restart": number, "after_step": self.done, "cause": cause}
        self._append("restarts.jsonl", restart)

    def add_replacement(self, number: int, cause: str) -> None:
        """Record the replacement of a lost engine, with its number and its cause."""
        own = {"replacement": number, "after_step": self.done, "cause": cause}
        self._append("restarts.jsonl", {"time": time.time(), **own})

    def write_json(self, name: str, values: Any) -> None:
        """Write a file about this session."""
        with self.writing(name):
            replace_text(self.path / name, json.dumps(values, indent=1) + "\n")

    def outside(self) -> int | None:
        """Return the bytes outside of tags that the newest session measured, if any."""
        file = self.path / OUTSIDE
        return json.loads(file.read_text())["bytes"] if file.is_file() else None

    def _append(self, name: str, *rows: Row) -> None:
        with self.writing(name), open(self.path / name, "a", opener=open_itself) as file:
            file.write(json_lines(rows))

    @contextlib.contextmanager
    def writing(self, what: str) -> Iterator[None]:
        """Turn an OSError inside the block, also of a rank, into a `RunError` with a remedy."""
        try:
            yield
        except (OSError, RankFailed) as failed:
            error = failed.error if isinstance(failed, RankFailed) else failed
            if not isinstance(error, OSError):
                raise
            repair = "free disk space" if error.errno in FULL else "correct that"
            remedy = f"{repair}, then {self.how_to_continue()}"
            raise RunError(f"writing {what}", one_line(failed), remedy) from failed

    @property
    def done(self) -> int:
        """Return the number of updates in the newest complete checkpoint; 0 without one."""
        if not self.has_checkpoint():
            return 0
        return int(self.last_checkpoint().name.removeprefix("step_"))

    def standing(self) -> str:
        """Return the run's progress, its last checkpoint and how to continue, for a message."""
        saved = f"; checkpoint of step {self.done} saved" if self.has_checkpoint() else ""
        return f"{self.place}{saved}; {self.how_to_continue()}"

    def has_checkpoint(self) -> bool:
        return self._latest.is_file()

    def how_to_continue(self) -> str:
        if self.has_checkpoint():
            return f"continue with: memsaver run --resume {shlex.quote(str(self.path.absolute()))}"
        return "start again: there is no checkpoint yet"

    def last_checkpoint(self) -> Path:
        if not self.has_checkpoint():
            again = f"memsaver run {shlex.quote(str(self.path / 'recipe.yaml'))}"
            raise RecipeError(f"--resume {self.path}: holds no checkpoint; start again: {again}")
        return self._latest.parent / self._latest.read_text().strip()

    def checkpoint_of(self, step: int | None) -> Path:
        """Return the checkpoint of a step, or the newest one for None.

        Raises:
            RecipeError: There is no such checkpoint; the message names the steps that have one.
        """
        if step is None and self.has_checkpoint():
            return self.last_checkpoint()
        steps = self._checkpoints()
        if step in steps:
            return self._checkpoint(step)
        if not steps:
            rule = "holds no checkpoint yet; its run saves one every checkpoint.every steps"
            raise RecipeError(f"{self.path}: {rule}")
        listed = ", ".join(map(str, steps))
        raise RecipeError(f"--step {step}: {self.path} has checkpoints of these steps: {listed}")

    def _checkpoint(self, step: int) -> Path:
        return self._latest.parent / f"step_{step}"

    def _checkpoints(self) -> list[int]:
        names = [path.name.removeprefix("step_") for path in self._latest.parent.glob("step_*")]
        return sorted(int(name) for name in names if name.isdigit())

    def checkpoint_values(self) -> dict[str, Any]:
        """Return the values that the run added to its last checkpoint."""
        values: dict[str, Any] = {}
        checkpoint = str(self.last_checkpoint())
        with contextlib.suppress(ValueError):  # Loading the checkpoint reports the fault.
            values = read_values(checkpoint)["extra"]
        return values

    def save_checkpoint(self, step: int, keep: int, write: Callable[[Path], None]) -> None:
        """Save the checkpoint of a step and keep the `keep` newest checkpoints up to this step.

        `write` creates the folder that it is given, completely or not at all.
        """
        folder = self.path.resolve() / "checkpoints"
        with self.writing(f"the checkpoint of step {step}"):
            folder.mkdir(exist_ok=True)
            _remove_partial(folder)
            write(folder / f"step_{step}")
            for file in (self.path / SAMPLES, self.path / "metrics.jsonl"):
                if file.is_file():
                    sync(file)  # A power cut leaves no gap before the checkpoint.
            replace_text(folder / "latest", f"step_{step}\n")
            self._remove_old(keep)

    def _remove_old(self, keep: int) -> None:
        """Remove checkpoints up to `done` except for the `keep` newest and the best."""
        best = self.best_checkpoint()
        steps = [step for step in self._checkpoints() if step <= self.done]
        for old in map(self._checkpoint, steps[:-keep]):
            if old != best:  # A removal that is interrupted leaves no half checkpoint.
                shutil.rmtree(old.rename(old.with_name(f"{old.name}.partial")))

    def mark_best(self, step: int, keep: int) -> None:
        """Name the checkpoint of a step as the best; it stays until another one is the best.

        If that step has no checkpoint, none is the best. The previous best goes unless it is among
        the `keep` newest.
        """
        with self.writing("checkpoints/best"):
            if not self._checkpoint(step).is_dir():
                self._best.unlink(missing_ok=True)
            else:
                replace_text(self._best, f"step_{step}\n")
            self._remove_old(keep)

    def best_checkpoint(self) -> Path | None:
        """Return the checkpoint of the best evaluation; None if none is kept."""
        if not self._best.is_file():
            return None
        return self._best.parent / self._best.read_text().strip()

    def export_of(self, step: int) -> Path:
        """Return the folder of the exported model of a step."""
        return self.path / "exports" / f"step_{step}"

    def save_export(self, step: int, write: Callable[[Path], None]) -> None:
        """Export the model of a step; `write` is as of `save_checkpoint`."""
        folder = self.export_of(step).resolve()
        with self.writing(f"the export of step {step}"):
            folder.parent.mkdir(exist_ok=True)
            _remove_partial(folder.parent)
            write(folder)

    def write_trace(self) -> None:
        timeline = Timeline()
        for span in self.run.spans:
            timeline.span(*span, process=STAGES)
        for owner, events in self.run.events.items():
            for event in sorted(events, key=lambda event: event.time):
                begin, held = event.time - event.seconds, event.committed_bytes
                sizes = {"bytes": held, "backup": event.backup_bytes}
                timeline.span(f"{event.op} {event.tag}", begin, event.time, owner, **sizes)
                timeline.counter(event.tag, event.time, {"committed": held}, process=owner)
        timeline.write(self.path / "trace.json")


def _remove_partial(folder: Path) -> None:
    """Remove the partial folders of a run that was killed while saving."""
    for partial in folder.glob("step_*.partial"):
        shutil.rmtree(partial)


def describe_environment() -> dict[str, Any]:
    """Return date, host, GPUs and package versions without creating a CUDA context."""
    packages = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "host": platform.node(),
        "cpus": len(os.sched_getaffinity(0)),
        "gpus": _gpus(),
        "python": platform.python_version(),
        "packages": packages,
    }


def _gpus() -> list[str]:
    """Return name, memory and driver of each visible GPU; an empty list if no driver answers."""
    query = "--query-gpu=uuid,name,memory.total,driver_version"
    command = ["nvidia-smi", query, "--format=csv,noheader"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    gpus = dict(line.split(", ", 1) for line in listed.stdout.splitlines())
    return _visible(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))


def _visible(gpus: Mapping[str, str], entries: str | None) -> list[str]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES shows; an unknown entry ends them, as in CUDA.

    Args:
        gpus: Description of each GPU by its UUID, by index.
        entries: Indices, beginnings of UUIDs, or UUIDs of MIG devices, which are returned as they
            are; None: the variable is not set.
    """
    if entries is None:
        return list(gpus.values())
    visible = []
    for entry in map(str.strip, entries.split(",")):
        if entry.startswith("MIG-"):
            visible.append(entry)
            continue
        named = [
            description
            for index, (uuid, description) in enumerate(gpus.items())
            if entry == str(index) or (entry.startswith("GPU-") and uuid.startswith(entry))
        ]
        if len(named) != 1:
            break
        visible += named
    return visible
