"""Folder of a run: its files, and the lock that one run at a time has.

    recipe.yaml         the resolved recipe, which `load` reads
    metrics.jsonl       a line for each step (kind "train") and evaluation (kind "eval")
    samples.jsonl       some answers of each row of metrics.jsonl
    trackers.jsonl      names of the run in its trackers, and the newest rows offered before
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
    mismatch/           weights and sequence of the first difference with `exact`
    model/              config and tokenizer of a random model
    .lock               locked while a run uses the folder

Rows are flushed immediately. Other files are replaced atomically and synced to disk.
"""

import contextlib
import errno
import fcntl
import itertools
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from memsaver.system.files import replace_text
from recipes.config.load import recipe_text
from recipes.config.recipe import Recipe
from recipes.errors import RecipeError
from recipes.logs.checkpoints import Checkpoints
from recipes.logs.environment import describe_environment
from recipes.logs.metric_rows import METRICS, SAMPLES, Row, json_lines, position_of, whole_rows
from recipes.loops.figures import renamed

ENVIRONMENT = "environment.json"
LOCK = ".lock"
OUTSIDE = "outside.json"
MARKS = ("recipe.yaml", METRICS)
"""Files that together mark the folder of a run; a project folder may hold a recipe.yaml."""
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)  # from a file system without locks


def check_holds_run(option: str, path: Path, marks: Sequence[str] = MARKS) -> None:
    """Raise a RecipeError unless the folder that an option names has these files of a run."""
    if missing := [name for name in marks if not (path / name).is_file()]:
        rule = f"holds no run (no {missing[-1]}); give the folder that memsaver run printed"
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
            if not (path / METRICS).exists():
                shutil.rmtree(path, ignore_errors=True)


def newest_run(parent: Path = Path("runs")) -> Path:
    """Return the folder of the run under `parent` that was written last, among those with rows.

    Raises:
        RecipeError: There is no such run.
    """
    files = [file for file in parent.glob(f"*/{METRICS}") if file.stat().st_size]
    files = [file for file in files if file.with_name("recipe.yaml").is_file()]
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
        if path.samefile(Path()):
            path = Path()  # By another name, it would be removed: rmdir and rmtree refuse this one.
        elif path.is_symlink():
            path = path.resolve()  # rmtree does not follow links.
    with contextlib.suppress(OSError):
        path.rmdir()  # Replace an empty folder, so that its owner is this user.
    try:
        # The working folder and a mounted folder cannot be replaced, even if they are empty.
        path.mkdir(parents=True, exist_ok=path.is_dir() and not any(path.iterdir()))
    except OSError as error:
        taken = isinstance(error, FileExistsError)
        why = f"{'is no empty folder' if taken else error.strerror}; give another folder"
        if (path / METRICS).exists():
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
            lock = stack.enter_context(open(path / LOCK, "a", opener=_open_itself))
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


def _open_itself(file: str | Path, flags: int) -> int:
    """Open a file without following a symbolic link; for `open(opener=...)`."""
    return os.open(file, flags | os.O_NOFOLLOW, 0o644)


class RunFolder:
    """Owner of the files of a run.

    Attributes:
        path: The folder.
        checkpoints: Checkpoints and exports.
        place: Progress of the run in words, such as "in step 3".
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = Checkpoints(path)
        self.place = "during setup"

    @classmethod
    def create(cls, path: Path, recipe: Recipe) -> Self:
        """Write the first files of a new run."""
        folder = cls(path)
        with folder.checkpoints.writing("the run's folder"):
            path.mkdir(parents=True, exist_ok=True)
            folder._describe(recipe)
            replace_text(path / METRICS, "")
        return folder

    @classmethod
    def reopen(cls, path: Path, recipe: Recipe) -> Self:
        """Cut an earlier run back to its last checkpoint, or to its start if it has none.

        Rows of later steps are dropped. Trace, memory picture and environment of the previous
        session are kept under other names.
        """
        folder = cls(path)
        with folder.checkpoints.writing("the run's folder"):
            folder._cut_back()
            folder._describe(recipe)
        return folder

    def _cut_back(self) -> None:
        step = self.checkpoints.done
        kept = set(map(position_of, self.rows(until=step)))
        # Samples first: while a row exists, its samples do. A killed run may have samples only.
        for name in (SAMPLES, METRICS):
            if (file := self.path / name).is_file():
                rows = whole_rows(file)
                replace_text(file, json_lines(row for row in rows if position_of(row) in kept))
        for name in ("trace.json", "memory.png", ENVIRONMENT):
            file = self.path / name
            if file.exists():
                stems = (f"{file.stem}-until-step-{step}-{n}" for n in itertools.count(1))
                targets = (file.with_stem(stem) for stem in stems)
                file.rename(next(target for target in targets if not target.exists()))

    def _describe(self, recipe: Recipe) -> None:
        replace_text(self.path / "recipe.yaml", recipe_text(recipe))
        self.write_json(ENVIRONMENT, describe_environment())

    @property
    def mismatch_dir(self) -> Path:
        return self.path.absolute() / "mismatch"  # Actors may have another working directory.

    def rows(self, until: float = float("inf"), **how: Any) -> list[Row]:
        """Return the rows up to a step, its evaluation included; `how` is as of `whole_rows`."""
        rows = whole_rows(self.path / METRICS, **how)
        return [row for row in rows if row["step"] <= until]

    def add_row(self, row: Row, samples: Sequence[Row] = ()) -> None:
        """Write a row, also of a loop that names figures as before, and its samples."""
        if samples:  # before the row, so that a row has all of its samples
            self._append(SAMPLES, *samples)
        self._append(METRICS, renamed(row))

    def add_nodes(self, nodes: dict[str, str]) -> None:
        """Record the actors on each Ray node in environment.json."""
        self.write_json(ENVIRONMENT, read_json(self.path / ENVIRONMENT) | {"nodes": nodes})

    def add_restart(self, **event: Any) -> None:
        """Record a restart of the run, or the replacement of a lost engine, with its cause."""
        done = self.checkpoints.done
        self._append("restarts.jsonl", {"time": time.time(), "after_step": done, **event})

    def write_json(self, name: str, values: Any) -> None:
        """Write a file about this session."""
        with self.checkpoints.writing(name):
            replace_text(self.path / name, json.dumps(values, indent=1) + "\n")

    def _append(self, name: str, *rows: Row) -> None:
        path = self.path / name
        with self.checkpoints.writing(name), open(path, "a", opener=_open_itself) as file:
            file.write(json_lines(rows))

    def standing(self) -> str:
        """Return the run's progress, its last checkpoint and how to continue, for a message."""
        checkpoints = self.checkpoints
        saved = f"; checkpoint of step {checkpoints.done} saved" if checkpoints.exist else ""
        return f"{self.place}{saved}; {checkpoints.how_to_continue()}"


def read_json(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file, or an empty mapping if it does not exist."""
    return json.loads(file.read_text()) if file.is_file() else {}
