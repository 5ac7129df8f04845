"""The folder of one run: what was asked, what came out, and where to continue.

recipe.yaml     the recipe as resolved, readable by `load`
metrics.jsonl   one line a step (kind "train") and an evaluation (kind "eval"), flushed as they come
trace.json      stages and memory as a Chrome trace (ui.perfetto.dev)
environment.json  date, host, GPUs and versions
outside.json    bytes outside of all tags at the start, with another project's engine
reward.png, memory.png
restarts.jsonl  one line a time that the run went on by itself after it had lost a worker
checkpoints/step_N/ and checkpoints/latest, a file that holds the name of the newest complete one
model/          config and tokenizer of a random model, where the recipe makes one
.lock           while a run is at work in it

What is replaced is replaced as a whole, and is on the disk then.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib.metadata
import itertools
import json
import os
import platform
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from memsaver.report import Timeline
from memsaver.system.machine import replace_text
from recipes.config import Recipe
from recipes.config.loading import recipe_text
from recipes.errors import RecipeError, RunError, one_line
from recipes.logs.history import STAGES, Row, Run, whole_rows
from trainer_bridge.errors import RankFailed
from trainer_bridge.training import read_values

LOCK = ".lock"
OUTSIDE = "outside.json"
PACKAGES = ("memsaver", "torch", "triton", "ray", "transformers")
QUERY = {"name": "name", "memory": "memory.total", "driver": "driver_version"}
FULL = (errno.ENOSPC, errno.EDQUOT)
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)  # of a file system that has none


@contextlib.contextmanager
def claimed(path: Path, new: bool = False) -> Iterator[None]:
    """Inside, no other process runs in this folder, which is made, and at the end goes if empty.

    new: else `FileExistsError`. `RecipeError`: a run is at work in it, it cannot be made, or it is
    another user's, who could have prepared it to lead what is written elsewhere.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        made = _make(path, new)
        lock = _lock(path)
    except FileExistsError:
        if new:
            raise
        raise RecipeError(
            f"--run-dir {path}: is a file, or below a file; give another folder"
        ) from None
    except OSError as error:
        raise RecipeError(
            f"--run-dir {path}: {error.strerror}; give a folder that can be written"
        ) from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            (path / LOCK).unlink()
            if made:
                path.rmdir()
        os.close(lock)


def _make(path: Path, new: bool) -> bool:
    """Return whether the folder was made, and not there before."""
    try:
        path.mkdir()
        return True
    except FileExistsError:
        if new or not path.is_dir():
            raise
    if (owner := path.stat().st_uid) != os.geteuid():
        whose = f"belongs to user {owner}, not to {os.geteuid()}"
        raise RecipeError(f"--run-dir {path}: {whose}; give another folder; nothing was written")
    return False


def _lock(path: Path) -> int:
    """A descriptor that holds the folder's lock while it is open."""
    while True:
        try:
            lock = _open_itself(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        except FileNotFoundError:
            path.mkdir(exist_ok=True)  # who gave it back a moment ago removed it
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(lock, 100).decode(errors="replace").strip()
            os.close(lock)
            raise RecipeError(
                f"{path}: {owner or 'a run'} is at work in it; wait, or give another folder"
            ) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                os.close(lock)
                raise
        if _is(lock, path / LOCK):
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)
            return lock
        os.close(lock)  # of a run that has ended since


def _open_itself(file: str | Path, flags: int) -> int:
    """Open a file, as an opener of `open`, but follow no link that somebody has put there."""
    return os.open(file, flags | os.O_NOFOLLOW, 0o644)


def _is(descriptor: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(file))
    except FileNotFoundError:
        return False


class RunFolder:
    """Owner of the files above. The run is kept in memory too, for the trace and the pictures."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run = Run(path=path)
        self.place = "while it was set up"  # how far the run is, for `standing`
        self._latest = path / "checkpoints" / "latest"

    @staticmethod
    def refuse_used(path: Path) -> None:
        if (path / "metrics.jsonl").exists():
            raise RecipeError(
                f"--run-dir {path}: already holds a run; use --resume {path}, or another folder"
            )
        if any(part.startswith("_ray_pkg_") for part in path.absolute().parts):
            rule = "is in a job's working_dir, which Ray deletes"
            raise RecipeError(f"--run-dir {path}: {rule}; give a folder on shared storage")

    @classmethod
    def create(cls, path: Path, recipe: Recipe) -> RunFolder:
        """A new folder; one that already holds a run is refused."""
        cls.refuse_used(path)
        folder = cls(path)
        with folder.writing("the run's folder"):
            path.mkdir(parents=True, exist_ok=True)
            folder._describe(recipe)
            replace_text(path / "metrics.jsonl", "")
        return folder

    @classmethod
    def reopen(cls, path: Path, recipe: Recipe) -> RunFolder:
        """An earlier run, cut back to its last checkpoint, or to its start where there is none yet.

        Later rows are dropped; the trace of the session that ended is kept beside.
        """
        folder = cls(path)
        with folder.writing("the run's folder"):
            folder._cut_back()
            folder._describe(recipe)
        return folder

    def _cut_back(self) -> None:
        step = self.done
        for row in self._rows():
            if row["step"] < step or (row["kind"] == "train" and row["step"] == step):
                self.run.rows.append(row)
        text = "".join(json.dumps(row) + "\n" for row in self.run.rows)
        replace_text(self.path / "metrics.jsonl", text)
        for name in ("trace.json", "memory.png", "environment.json"):
            if (self.path / name).exists():  # of the session that ended here
                (self.path / name).rename(_free_name(self.path / name, step))

    def _rows(self) -> list[Row]:
        """Return what is in the file; a killed run may leave half a line, which does not count."""
        file = self.path / "metrics.jsonl"
        return whole_rows(file.read_text().splitlines()) if file.is_file() else []

    def evaluated(self, step: int) -> bool:
        """Return whether there is an evaluation after so many steps."""
        return any(row["kind"] == "eval" and row["step"] == step for row in self._rows())

    def _describe(self, recipe: Recipe) -> None:
        replace_text(self.path / "recipe.yaml", recipe_text(recipe))
        replace_text(
            self.path / "environment.json", json.dumps(describe_environment(), indent=2) + "\n"
        )

    def add_row(self, row: Row) -> None:
        self.run.rows.append(row)
        self._append("metrics.jsonl", row)

    def add_restart(self, number: int, cause: str) -> None:
        """The run goes on by itself for the `number`-th time, from its last checkpoint."""
        restart = {"time": time.time(), "restart": number, "after_step": self.done, "cause": cause}
        self._append("restarts.jsonl", restart)

    def write_outside(self, nbytes: int) -> None:
        """nbytes: as `Monitor.outside` says, of the session that begins."""
        with self.writing(OUTSIDE):
            replace_text(self.path / OUTSIDE, json.dumps({"bytes": nbytes}) + "\n")

    def outside(self) -> int | None:
        """Returns what the newest session measured; None without one."""
        file = self.path / OUTSIDE
        return int(json.loads(file.read_text())["bytes"]) if file.is_file() else None

    def _append(self, name: str, row: Row) -> None:
        """A half line is dropped when the run goes on."""
        with self.writing(name), open(self.path / name, "a", opener=_open_itself) as file:
            file.write(json.dumps(row) + "\n")

    @contextlib.contextmanager
    def writing(self, what: str) -> Iterator[None]:
        """`RunError` where the disk takes no more inside, or a file cannot be read."""
        try:
            yield
        except (OSError, RankFailed) as failed:
            error = failed.error if isinstance(failed, RankFailed) else failed
            if not isinstance(error, OSError):
                raise
            mend = "make room there" if error.errno in FULL else "mend that"
            remedy = f"{mend}, then {self.how_to_go_on()}"
            raise RunError(f"writing {what}", one_line(failed), remedy) from failed

    @property
    def done(self) -> int:
        """Updates that the newest complete checkpoint holds; 0 where there is none yet."""
        return (
            int(self.last_checkpoint().name.removeprefix("step_")) if self.has_checkpoint() else 0
        )

    def standing(self) -> str:
        """Return how far the run came, what is saved of it, and how to go on, for a message."""
        saved = f"; checkpoint of step {self.done} saved" if self.has_checkpoint() else ""
        return f"{self.place}{saved}; {self.how_to_go_on()}"

    def has_checkpoint(self) -> bool:
        return self._latest.is_file()

    def how_to_go_on(self) -> str:
        if self.has_checkpoint():
            return f"go on with: memsaver run --resume {shlex.quote(str(self.path.absolute()))}"
        return "start again: there is no checkpoint yet"

    def last_checkpoint(self) -> Path:
        if not self.has_checkpoint():
            again = f"memsaver run {shlex.quote(str(self.path / 'recipe.yaml'))}"
            raise RecipeError(f"--resume {self.path}: holds no checkpoint; start again: {again}")
        return self._latest.parent / self._latest.read_text().strip()

    def checkpoint_values(self) -> dict[str, Any]:
        """Return what the last checkpoint holds beside the trainer's own."""
        values: dict[str, Any] = {}
        checkpoint = str(self.last_checkpoint())
        with contextlib.suppress(ValueError):  # who loads it says what is wrong with it
            values = read_values(checkpoint)["extra"]
        return values

    def save_checkpoint(self, step: int, keep: int, write: Callable[[Path], None]) -> None:
        """`write` makes the folder it is given, whole or not at all; old ones go."""
        with self.writing(f"the checkpoint of step {step}"):
            self._save_checkpoint(step, keep, write)

    def _save_checkpoint(self, step: int, keep: int, write: Callable[[Path], None]) -> None:
        folder = self.path.resolve() / "checkpoints"
        folder.mkdir(exist_ok=True)
        for partial in folder.glob("step_*.partial"):  # of a run that was killed while it saved
            shutil.rmtree(partial)
        write(folder / f"step_{step}")
        replace_text(folder / "latest", f"step_{step}\n")
        names = [entry.name.removeprefix("step_") for entry in folder.glob("step_*")]
        steps = sorted(int(name) for name in names if name.isdigit())
        for old in [number for number in steps if number <= step][:-keep]:
            shutil.rmtree(folder / f"step_{old}")

    def write_trace(self) -> None:
        timeline = Timeline()
        for name, start, end in self.run.spans:
            timeline.span(name, start, end, process=STAGES)
        for owner, events in self.run.events.items():
            for event in sorted(events, key=lambda item: item.time):
                start = event.time - event.seconds
                sizes = {"bytes": event.committed_bytes, "backup": event.backup_bytes}
                timeline.span(f"{event.op} {event.tag}", start, event.time, owner, **sizes)
                timeline.counter(
                    event.tag, event.time, {"committed": event.committed_bytes}, process=owner
                )
        timeline.write(self.path / "trace.json")

    def write_pictures(self) -> str | None:
        """Draws both pictures; returns a sentence instead where matplotlib is missing."""
        try:
            from recipes.logs import plots
        except ImportError as error:
            return f"no pictures: {error}; run: pip install 'memsaver[plots]'"
        if self.run.rows:
            plots.draw_reward(self.run, self.path / "reward.png")
        if self.run.spans:
            plots.draw_memory(self.run, self.path / "memory.png")
        return None


def _free_name(file: Path, step: int) -> Path:
    names = (f"{file.stem}-until-step-{step}-{n}{file.suffix}" for n in itertools.count(1))
    return next(free for name in names if not (free := file.with_name(name)).exists())


def describe_environment() -> dict[str, Any]:
    """Date, host and software of this process, and the GPUs of nvidia-smi, without a context.

    `gpus`: name, memory (MiB) and driver of each; `packages`: version by name, of those installed.
    """
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


def _gpus() -> list[dict[str, str]]:
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY.values())}", "--format=csv,noheader"]
    try:
        listed = subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []  # no driver here, or one that does not answer: a run goes on without
    lines = [line.split(", ") for line in listed.splitlines()]
    return [dict(zip(QUERY, words, strict=True)) for words in lines if len(words) == len(QUERY)]
